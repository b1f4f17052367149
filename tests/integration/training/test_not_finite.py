"""An update that is not finite: it never counts, and it is said where it began. On every plan."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from p2ptrain import events
from p2ptrain.errors import OptionError, TrainingError
from p2ptrain.events import Done, Plan, Step
from p2ptrain.job.asynchrony import AsyncOptions, FtpipehdOptions
from p2ptrain.job.job import Job
from p2ptrain.job.train_options import TrainOptions
from p2ptrain.model.stage.optimizer_spec import SGD, Adam
from p2ptrain.state import checkpoint_files
from tests.integration.training.delayed import options as asynchronous
from tests.integration.training.ftpipehd import Speeds, as_published
from tests.integration.training.group_plans import dealt, device_count, divided, force
from tests.integration.training.household import Devices, devices
from tests.integration.training.jobs import assert_same_weights, undisturbed
from tests.support.curves import form_of
from tests.support.twin_device import TwinDevice

GOOD = 5
"""Updates before the one that has the sample."""
PLACE = 3
"""Of the sample in its mini-batch: micro-batch 1, its second sample."""


class Poison(torch.autograd.Function):
    """NaN for the gradients of samples that are marked."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mark: Tensor) -> Tensor:
        """As it is."""
        ctx.save_for_backward(mark)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Not as they are."""
        (mark,) = ctx.saved_tensors
        return torch.where(mark[:, None] > 0.5, torch.nan, gradients[0]), None


class Layer(nn.Module):
    """Passes a mark on beside its values."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.inner, self.where = nn.Linear(6, 6), where

    def forward(self, given: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Values and mark."""
        x, mark = given
        y = torch.tanh(self.inner(x))
        if self.where == "backward":
            y = Poison.apply(y, mark)  # type: ignore[no-untyped-call]
        elif self.where:
            y = torch.where(mark[:, None] > 0.5, float(self.where), y)
        return y, mark


class Net(nn.Module):
    """Six layers, of which number 3 does not bear marked samples."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(where if index == 3 else "") for index in range(6))
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        """The mark is the last column."""
        values = (x[:, :6], x[:, 6])
        for layer in self.layers:
            values = layer(values)
        out: Tensor = self.head(values[0])
        return out


def marked() -> int:
    """Which sample of the data is."""
    order = torch.randperm(96, generator=torch.Generator().manual_seed(0))
    return int(order[GOOD * 8 + PLACE])


def job(where: str = "backward", **changes: Any) -> Job:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(4)
        model = Net(where)
        x = torch.cat([torch.randn(96, 6), torch.zeros(96, 1)], 1)
        x[marked(), 6] = 1.0
        data = list(zip(x, torch.randint(3, (96,)), strict=True))
    given: dict[str, Any] = {"optimizer": SGD(lr=0.1, momentum=0.9), "batch_size": 8, **changes}
    return Job(model, data, cross_entropy, micro_batch=2, **given)


def steps(household: Devices) -> list[int]:
    return [event.step for event in household.events if isinstance(event, Step)]


PLANS: dict[str, Sequence[Any]] = {
    "a pipeline": [divided(2), divided(2), divided(2)],
    "samples in a group": [divided(2), divided(1, 1)],
    "micro-batches in a group": [dealt(2, 2), divided(2)],
    "one group": [dealt(3, 1)],
}


@pytest.mark.parametrize(
    ("plan", "where"), [*((plan, "backward") for plan in PLANS), ("a pipeline", "inf")]
)
async def test_it_ends_the_job_before_it_counts_and_its_origin_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, plan: str, where: str
) -> None:
    force(monkeypatch, PLANS[plan])
    wanted, what, out = undisturbed(job(where), GOOD), job(where), tmp_path / "out.safetensors"
    count = device_count(PLANS[plan])
    options = TrainOptions(wait_for=count, out=out, checkpoint=tmp_path / "checkpoints")
    async with devices(count) as household:
        with pytest.raises(TrainingError) as caught:
            await household.holder_run(what, options).run()
    way = "backward" if where == "backward" else "forward"
    told = rf"step 6\. .* layer \"layers\.3\S* on [abc], in the {way} of micro-batch 1, sample "
    assert re.search(told + rf"{marked()} of the data\. .* weights of step 5", str(caught.value))
    assert steps(household) == [1, 2, 3, 4, 5]
    if plan == "a pipeline":
        assert household.losses == wanted.losses
        assert_same_weights(what, wanted)
    written = load_file(out)
    state = what.model.state_dict()
    assert all(torch.equal(written[name], state[name]) for name in written)
    assert all(tensor.isfinite().all() for tensor in written.values())


