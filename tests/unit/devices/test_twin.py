"""The twin of an accelerator computes what the processor does, and finds what harms on one."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from p2ptrain.errors import AcceleratorFailed
from tests.support.twin_device import TICK_SECONDS, TwinDevice
from tests.support.twin_tensor import Misused

FAR = 1 << 30
"""Ticks: a copy that is not done before something waits for it."""


@pytest.fixture
def twin() -> Iterator[TwinDevice]:
    """Whose thread this is; nothing is left in it."""
    device = TwinDevice()
    device.prepare_thread()
    yield device
    device.assert_empty()


@pytest.fixture
def slow() -> TwinDevice:
    """Its copies take long."""
    device = TwinDevice(most_ticks=FAR, seed=3)
    device.prepare_thread()
    return device


class _Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        ctx.save_for_backward(value)
        return value * value

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (value,) = ctx.saved_tensors
        return 2 * value * gradients[0]


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 3, 3)
        self.norm = nn.BatchNorm2d(3)
        self.table = nn.Embedding(7, 48)
        self.attention = nn.Linear(48, 48)
        self.out = nn.Linear(48, 5)

    def forward(self, x: Tensor, words: Tensor) -> Tensor:
        y = _Doubled.apply(torch.relu(self.norm(self.conv(x))))
        y = y.flatten(1) + self.table(words)
        y[:, 0] += 1.0
        y = torch.softmax(self.attention(y), -1) * y
        return self.out(y)


_OPTIMIZERS: list[Callable[[Any], torch.optim.Optimizer]] = [
    lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=True),
    lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.1, foreach=False),
    lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
    lambda p: torch.optim.AdamW(p, lr=0.01, foreach=False),
]


@pytest.mark.parametrize("make", _OPTIMIZERS)
def test_it_trains_with_the_processors_bits(
    twin: TwinDevice, make: Callable[[Any], torch.optim.Optimizer]
) -> None:
    def trained(device: TwinDevice | None) -> tuple[list[float], list[Tensor], set[str]]:
        torch.manual_seed(0)
        net = _Net()
        inputs = [(torch.randn(4, 1, 6, 6), torch.randint(7, (4,))) for _ in range(3)]
        if device is not None:
            for module in net.modules():
                for name, parameter in [*module.named_parameters(recurse=False)]:
                    setattr(module, name, nn.Parameter(device.copy_in(parameter.detach())))
                for name, buffer in [*module.named_buffers(recurse=False)]:
                    setattr(module, name, device.copy_in(buffer))
            assert all(isinstance(p, nn.Parameter) for p in net.parameters())
        optimizer = make(net.parameters())
        hooked: set[str] = set()
        names = {id(p): name for name, p in net.named_parameters()}
        for p in net.parameters():
            p.register_post_accumulate_grad_hook(lambda p: hooked.add(names[id(p)]))
        losses = []
        for x, words in inputs:
            if device is not None:
                x, words = device.copy_in(x), device.copy_in(words)
            for part in (slice(0, 2), slice(2, 4)):
                loss = nn.functional.cross_entropy(net(x[part], words[part]), words[part] % 5)
                loss.backward()
                losses.append(loss.item())
            norms = torch._foreach_norm([p.grad for p in net.parameters()])
            losses.append(float(torch.stack(norms).sum()))
            nn.utils.clip_grad_norm_(net.parameters(), 0.5, foreach=True)
            optimizer.step()
            optimizer.zero_grad()
        state = list(net.state_dict(keep_vars=True).values())
        if device is not None:
            state = device.fetched(state)  # type: ignore[assignment]
        return losses, state, hooked

    losses, state, hooked = trained(None)
    losses_there, state_there, hooked_there = trained(twin)
    assert losses_there == losses
    assert all(torch.equal(*pair) for pair in zip(state, state_there, strict=True))
    assert hooked == hooked_there


def test_a_backward_runs_in_autograds_thread_as_on_cuda(twin: TwinDevice) -> None:
    threads: list[int] = []
    x = twin.copy_in(torch.ones(2)).requires_grad_()
    y = x * 2
    y.register_hook(lambda _: threads.append(threading.get_ident()))
    (y * torch.ones(2, device=twin.place)).sum().backward()
    assert threads != [threading.get_ident()]
    assert x.grad is not None
    assert x.grad.device == twin.place


@pytest.mark.parametrize(
    "make",
    [
        lambda place: torch.zeros(2, device=place),
        lambda place: torch.arange(1, 5, device=place),
        lambda place: torch.tensor([1.0, 2.0], device=place),
        lambda place: torch.full((2,), 3, device=place),
        lambda place: torch.ones(2, device=place).new_zeros(3),
        lambda place: torch.randn(3, device=place),
        lambda place: torch.ops.aten.scalar_tensor.default(1.0, device=place),
        lambda place: torch.ones(3).to(place),
    ],
)
def test_what_is_made_there_is_there(
    twin: TwinDevice, make: Callable[[torch.device], Tensor]
) -> None:
    made = make(twin.place)
    assert made.device == twin.place != torch.zeros(1).device
    with pytest.raises(RuntimeError, match="same device"):
        _ = made + torch.ones_like(made, device="cpu").reshape(-1)
    with pytest.raises(TypeError, match="numpy"):
        made.numpy()


@pytest.mark.parametrize(
    "mix",
    [
        lambda here, there: here + there,
        lambda here, there: there.add_(here),
        lambda here, there: torch.cat([there, here]),
        lambda here, there: torch._foreach_add([there], [here]),
        lambda here, there: torch.where(there > 0, there, here),
    ],
)
def test_memories_do_not_mix(twin: TwinDevice, mix: Callable[[Tensor, Tensor], object]) -> None:
    other = TwinDevice(name="twin:1")
    there, here = twin.copy_in(torch.ones(2)), torch.ones(2)
    with pytest.raises(RuntimeError, match=r"same device.*twin:0 and cpu"):
        mix(here, there)
    with pytest.raises(RuntimeError, match=r"same device.*twin:0 and twin:1|twin:1 and twin:0"):
        mix(other.copy_in(here), there)
    assert (there * torch.tensor(2.0)).sum().item() == 4.0  # a number is none of a memory


def test_views_share_memory_and_versions_and_data_can_be_exchanged(twin: TwinDevice) -> None:
    base = twin.copy_in(torch.zeros(2, 3))
    row = base[1]

    def version() -> int:
        number: int = base._version
        return number

    before = version()
    row += 1
    assert version() > before
    assert base.sum().item() == 3.0
    assert row.untyped_storage().data_ptr() == base.untyped_storage().data_ptr()
    assert base.clone().untyped_storage().data_ptr() != base.untyped_storage().data_ptr()
    before = version()
    with _unsafe_preserve_version_counter(base):
        base.zero_()
    assert version() == before
    parameter = nn.Parameter(base)
    parameter.data = twin.copy_in(torch.full((2, 3), 7.0))
    assert parameter.sum().item() == 42.0
    assert base.sum().item() == 0.0
    base.resize_(1, 2)
    assert base.shape == (1, 2)


def test_strides_stay_in_both_directions(twin: TwinDevice) -> None:
    image = torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)
    inside = twin.copy_in(image.requires_grad_())
    assert inside.stride() == image.stride()
    assert inside.requires_grad
    assert inside.is_leaf
    (back,) = twin.fetched([inside])
    assert back is not None
    assert back.stride() == image.stride()
    assert torch.equal(back, image)


async def test_a_copy_out_holds_no_numbers_before_it_has_arrived(slow: TwinDevice) -> None:
    slow = TwinDevice(most_ticks=20, seed=3)
    slow.prepare_thread()
    there, slot = slow.copy_in(torch.arange(3.0)), torch.zeros(3)
    copies = slow.copy_out([there, None, there], [None, None, slot])
    assert copies.tensors[1] is None
    assert copies.tensors[2] is slot
    assert slot.isnan().all()
    await copies.arrived()
    assert slot.tolist() == [0.0, 1.0, 2.0]
    slow.assert_well_used()


def test_a_change_during_a_copy_out_is_found_unless_it_waits(slow: TwinDevice) -> None:
    there = slow.copy_in(torch.ones(4))
    waiting = slow.copy_out([there], written=True)
    there.add_(1)
    waiting.wait()
    assert waiting.tensors[0].tolist() == [1.0] * 4  # type: ignore[union-attr]
    halves = slow.copy_out([there[:2]])
    there[2:].add_(1)
    halves.wait()
    assert halves.tensors[0].tolist() == [2.0] * 2  # type: ignore[union-attr]
    slow.assert_well_used()
    torn = slow.copy_out([there])
    there[1:].mul_(3)
    torn.wait()
    assert torn.tensors[0].isnan().all()  # type: ignore[union-attr]
    with pytest.raises(AssertionError, match="changed while it was copied out"):
        slow.assert_well_used()


@pytest.mark.parametrize("into", [False, True])
def test_writing_to_the_hosts_side_of_a_copy_is_found(slow: TwinDevice, into: bool) -> None:
    source = torch.ones(3)
    there = slow.copy_in(source)
    assert there.sum().item() == 3.0
    if into:
        slow.wait()
        copies = slow.copy_out([there])
        copies.tensors[0].zero_()  # type: ignore[union-attr]
    else:
        source.zero_()
    slow.wait()
    with pytest.raises(AssertionError, match="before"):
        slow.assert_well_used()


def test_another_thread_must_not_compute(twin: TwinDevice) -> None:
    there = twin.copy_in(torch.ones(3))
    errors: list[BaseException] = []

    def other() -> None:
        try:
            there.view(3, 1)
            there.add_(1)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert isinstance(errors.pop(), Misused)


def test_its_memory_ends_and_is_given_back() -> None:
    small = TwinDevice(total_bytes=4096)
    small.prepare_thread()
    there = small.copy_in(torch.ones(512))
    assert small.memory().taken_bytes == 2048
    view = there[:3]
    del there
    with pytest.raises(AssertionError, match="1 tensors are left"):
        small.assert_empty()
    with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate"):
        torch.zeros(1024, device=small.place)
    small.others_bytes = 2048
    with pytest.raises(torch.OutOfMemoryError):
        view.clone()
    del view
    small.assert_empty()
    assert small.memory().free_bytes == 2048


async def test_it_fails_when_it_is_wanted_and_stays_so(twin: TwinDevice) -> None:
    there = twin.copy_in(torch.ones(3))
    copies = twin.copy_out([there])
    twin.fail_from(len(twin.call_names) + 1)
    there = there + 1
    with pytest.raises(torch.AcceleratorError):
        there + 1
    for call in (twin.wait, copies.wait, lambda: twin.copy_in(torch.ones(1))):
        with pytest.raises(AcceleratorFailed, match="twin:0 has failed"):
            call()
    with pytest.raises(AcceleratorFailed):
        await copies.arrived()


def test_it_computes_wrong_where_it_is_wanted(twin: TwinDevice) -> None:
    twin.compute_wrong("aten.mul.Tensor", backward=True)
    x = twin.copy_in(torch.ones(3)).requires_grad_()
    y = x * x
    assert y.sum().item() == 3.0
    y.sum().backward()
    assert x.grad is not None
    assert twin.fetched([x.grad])[0].isnan().all()  # type: ignore[union-attr]


def test_it_draws_numbers_of_its_own(twin: TwinDevice) -> None:
    def drawn(place: torch.device) -> list[Tensor]:
        torch.manual_seed(5)
        ones = torch.ones(64, device=place)
        return [torch.dropout(ones, 0.5, True).cpu(), torch.rand(64, device=place).cpu()]

    here, there = drawn(torch.device("cpu")), drawn(twin.place)
    assert [torch.equal(*pair) for pair in zip(here, there, strict=True)] == [False, False]
    after = torch.rand(2)
    torch.manual_seed(5)
    assert torch.equal(torch.rand(2), after)


def test_its_watch_counts_its_operators_and_the_host_is_seen_to_wait(twin: TwinDevice) -> None:
    there = twin.copy_in(torch.ones(3))
    _, watch = twin.timed(lambda: there * 2 + 1)
    there.sum()
    assert watch.seconds() == 2 * TICK_SECONDS
    assert twin.host_waits == []
    there.sum().item()
    there.to("cpu")
    assert [name for name, _ in twin.host_waits] == [
        "aten._local_scalar_dense.default",
        "aten._to_copy.default",
    ]
