"""Models that are taken: their graphs are what is written there, and they are left as they were."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, ctc_loss, mse_loss
from torch.utils.checkpoint import checkpoint

from p2ptrain.errors import InternalError, ScriptError
from p2ptrain.model.capture.capture import capture
from p2ptrain.model.capture.captured import Captured
from p2ptrain.model.graph.nodes import StateRef
from p2ptrain.model.stage.stage import Stage
from tests.support.odd_models import AfterLinear
from tests.support.prepared_models import Get

_EXAMPLE = torch.randn(4, 8), torch.randn(4, 8)


def test_distributions_that_look_at_their_arguments_are_captured() -> None:
    def sampled(x: Tensor) -> Tensor:
        return torch.distributions.Normal(x, torch.ones_like(x)).rsample()

    assert capture(AfterLinear(sampled), mse_loss, _EXAMPLE, evaluation=False).description.units
    with pytest.raises(ValueError, match="scale"):  # torch looks at them again
        torch.distributions.Normal(0.0, -1.0)


def _operators(model: nn.Module) -> list[str]:
    description = capture(model, mse_loss, _EXAMPLE, evaluation=False).description
    return [node.operator for node in description.train.nodes]


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
    nodes = capture(model, mse_loss, _EXAMPLE, evaluation=False).description.train.nodes
    (inside,) = [node for node in nodes if StateRef("0.inside.weight") in node.args]
    assert inside.grad_enabled == bool(before)


def test_a_ctc_loss_is_captured_and_equals_plain_torch() -> None:
    def loss(output: Tensor, target: Tensor) -> Tensor:
        frames = output.unflatten(1, (4, 2)).log_softmax(2).transpose(0, 1)
        lengths = torch.full((target.shape[0],), 4), torch.full((target.shape[0],), 2)
        return ctc_loss(frames, target, *lengths)

    model, x = nn.Linear(8, 8), torch.randn(4, 8)
    target = torch.ones(4, 2, dtype=torch.int64)
    captured = capture(model, loss, (x, target), evaluation=False)
    description = captured.description
    stage = Stage(description, 0, len(description.units), captured.state())
    assert torch.equal(stage.forward(0, [x], [target])[0], loss(model(x), target))
    stage.backward(0)
    loss(model(x), target).backward()  # type: ignore[no-untyped-call]
    assert torch.equal(stage.parameters()["weight"].grad, model.weight.grad)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_embeddings_get_dense_gradients(kind: Any) -> None:
    example = torch.arange(8).view(4, 2), torch.randn(4, 8)
    model = nn.Sequential(kind(8, 4 if kind is nn.Embedding else 8, sparse=True), nn.Flatten())
    nodes = capture(model, mse_loss, example, evaluation=False).description.train.nodes
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


def test_constants_of_the_loss_and_of_attributes_are_state(prepared: Get) -> None:
    for name in ("channels_last", "constant_parts"):
        description = prepared(name).model.description
        assert any(tensor.kind == "constant" for tensor in description.tensors)
        assert not any("<constant>" in n for n in description.state_dict)


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
    captured = capture(model, cross_entropy, (x, y), evaluation=False)
    stage = Stage(captured.description, 0, len(captured.description.units), captured.state())
    stage.forward(0, [x], [y])
    assert stage.state()["0.num_batches_tracked"] == 1
    assert not model.training


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


def _capture_twice() -> Captured:
    return capture(_twice, mse_loss, _EXAMPLE, evaluation=False)


_second = threading.Thread(target=lambda: _captured.append(_capture_twice()))
_twice = _CapturedTwice()
_captured: list[Captured] = []


def test_a_model_is_captured_once_at_a_time() -> None:
    """What a cancelled run has begun goes on: the model has another mode and tensors meanwhile."""
    first = _capture_twice()
    _second.join()
    assert not any(part.training for part in _twice.modules())
    assert _captured[0].description.digest == first.description.digest


def test_units_are_named_after_the_users_modules(prepared: Get) -> None:
    names = [unit.name for unit in prepared("residual").model.description.units]
    assert names == [
        "stem",
        *(f"blocks.{k}.{part}" for k in range(3) for part in ("first", "second")),
        "head",
    ]


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