@pytest.mark.parametrize("twins", ["", "a"])
async def test_on_one_device_alone_too(tmp_path: Path, twins: str) -> None:
    """An accelerator has made the update by then, and what was before it is kept."""
    wanted, what = undisturbed(job(), GOOD), job()
    async with devices(1, compute={name: TwinDevice() for name in twins}) as household:
        options = TrainOptions(local=True, out=tmp_path / "out.safetensors")
        with pytest.raises(TrainingError, match=rf"in the backward .* sample {marked()} of the"):
            await household.holder_run(what, options).run()
    assert household.losses == wanted.losses
    assert_same_weights(what, wanted)


@pytest.mark.parametrize("kind", ["stashed", "ftpipehd"])
async def test_without_a_barrier_too(tmp_path: Path, kind: str) -> None:
    what, out = job(), tmp_path / "out.safetensors"
    async with devices(3) as household:
        if kind == "stashed":
            run = household.holder_run(what, asynchronous(3, AsyncOptions(), 12, out=out))
            with pytest.raises(TrainingError, match=rf"step 6\. .* sample {marked()} of the data"):
                await run.run()
        else:
            with Speeds({}).in_place():
                run = household.holder_run(what, as_published(3, 12, FtpipehdOptions(), out=out))
                with pytest.raises(TrainingError, match=rf"sample {marked()} of the data"):
                    await run.run()
    assert steps(household) == [1, 2, 3, 4, 5]
    assert all(tensor.isfinite().all() for tensor in load_file(out).values())


@pytest.mark.parametrize(
    ("plan", "clip", "twins"),
    [
        ("a pipeline", None, ""),
        ("a pipeline", None, "b"),
        ("a pipeline", 1e30, ""),
        ("one group", None, ""),
        ("one group", 1e30, ""),
    ],
)
async def test_weights_that_an_update_would_leave_infinite(
    monkeypatch: pytest.MonkeyPatch, plan: str, clip: float | None, twins: str
) -> None:
    """Gradients are finite, and so is the learning rate; their product is not."""
    force(monkeypatch, PLANS[plan])

    def schedule(update: int) -> float:
        return 1e30 if update >= 3 else 1e-12

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return 1e12 * cross_entropy(output, target)

    def growing() -> Job:
        made = job("")
        more = {"schedule": schedule, "clip_grad_norm": clip, "micro_batch": 2}
        return Job(made.model, made.data, loss, optimizer=SGD(lr=0.1), batch_size=8, **more)

    wanted, what, count = undisturbed(growing(), 3), growing(), device_count(PLANS[plan])
    async with devices(count, compute={name: TwinDevice() for name in twins}) as household:
        told = r"the update of \S+ .* would leave it NaN or infinite at step 4\. Try"
        with pytest.raises(TrainingError, match=told):
            await household.holder_run(what, TrainOptions(wait_for=count)).run()
    assert steps(household) == [1, 2, 3]
    plans = sum(isinstance(event, Plan) for event in household.events)
    assert plans == 2, "the device that says so is not believed the first time"
    if plan == "a pipeline":
        assert household.losses == wanted.losses
        assert_same_weights(what, wanted)


