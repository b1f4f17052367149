"""What capture gives on the holder's side, and what it says to those whose model it cannot take."""

from __future__ import annotations

import linecache
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from p2ptrain.errors import CaptureError, InternalError, ScriptError
from p2ptrain.model.capture import capture
from tests.unit.model.conftest import Prepared

Get = Callable[..., Prepared]

_EXAMPLE = torch.randn(4, 8), torch.randn(4, 8)


class _Straight(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.sign()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]


class _Odd(nn.Module):
    """A linear layer, then `f(x)`."""

    def __init__(self, f: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.f = f

    def forward(self, x: Tensor) -> Tensor:
        return self.f(self.linear(x))


def _decides(x: Tensor) -> Tensor:
    return x + 1 if x.sum() > 0 else x


def _fixed_batch(x: Tensor) -> Tensor:
    return x.reshape(4, 2, 4).flatten(1)


def _only_even_batches(x: Tensor) -> Tensor:
    return x if x.shape[0] % 2 else x + 1


def _leaves_torch(x: Tensor) -> Tensor:
    return torch.from_numpy(x.detach().numpy()) + x


def _autocasts(x: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return (x @ x.T @ x).float()


def _counts_samples(x: Tensor) -> Tensor:
    return x / len(x)


def _loops_over_samples(x: Tensor) -> Tensor:
    return torch.stack([row + 1 for row in x])


def _other_operator(x: Tensor) -> Tensor:
    return torch.ops.aten.resize.default(x, [x.shape[0], 8])


@pytest.mark.parametrize(
    ("f", "says"),
    [
        (_decides, "return x + 1 if x.sum() > 0 else x"),
        (_decides, "torch.where"),
        (_fixed_batch, "return x.reshape(4, 2, 4).flatten(1)"),
        (_fixed_batch, "one batch size only"),
        (_only_even_batches, "one batch size only"),
        (_counts_samples, "return x / len(x)"),
        (_counts_samples, "x.shape[0]"),
        (_loops_over_samples, "for row in x"),
        (_leaves_torch, "return torch.from_numpy(x.detach().numpy()) + x"),
        (_autocasts, "torch.autocast"),
        (_Straight.apply, "torch.autograd.Function"),
        (_other_operator, "aten.resize.default"),
    ],
)
def test_what_cannot_be_captured_is_explained(
    f: Callable[[Tensor], Tensor], says: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(CaptureError) as caught:
        capture(_Odd(f), mse_loss, _EXAMPLE)
    assert says in str(caught.value)
    assert "def forward" not in capfd.readouterr().err


class _Masked(nn.Module):
    """Its encoder compares the mask with a causal one."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)

    def forward(self, x: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(2)
        encoded: Tensor = self.encoder(x.unflatten(1, (2, 4)), mask=mask)
        return encoded.flatten(1)


@pytest.mark.parametrize(
    ("model", "says"),
    [
        (nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8, momentum=None)), "momentum=None"),
        (_Masked(), "is_causal=True"),
    ],
)
def test_layers_of_torch_that_decide_on_values_are_explained(model: nn.Module, says: str) -> None:
    with pytest.raises(CaptureError, match=says):
        capture(model, mse_loss, _EXAMPLE)


def test_the_users_own_line_is_named() -> None:
    with pytest.raises(CaptureError) as caught:
        capture(_Odd(_decides), mse_loss, _EXAMPLE)
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
