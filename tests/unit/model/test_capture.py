"""What capture gives on the holder's side, and what it says to those whose model it cannot take."""

from __future__ import annotations

import linecache
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._higher_order_ops.associative_scan import associative_scan
from torch._higher_order_ops.while_loop import while_loop
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.functional import cross_entropy, ctc_loss, mse_loss
from torch.utils.checkpoint import checkpoint

from p2ptrain.errors import CaptureError, InternalError, ScriptError
from p2ptrain.model.capture import capture
from p2ptrain.model.captured import Captured
from p2ptrain.model.graph import StateRef
from p2ptrain.model.stage import Stage
from tests.unit.model.conftest import Prepared
from tests.unit.model.odd_models import AfterLinear

Get = Callable[..., Prepared]

_EXAMPLE = torch.randn(4, 8), torch.randn(4, 8)


def _decides(x: Tensor) -> Tensor:
    return x + 1 if x.sum() > 0 else x


def _fixed_batch(x: Tensor) -> Tensor:
    return x.reshape(4, 2, 4).flatten(1)


def _only_even_batches(x: Tensor) -> Tensor:
    return x if x.shape[0] % 2 else x + 1


def _as_pairs(x: Tensor) -> Tensor:
    first, second = x.chunk(2)
    return torch.cat([first - second, second])


def _every_other(x: Tensor) -> Tensor:
    return (x[::2] - x[1::2]).repeat(2, 1)


def _as_threes(x: Tensor) -> Tensor:
    return x.reshape(-1, 3, 8).flip(1).flatten(0, 1)


def _normalises_channels(x: Tensor) -> Tensor:
    return nn.CrossMapLRN2d(2)(x.reshape(-1, 2, 2, 2)).flatten(1)


def _leaves_torch(x: Tensor) -> Tensor:
    return torch.from_numpy(x.detach().numpy()) + x


def _counts_samples(x: Tensor) -> Tensor:
    return torch.stack([x[k] + 1 for k in range(len(x))])


def _loops_over_samples(x: Tensor) -> Tensor:
    return torch.stack([row + 1 for row in x])


def _asserts(x: Tensor) -> Tensor:
    assert not x.isnan().any()
    return x


def _raises(x: Tensor) -> Tensor:
    if (
        x.isnan().any() or x.isinf().any()  # on a line of its own
    ):
        told = "not a number"
        raise ValueError(told)
    return x


def _raises_or_computes(x: Tensor) -> Tensor:
    if x.isnan().any():
        raise ValueError("not a number")
    else:  # noqa: RET506
        return x + 1


def _branches(x: Tensor) -> Tensor:
    out: Tensor = torch.cond(x.sum() > 0, lambda x: x * 2, lambda x: x * 3, (x,))  # type: ignore[no-untyped-call]
    return out


def _loops_until(x: Tensor) -> Tensor:
    out: Tensor = while_loop(lambda x: x.norm() > 1, lambda x: (x * 0.5,), (x,))[0]
    return out


def _scans(x: Tensor) -> Tensor:
    out: Tensor = associative_scan(lambda a, b: a * b, x, 1, combine_mode="generic")
    return out


def _skips_experts(x: Tensor) -> Tensor:
    chosen = (x[:, 0] > 0).nonzero()[:, 0]
    if chosen.numel() == 0:
        return x
    return x.index_add(0, chosen, x[chosen])


def _lists_a_number_for_each(x: Tensor) -> Tensor:
    return x * torch.tensor([2.0] * x.shape[0])[:, None]


def _other_operator(x: Tensor) -> Tensor:
    return torch.ops.aten.resize.default(x, [x.shape[0], 8])


_CALLS_F = AfterLinear.forward.__code__