async def test_data_that_is_not_finite_is_named_by_its_index() -> None:
    what = job("")
    data = [(x.clone(), y) for x, y in what.data]  # type: ignore[attr-defined]
    data[marked()][0][2] = torch.inf
    object.__setattr__(what, "data", data)
    async with devices(2) as household:
        told = rf"The data contain NaN or infinity \(sample {marked()} of the data\)"
        with pytest.raises(TrainingError, match=told):
            await household.holder_run(what).run()
    assert steps(household) == [1, 2, 3, 4, 5]


async def test_the_newest_checkpoint_is_of_the_last_good_step_and_goes_on(tmp_path: Path) -> None:
    async with devices(2) as household:
        options = TrainOptions(wait_for=2, planner="pp", checkpoint=tmp_path, checkpoint_every=1)
        with pytest.raises(TrainingError, match="weights of step 5"):
            await household.holder_run(job(), options).run()
    found = checkpoint_files.load(tmp_path, lambda _: None)
    assert 1 <= found.progress.step <= GOOD
    assert all(tensor.isfinite().all() for tensor in found.model.values())


def without(what: Job, left_out: int) -> tuple[list[float], dict[str, Tensor]]:
    """Plain torch, which leaves that update out: its number counts, and nothing else."""
    model, schedule = what.model, what.schedule or (lambda update: 1.0)
    optimizer = form_of(what).build(model.parameters())
    (rate,) = (group["lr"] for group in optimizer.param_groups)
    order = torch.randperm(96, generator=torch.Generator().manual_seed(0))
    losses: list[float] = []
    for step in range(12):
        total = 0.0
        for q in order[step * 8 : step * 8 + 8].split(2):
            x = torch.stack([what.data[i][0] for i in q.tolist()])
            y = torch.stack([what.data[i][1] for i in q.tolist()])
            loss = cross_entropy(model(x), y)
            (loss * 0.25).backward()
            total += loss.item() * 0.25
        losses.append(total)
        if step != left_out:
            for group in optimizer.param_groups:
                group["lr"] = rate * schedule(step)
            optimizer.step()
        optimizer.zero_grad()
    return losses, {name: tensor.clone() for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize(
    ("plan", "where", "optimizer"),
    [
        ("a pipeline", "backward", Adam(lr=0.01)),
        ("a pipeline", "nan", SGD(lr=0.1, momentum=0.9)),
        ("samples in a group", "nan", SGD(lr=0.1, momentum=0.9)),
        ("one group", "backward", Adam(lr=0.01)),
    ],
)
async def test_left_out_where_the_job_says_so(
    monkeypatch: pytest.MonkeyPatch, plan: str, where: str, optimizer: Any
) -> None:
    force(monkeypatch, PLANS[plan])
    schedule: Callable[[int], float] = lambda update: 0.9**update  # noqa: E731
    changes = {"skip_nonfinite": True, "optimizer": optimizer, "schedule": schedule}
    losses, state = without(job(where, **changes), GOOD)
    what = job(where, **changes)
    count = device_count(PLANS[plan])
    async with devices(count) as household:
        await household.holder_run(what, TrainOptions(wait_for=count)).run()
    assert steps(household) == list(range(1, 13))
    told = [event.message for event in household.events if isinstance(event, events.Warning)]
    assert [message for message in told if "step 6" in message] == [
        "step 6 has NaN or infinite values: it is skipped, and training continues"
    ]
    (done,) = [event for event in household.events if isinstance(event, Done)]
    assert done.updates_left_out == 1
    if plan == "a pipeline":
        assert str(household.losses) == str(losses)  # NaN is no number, and the same text
        for name, tensor in state.items():
            assert torch.equal(what.model.state_dict()[name], tensor), name
    else:
        for name, tensor in state.items():
            assert torch.allclose(what.model.state_dict()[name], tensor, atol=1e-5), name


async def test_leaving_out_needs_rounds() -> None:
    async with devices(2) as household:
        with pytest.raises(OptionError, match="skip_nonfinite"):
            await household.holder_run(
                job(skip_nonfinite=True), asynchronous(2, AsyncOptions(), 5)
            ).run()