@pytest.mark.parametrize(
    ("f", "says"),
    [
        (_decides, "return x + 1 if x.sum() > 0 else x"),
        (_decides, "torch.where"),
        (_fixed_batch, "return x.reshape(4, 2, 4).flatten(1)"),
        (_fixed_batch, "one batch size only"),
        (_only_even_batches, "one batch size only"),
        (_only_even_batches, "return x if x.shape[0] % 2 else x + 1"),
        (_only_even_batches, "satisfy the generated guard"),
        (_as_pairs, "return torch.cat([first - second, second])"),
        (_as_pairs, "only for batches that can be divided by 2"),
        (_every_other, "return (x[::2] - x[1::2]).repeat(2, 1)"),
        (_every_other, "only for batches that can be divided by 2"),
        (_as_threes, "return x.reshape(-1, 3, 8).flip(1).flatten(0, 1)"),
        (_as_threes, "only for batches that can be divided by 3"),
        (_normalises_channels, "return nn.CrossMapLRN2d(2)(x.reshape(-1, 2, 2, 2)).flatten(1)"),
        (_normalises_channels, "torch's CrossMapLRN2d takes one batch size only"),
        (_counts_samples, "return torch.stack([x[k] + 1 for k in range(len(x))])"),
        (_counts_samples, "one batch size only"),
        (_loops_over_samples, "for row in x"),
        (_leaves_torch, "return torch.from_numpy(x.detach().numpy()) + x"),
        (_other_operator, "aten.resize.default"),
        (_asserts, "Remove the check"),
        (_raises, "Remove the check"),
        (_raises_or_computes, "torch.where"),
        (_branches, "torch.where(condition, one, other)"),
        (_loops_until, "a Python loop with as many steps as may be needed"),
        (_scans, "combine_mode="),
        (_scans, "not carry associative_scan to other devices. Use torch.cumsum"),
        (_skips_experts, "if chosen.numel() == 0:"),
        (_skips_experts, "can be left out: operations on no elements do nothing"),
        (_lists_a_number_for_each, "return x * torch.tensor([2.0] * x.shape[0])[:, None]"),
        (_lists_a_number_for_each, "torch.full((n,), value)"),
        (_counts_samples, "Python itself takes it as a plain number"),
        (_branches, f'File "{_CALLS_F.co_filename}", line {_CALLS_F.co_firstlineno + 1}'),
    ],
)
def test_what_cannot_be_captured_is_explained(
    f: Callable[[Tensor], Tensor], says: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(CaptureError) as caught:
        capture(AfterLinear(f), mse_loss, _EXAMPLE)
    assert says in str(caught.value)
    assert "def forward" not in capfd.readouterr().err


def test_a_layer_of_torch_that_decides_on_values_is_explained() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8, momentum=None))
    with pytest.raises(CaptureError, match="momentum=None"):
        capture(model, mse_loss, _EXAMPLE)


def test_a_layer_of_torch_that_fixes_the_batch_size_is_named() -> None:
    layers = nn.Unflatten(1, (2, 2, 2)), nn.CrossMapLRN2d(2), nn.Flatten()
    with pytest.raises(CaptureError, match=r"captured: torch's CrossMapLRN2d takes one batch size"):
        capture(nn.Sequential(nn.Linear(8, 8), *layers), mse_loss, _EXAMPLE)


def test_the_users_own_line_is_named() -> None:
    with pytest.raises(CaptureError) as caught:
        capture(AfterLinear(_decides), mse_loss, _EXAMPLE)
    line = _decides.__code__.co_firstlineno + 1
    assert f"{__file__}:{line} " in str(caught.value)
    assert "x.sum()" in linecache.getline(__file__, line)


@pytest.mark.parametrize(
    ("loss", "says"),
    [
        (lambda o, t: mse_loss(o, t, reduction="none"), r"shape \['batch', 8\]"),
        (lambda o, t: (o > t).sum(), "torch.int64"),
        (lambda o, t: 1.0, "a float"),
    ],
)
def test_a_loss_that_is_no_single_number_is_refused(loss: Any, says: str) -> None:
    with pytest.raises(CaptureError, match=says):
        capture(nn.Linear(8, 8), loss, _EXAMPLE)


@pytest.mark.parametrize(
    "example",
    [
        (torch.randn(1, 8), torch.randn(1, 8)),
        (torch.randn(4, 8), torch.randn(3, 8)),
        (torch.randn(4, 8), torch.tensor(1.0)),
        ((), torch.randn(4, 8)),
        (object(), torch.randn(4, 8)),
    ],
)
def test_an_unusable_example_is_refused(example: Any) -> None:
    with pytest.raises(ScriptError):
        capture(nn.Linear(8, 8), mse_loss, example)


def _hooked(x: Tensor) -> Tensor:
    x.register_hook(lambda gradient: gradient * 2)  # type: ignore[no-untyped-call]
    return x


def _node_hooked(x: Tensor) -> Tensor:
    made = torch.tanh(x)
    assert made.grad_fn is not None
    assert made.grad_fn.name() == "TanhBackward0"
    made.grad_fn.register_hook(lambda given, got: [gradient * 2 for gradient in given])
    return made


def _with_module_hook() -> nn.Module:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model[0].register_full_backward_hook(lambda module, given, got: None)
    return model


def _with_parameter_hook() -> nn.Module:
    model = nn.Linear(8, 8)
    model.weight.register_hook(lambda gradient: gradient * 2)  # type: ignore[no-untyped-call]
    return model


@pytest.mark.parametrize(
    ("model", "says"),
    [
        (AfterLinear(_hooked), r"forward\(\) changes or reads"),
        (AfterLinear(_node_hooked), r"forward\(\) changes or reads"),
        (_with_module_hook(), "0 changes or reads"),
        (_with_parameter_hook(), "weight changes or reads"),
    ],
)
def test_hooks_on_gradients_are_refused(model: nn.Module, says: str) -> None:
    with pytest.raises(CaptureError, match=f"{says} gradients in a backward hook"):
        capture(model, mse_loss, _EXAMPLE)


def test_packing_what_autograd_keeps_is_refused() -> None:
    def packs(x: Tensor) -> Tensor:
        with saved_tensors_hooks(lambda kept: kept.half(), lambda kept: kept.float()):
            return torch.tanh(x)

    with pytest.raises(CaptureError, match="Remove the hooks"):
        capture(AfterLinear(packs), mse_loss, _EXAMPLE)


def test_switching_autocast_by_hand_is_refused() -> None:
    def switches(x: Tensor) -> Tensor:
        torch.set_autocast_enabled("cpu", True)
        try:
            return (x @ x.T @ x).float()
        finally:
            torch.set_autocast_enabled("cpu", False)

    with pytest.raises(CaptureError, match=r"Use `with torch\.autocast"):
        capture(AfterLinear(switches), mse_loss, _EXAMPLE)


class _Freezes(nn.Module):
    """A critic that `freeze` is asked to freeze and to free, around its use."""

    def __init__(self, freeze: Callable[[nn.Linear, bool], object]) -> None:
        super().__init__()
        self.linear, self.critic = nn.Linear(8, 8), nn.Linear(8, 8)
        self.freeze = freeze

    def forward(self, x: Tensor) -> Tensor:
        self.freeze(self.critic, False)
        x = self.critic(self.linear(x))
        self.freeze(self.critic, True)
        return x


def _assigns(critic: nn.Linear, value: bool) -> None:
    critic.weight.requires_grad = value


@pytest.mark.parametrize(
    "freeze",
    [
        lambda critic, value: critic.requires_grad_(value),
        lambda critic, value: critic.weight.requires_grad_(requires_grad=value),
        _assigns,
    ],
)
def test_a_parameter_that_is_frozen_for_a_while_is_refused(
    freeze: Callable[[nn.Linear, bool], object],
) -> None:
    model = _Freezes(freeze)
    with pytest.raises(CaptureError, match="switches requires_grad of a parameter"):
        capture(model, mse_loss, _EXAMPLE)
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_other_switches_of_gradients_are_followed() -> None:
    def f(x: Tensor) -> Tensor:
        return x + torch.tanh(x.detach().requires_grad_())

    assert capture(AfterLinear(f), mse_loss, _EXAMPLE).description.units
    free = _Freezes(lambda critic, value: critic.requires_grad_(True))
    assert capture(free, mse_loss, _EXAMPLE).description.units


class _Anneals(nn.Module):
    """Computes with a number that it changes itself."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.temperature = 2.0

    def forward(self, x: Tensor) -> Tensor:
        self.temperature *= 0.9
        out: Tensor = self.linear(x) / self.temperature
        return out


def test_numbers_that_change_from_batch_to_batch_are_refused() -> None:
    with pytest.raises(CaptureError, match=r"numbers .* \(0\.temperature\)"):
        capture(nn.Sequential(_Anneals()), mse_loss, _EXAMPLE)


def test_distributions_that_look_at_their_arguments_are_captured() -> None:
    def sampled(x: Tensor) -> Tensor:
        return torch.distributions.Normal(x, torch.ones_like(x)).rsample()

    before = torch.distributions.Normal(0.0, 1.0)._validate_args
    assert capture(AfterLinear(sampled), mse_loss, _EXAMPLE).description.units
    assert torch.distributions.Normal(0.0, 1.0)._validate_args == before


def _operators(model: nn.Module) -> list[str]:
    return [node.operator for node in capture(model, mse_loss, _EXAMPLE).description.train.nodes]


def test_torchscript_that_has_run_is_captured_as_it_is_written() -> None:
    """By then it differentiates by itself, and detaches what it computes with."""
    layers = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
    compiled: Any = torch.jit.script(layers)
    for _ in range(4):
        x = torch.ones(2, 8, requires_grad=True)
        torch.autograd.grad(compiled(x).sum(), x)
    expected = _operators(nn.Sequential(nn.Linear(8, 8), layers))
    assert _operators(nn.Sequential(nn.Linear(8, 8), compiled)) == expected


class _Checkpointed(nn.Module):
    """Its inside is computed again in the backward."""

    def __init__(self, *before: nn.Module) -> None:
        super().__init__()
        self.before = nn.Sequential(*before)
        self.inside = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = checkpoint(self.inside, self.before(x), use_reentrant=True)
        return out


@pytest.mark.parametrize("before", [[], [nn.Linear(8, 8)]])
def test_a_reentrant_checkpoint_learns_behind_something_that_does(before: list[nn.Module]) -> None:
    model = nn.Sequential(_Checkpointed(*before), nn.Linear(8, 8))
    nodes = capture(model, mse_loss, _EXAMPLE).description.train.nodes
    (inside,) = [node for node in nodes if StateRef("0.inside.weight") in node.args]
    assert inside.grad_enabled == bool(before)


def test_a_ctc_loss_is_captured_and_equals_plain_torch() -> None:
    def loss(output: Tensor, target: Tensor) -> Tensor:
        frames = output.unflatten(1, (4, 2)).log_softmax(2).transpose(0, 1)
        lengths = torch.full((target.shape[0],), 4), torch.full((target.shape[0],), 2)
        return ctc_loss(frames, target, *lengths)

    model, x = nn.Linear(8, 8), torch.randn(4, 8)
    target = torch.ones(4, 2, dtype=torch.int64)
    description = (captured := capture(model, loss, (x, target))).description
    stage = Stage(description, 0, len(description.units), captured.state())
    assert torch.equal(stage.forward(0, [x], [target])[0], loss(model(x), target))
    stage.backward(0)
    loss(model(x), target).backward()  # type: ignore[no-untyped-call]
    assert torch.equal(stage.parameters()["weight"].grad, model.weight.grad)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_embeddings_get_dense_gradients(kind: Any) -> None:
    example = torch.arange(8).view(4, 2), torch.randn(4, 8)
    model = nn.Sequential(kind(8, 4 if kind is nn.Embedding else 8, sparse=True), nn.Flatten())
    nodes = capture(model, mse_loss, example).description.train.nodes
    (embedding,) = [node for node in nodes if node.operator.startswith("aten.embedding")]
    assert not any(argument is True for argument in embedding.args)


class _Counts(nn.Module):
    """Changes its own attributes in forward()."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
        self.inner[1].eval()
        self.calls = 0
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen.append(x)
        self.latest = x
        out: Tensor = self.inner(x)
        return out


def test_the_users_module_is_left_as_it_was() -> None:
    module = _Counts()
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    generator = torch.get_rng_state()
    capture(module, mse_loss, _EXAMPLE)
    assert (module.calls, module.seen, hasattr(module, "latest")) == (0, [], False)
    assert (module.training, module.inner[0].training, module.inner[1].training) == (
        True,
        True,
        False,
    )
    assert all(torch.equal(before[n], t) for n, t in module.state_dict().items())
    assert torch.equal(torch.get_rng_state(), generator)
    assert type(module(torch.randn(2, 8))) is Tensor


def test_state_is_the_users_own_and_can_be_written_back(prepared: Get) -> None:
    case = prepared("gpt")
    state = case.model.state()
    own = case.made.model.state_dict()
    assert set(case.model.description.state_dict) == set(own)
    assert all(state[name].data_ptr() == tensor.data_ptr() for name, tensor in own.items())
    assert "blocks.0.attention.mask" in state, "buffers outside the state_dict travel too"
    before = own["norm.bias"].clone()
    case.model.load_state({"norm.bias": before + 1})
    assert torch.equal(case.made.model.norm.bias, before + 1)
    case.model.load_state({"norm.bias": before, "head.weight": own["head.weight"]})
    assert torch.equal(case.made.model.norm.bias, before)


def test_state_of_another_model_is_refused(prepared: Get) -> None:
    case = prepared("mlp")
    with pytest.raises(InternalError):
        case.model.load_state({"nothing": torch.zeros(1)})
    with pytest.raises(InternalError):
        case.model.load_state({"0.weight": torch.zeros(1)})


def test_inputs_must_be_built_like_the_example(prepared: Get) -> None:
    case = prepared("named_inputs")
    x = {"left": torch.zeros(2, 8), "right": torch.zeros(2, 6), "scale": torch.zeros(2, 1)}
    assert [tuple(t.shape) for t in case.model.flatten_input(x)] == [(2, 8), (2, 6), (2, 1)]
    with pytest.raises(ScriptError):
        case.model.flatten_input({"left": torch.zeros(2, 8)})


def test_constants_of_the_loss_and_of_attributes_are_state(prepared: Get) -> None:
    for name in ("channels_last", "constant_parts"):
        description = prepared(name).model.description
        assert any(tensor.kind == "constant" for tensor in description.tensors)
        assert not any("<constant>" in n for n in description.state_dict)


def test_units_are_named_after_the_users_modules(prepared: Get) -> None:
    names = [unit.name for unit in prepared("residual").model.description.units]
    assert names == [
        "stem",
        *(f"blocks.{k}.{part}" for k in range(3) for part in ("first", "second")),
        "head",
    ]


class WithoutGradient(nn.Module):
    """Its forward is not recorded, and plain torch would refuse the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            return self.layer(x)


@pytest.mark.parametrize("learns", [False, True])
def test_a_loss_that_no_parameter_has_a_part_in_is_refused(*, learns: bool) -> None:
    model = nn.Sequential(nn.Linear(3, 3), WithoutGradient())
    x, y = torch.randn(4, 3), torch.zeros(4, dtype=torch.int64)
    if learns:
        model.append(nn.Linear(2, 2))
        capture(model, cross_entropy, (x, y))
        return
    with pytest.raises(CaptureError, match="depends on no parameter that requires a gradient"):
        capture(model, cross_entropy, (x, y))


def test_parts_that_are_in_evaluation_mode_stay_so() -> None:
    """A frozen BatchNorm: with statistics that are not its own, and change with no batch."""
    x, y = torch.randn(6, 3), torch.zeros(6, dtype=torch.int64)
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Dropout(0.5), nn.Linear(3, 2))
    model[1].eval()
    model[2].eval()
    captured = capture(model, cross_entropy, (x, y))
    stage = Stage(captured.description, 0, len(captured.description.units), captured.state())
    (loss,) = stage.forward(0, [x], [y])
    assert torch.equal(loss, cross_entropy(model(x), y))
    assert torch.equal(stage.state()["1.running_mean"], torch.zeros(3))
    assert [part.training for part in model] == [True, False, False, True]


def test_a_model_that_is_in_evaluation_mode_as_a_whole_is_trained() -> None:
    """As libraries give those that were trained before."""
    x, y = torch.randn(6, 3), torch.zeros(6, dtype=torch.int64)
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 2)).eval()
    captured = capture(model, cross_entropy, (x, y))
    stage = Stage(captured.description, 0, len(captured.description.units), captured.state())
    stage.forward(0, [x], [y])
    assert stage.state()["0.num_batches_tracked"] == 1
    assert not model.training


def test_torchs_own_logs_of_a_failed_trace_are_not_shown(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(CaptureError):
        capture(nn.Linear(5, 2), mse_loss, (torch.zeros(4, 3), torch.zeros(4, 2)))
    assert capfd.readouterr().err == ""


class _CapturedTwice(nn.Module):
    """In evaluation mode; while it is traced, another thread begins to capture it too."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(8, 8), nn.Dropout(0.5)
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        if _second.ident is None:
            _second.start()
            _looked_at.wait(0.2)
        return self.dropout(self.linear(x))

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Tensor]]:
        if threading.current_thread() is _second:
            _looked_at.set()
        return super().named_buffers(*args, **kwargs)


_looked_at = threading.Event()
_second = threading.Thread(target=lambda: _captured.append(capture(_twice, mse_loss, _EXAMPLE)))
_twice = _CapturedTwice()
_captured: list[Captured] = []


def test_a_model_is_captured_once_at_a_time() -> None:
    """What a cancelled run has begun goes on: the model has another mode and tensors meanwhile."""
    first = capture(_twice, mse_loss, _EXAMPLE)
    _second.join()
    assert not any(part.training for part in _twice.modules())
    assert _captured[0].description.digest == first.description.digest


def _only_nine(x: Tensor) -> Tensor:
    if x.shape[1] != 9:
        raise ValueError("nine features, please")
    return x


@pytest.mark.parametrize(
    ("model", "loss", "told"),
    [
        (
            nn.Sequential(nn.Linear(8, 8), nn.Linear(6, 4)),
            mse_loss,
            "in Linear(in_features=6, out_features=4, bias=True): RuntimeError: mat1 and mat2",
        ),
        (nn.Linear(8, 8), lambda y, t: (y - t[:, :3]).mean(), "RuntimeError: The size of tensor a"),
        (AfterLinear(_only_nine), mse_loss, "ValueError: nine features, please"),
    ],
)
def test_what_plain_torch_refuses_too_is_told_in_its_words(
    model: nn.Module, loss: Callable[..., Tensor], told: str
) -> None:
    with pytest.raises(CaptureError) as caught:
        capture(model, loss, _EXAMPLE)
    assert "fails on the first samples of the data, in plain torch too" in str(caught.value)
    assert told in str(caught.value)


def test_what_only_a_trace_refuses_is_not_told_so() -> None:
    with pytest.raises(CaptureError, match="cannot follow this") as caught:
        capture(AfterLinear(lambda x: x + float(x.detach().numpy().mean())), mse_loss, _EXAMPLE)
    assert "plain torch too" not in str(caught.value)
