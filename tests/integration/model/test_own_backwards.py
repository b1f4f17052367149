"""`torch.autograd.Function` with a backward of its own, in a model and in a loss."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn.functional import mse_loss

from p2ptrain.errors import CaptureError, ProtocolError
from p2ptrain.model.capture.captured import Captured
from p2ptrain.model.graph.custom_operators import OWN_BACKWARD
from p2ptrain.model.graph.decoding import LIMIT_BYTES, decode_model
from p2ptrain.model.sample_independence.division_probe import SAMPLES, first_mixing_unit
from p2ptrain.net import cbor
from tests.support import stage_pipeline
from tests.support.compared import compared
from tests.support.reference import stack
from tests.support.zoo import Made
from tests.unit.model.stage.test_stage import assert_same

WIDE = 8


class Reversed(Function):
    """Its argument as it is; gradients turned round (Ganin and Lempitsky 2015)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, by: float) -> Tensor:
        ctx.by = by
        return x

    @staticmethod
    def backward(ctx: Any, *arriving: Tensor) -> Any:
        return -ctx.by * arriving[0], None


class Straight(Function):
    """Signs; gradients pass where the argument is small, by a write in place."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sign()

    @staticmethod
    def backward(ctx: Any, *arriving: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        gradient = arriving[0].clone()
        gradient[x.abs() > 1] = 0
        return gradient


class Swish(Function):
    """Computes again instead of keeping; what it keeps is an argument and its result."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x * x.sigmoid()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs, output)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *arriving: Tensor) -> Any:
        x, made = ctx.saved_tensors
        return arriving[0] * (made + x.sigmoid() * (1 - made))


class Weighted(Function):
    """A linear layer, with gradients for its weight and bias."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t() + bias

    @staticmethod
    def backward(ctx: Any, *arriving: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        (gradient,) = arriving
        return gradient @ weight, gradient.t() @ x.flatten(0, -2), gradient.flatten(0, -2).sum(0)


class Largest(Function):
    """Two results that take gradients and, between them, one that does not."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Any:
        value, place = x.max(-1, keepdim=True)
        ctx.mark_non_differentiable(place)
        ctx.save_for_backward(place)
        ctx.shape = x.shape
        return value, place, 2 * value

    @staticmethod
    def backward(ctx: Any, *arriving: Tensor) -> Any:
        (place,) = ctx.saved_tensors
        one, none, two = arriving
        assert not none.is_floating_point()
        return torch.zeros(ctx.shape, dtype=one.dtype).scatter(-1, place, one + 2 * two)


class Marked(Function):
    """Returns an argument as it is, without a gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Any:
        ctx.mark_non_differentiable(x)
        return 2 * x, x

    @staticmethod
    def backward(ctx: Any, *arriving: Tensor) -> Any:
        return 2 * arriving[0] + arriving[1]


class Product(Function):
    """Asks which gradients there are, and returns something that is no tensor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Any:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, y)
        return x * y, x + y, "no tensor"

    @staticmethod
    def backward(ctx: Any, *arriving: Tensor | None) -> Any:
        x, y = ctx.saved_tensors
        product, total, _ = arriving
        found = [torch.zeros_like(x), torch.zeros_like(y)]
        if product is not None:
            found = [found[0] + product * y, found[1] + product * x]
        if total is not None:
            found = [gradient + total for gradient in found]
        return tuple(found)


class Either(Function):
    """Two results; the second argument gets no gradient where the second result gets none."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Any:
        ctx.set_materialize_grads(False)
        return 2 * x, 3 * weight

    @staticmethod
    def backward(ctx: Any, *arriving: Tensor | None) -> Any:
        one, other = arriving
        return None if one is None else 2 * one, None if other is None else 3 * other


class Again(Function):
    """Keeps its arguments only, and has autograd compute the rest again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return torch.tanh(x @ weight)

    @staticmethod
    def backward(ctx: Any, *arriving: Tensor) -> Any:
        with torch.enable_grad():
            x, weight = (kept.detach().requires_grad_() for kept in ctx.saved_tensors)
            made = torch.tanh(x @ weight)
        return torch.autograd.grad(made, (x, weight), arriving)


class Block(Function):
    """Computes its layer again, with a function of its own inside."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        made: Tensor = Swish.apply(x @ weight)
        return made

    @staticmethod
    def backward(ctx: Any, *arriving: Tensor) -> Any:
        with torch.enable_grad():
            x, weight = (kept.detach().requires_grad_() for kept in ctx.saved_tensors)
            made = Swish.apply(x @ weight)
        return torch.autograd.grad(made, (x, weight), arriving)


class Laid(Reversed):
    """Lays out what arrives, for a view."""

    @staticmethod
    def backward(ctx: Any, *arriving: Tensor) -> Any:
        flat = arriving[0].contiguous().view(-1)
        return (ctx.by * flat).view_as(arriving[0]) + arriving[0].cumsum(0), None


class Flat(Again):
    """Lays out what arrives, in a model that differentiates."""

    @staticmethod
    def backward(ctx: Any, *arriving: Tensor) -> Any:
        flat = arriving[0].contiguous().view(-1) + arriving[0].reshape(-1)
        return Again.backward(ctx, flat.view_as(arriving[0]))


class Scaled(Function):
    """Computes its gradient in the forward, and scales it where it lies."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x.cos())
        return x.sin()

    @staticmethod
    def backward(ctx: Any, *arriving: Tensor) -> Any:
        return ctx.saved_tensors[0].mul_(arriving[0])


class Squares(Function):
    """A loss: the mean of squared differences."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, target: Tensor) -> Tensor:
        ctx.save_for_backward(output, target)
        return (output - target).square().mean()

    @staticmethod
    def backward(ctx: Any, *arriving: Tensor) -> Any:
        output, target = ctx.saved_tensors
        return arriving[0] * 2 * (output - target) / output.numel(), None


class Model(nn.Module):
    """A layer, something, and a layer."""

    def __init__(self, f: Callable[[Model, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDE, WIDE), nn.Linear(WIDE, WIDE)
        self.weight = nn.Parameter(torch.randn(WIDE, WIDE))
        self.bias = nn.Parameter(torch.randn(WIDE))
        self.f = f

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.last(self.f(self, 3 * torch.tanh(self.first(x))))
        return output


def _penalised(model: Model, x: Tensor) -> Tensor:
    made = Product.apply(x, x.sin())[0]
    (gradient,) = torch.autograd.grad(made.sum(), x, create_graph=True)
    return made + gradient


def _penalised_once(model: Model, x: Tensor) -> Tensor:
    """A derivative that is a constant, as its function can be differentiated only once."""
    made = Swish.apply(x)
    (gradient,) = torch.autograd.grad(made.sum(), x, create_graph=True)
    return made + gradient * gradient


def _kept_and_changed(model: Model, x: Tensor) -> Tensor:
    """A weight that a backward keeps, and that the forward clamps afterwards."""
    made = Weighted.apply(x, model.weight, model.bias)
    model.weight.data.clamp_(-1.5, 1.5)
    return made


def _without_gradient(model: Model, x: Tensor) -> Tensor:
    with torch.no_grad():
        signs = Straight.apply(x)
    return x * signs


def _marked(model: Model, x: Tensor) -> Tensor:
    one, other = Marked.apply(x)
    return one * other


def _either_of_either(model: Model, x: Tensor) -> Tensor:
    """Neither weight nor bias get a gradient: the second call gives none to the first one."""
    one, other = Either.apply(x, model.weight)
    made, _ = Either.apply(one, other @ model.bias)
    return made


def _largest(model: Model, x: Tensor) -> Tensor:
    one, place, two = Largest.apply(x)
    return x + one * place + two


IN_MODELS: dict[str, Callable[[Model, Tensor], Any]] = {
    "reversed": lambda model, x: Reversed.apply(x, 0.3),
    "straight": lambda model, x: Straight.apply(x),
    "swish": lambda model, x: Swish.apply(x),
    "weighted": lambda model, x: Weighted.apply(x, model.weight, model.bias),
    "weighted twice": lambda model, x: Weighted.apply(x, model.weight, model.bias) @ model.weight,
    "largest": _largest,
    "largest alone": lambda model, x: x + Largest.apply(x)[0],
    "marked": _marked,
    "product": lambda model, x: Product.apply(x, x.sin())[0] * Product.apply(x, x.cos())[1],
    "either": lambda model, x: Either.apply(x, model.weight)[0],
    "either of either": _either_of_either,
    "block": lambda model, x: Block.apply(x, model.weight),
    "scaled": lambda model, x: Scaled.apply(x),
    "laid": lambda model, x: x + Laid.apply(x, 2.0).sum(0),
    "flat": lambda model, x: x + Flat.apply(x, model.weight).sum(0),
    "again": lambda model, x: Again.apply(x, model.weight),
    "written afterwards": lambda model, x: Again.apply(x, model.weight).mul_(2),
    "as it is": lambda model, x: Straight.apply(x.flatten(1)) + x,
    "penalised": _penalised,
    "penalised once": _penalised_once,
    "kept and changed": _kept_and_changed,
    "without gradient": _without_gradient,
}


def _made(f: Callable[[Model, Tensor], Any], loss: Any = mse_loss) -> Made:
    torch.manual_seed(0)
    data = [(torch.randn(WIDE), torch.randn(WIDE)) for _ in range(8)]
    return Made("own", Model(f), data, loss)


def _received(made: Made, *, evaluation: bool = False) -> Captured:
    """Captured, with the description as a device reads it."""
    model = stage_pipeline.captured(made, evaluation=evaluation)
    sent = model.description
    model.description = decode_model(sent.to_bytes())
    assert model.description == sent
    return model


@pytest.mark.parametrize("name", IN_MODELS)
def test_every_unit_a_stage_and_one_stage_give_plain_torch_bits(name: str) -> None:
    made = _made(IN_MODELS[name])
    plain = stage_pipeline.plain_step(made)
    model = _received(made)
    units = len(model.description.units)
    assert_same(plain, stage_pipeline.pipeline_step(made, model, (0, units)))
    for more in ({"split": True}, {"ahead": True}):
        assert_same(plain, stage_pipeline.pipeline_step(made, model, range(units + 1), **more))


def test_a_loss_may_have_its_own() -> None:
    made = _made(IN_MODELS["swish"], Squares.apply)
    model = _received(made, evaluation=True)
    units = range(len(model.description.units) + 1)
    assert_same(stage_pipeline.plain_step(made), stage_pipeline.pipeline_step(made, model, units))
    x, y = stack(made.data[:5])
    loss, output = stage_pipeline.evaluate(model, units, x, y)
    assert torch.equal(loss, mse_loss(output, y))


class Trained(Straight):
    """Keeps nothing in evaluation mode."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, training: bool) -> Tensor:
        if training:
            ctx.save_for_backward(x)
        return x.sign()

    @staticmethod
    def backward(ctx: Any, *arriving: Tensor) -> Any:
        return Straight.backward(ctx, *arriving), None


def test_nothing_is_asked_of_a_backward_in_evaluation_mode() -> None:
    made = _made(lambda model, x: Trained.apply(x, model.training))
    model = _received(made, evaluation=True)
    units = range(len(model.description.units) + 1)
    assert_same(stage_pipeline.plain_step(made), stage_pipeline.pipeline_step(made, model, units))
    assert all(node.operator != OWN_BACKWARD for node in model.description.evaluate.nodes)
    x, y = stack(made.data[:5])
    _, output = stage_pipeline.evaluate(model, units, x, y)
    assert torch.equal(output, made.model.eval()(x))


def test_the_users_functions_are_their_own_again() -> None:
    """Other threads, and plain torch afterwards, call what the user wrote."""
    stage_pipeline.captured(_made(IN_MODELS["reversed"]))
    x = torch.ones(3, requires_grad=True)
    Reversed.apply(x, 2.0).sum().backward()
    assert torch.equal(x.grad, torch.full((3,), -2.0))  # type: ignore[arg-type]


# -- what cannot travel --------------------------------------------------------------------------


class Written(Reversed):
    @staticmethod
    def forward(ctx: Any, x: Tensor, by: float) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(by)


class Drawn(Reversed):
    @staticmethod
    def backward(ctx: Any, *arriving: Tensor) -> Any:
        return arriving[0] + torch.randn_like(arriving[0]), None


class Remembered(Weighted):
    @staticmethod
    def backward(ctx: Any, *arriving: Tensor) -> Any:
        ctx.saved_tensors[1].data.add_(1)
        return arriving[0], None, None


class Arriving(Reversed):
    @staticmethod
    def backward(ctx: Any, *arriving: Tensor) -> Any:
        return arriving[0].mul_(2), None


class Asking(Reversed):
    @staticmethod
    def backward(ctx: Any, *arriving: Tensor) -> Any:
        (gradient,) = arriving
        return gradient if gradient.is_contiguous() else gradient.contiguous(), None


class Kept(Straight):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        made = x.tanh()
        ctx.save_for_backward(made)
        return made


class TooFew(Reversed):
    @staticmethod
    def backward(ctx: Any, *arriving: Tensor) -> Any:
        return arriving[0]


class TooMany(Reversed):
    @staticmethod
    def backward(ctx: Any, *arriving: Tensor) -> Any:
        return arriving[0], None, arriving[0]


class Misshapen(Weighted):
    @staticmethod
    def backward(ctx: Any, *arriving: Tensor) -> Any:
        return arriving[0], None, arriving[0].sum(1)


class Number(Weighted):
    @staticmethod
    def backward(ctx: Any, *arriving: Tensor) -> Any:
        return arriving[0], None, 0


def _cast(model: Model, x: Tensor) -> Any:
    with torch.autocast("cpu"):
        return Reversed.apply(x, 2.0)


class Averaging(Model):
    """Keeps an average that it replaces after it has computed with it."""

    average: Tensor

    def __init__(self, f: Callable[[Model, Tensor], Tensor]) -> None:
        super().__init__(f)
        self.register_buffer("average", torch.ones(WIDE))

    def forward(self, x: Tensor) -> Tensor:
        made = super().forward(x)
        self.average = 0.9 * self.average + 0.1 * x.mean(0)
        return made


def _averaging(f: Callable[[Any, Tensor], Any]) -> Made:
    made = _made(f)
    return Made("averaging", Averaging(f), made.data, made.loss)


class Times(Function):
    """Keeps its second argument unnoticed by autograd."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, by: Tensor) -> Tensor:
        ctx.by = by
        return x * by

    @staticmethod
    def backward(ctx: Any, *arriving: Tensor) -> Any:
        return arriving[0] * ctx.by, None


@pytest.mark.parametrize(
    "f",
    [
        lambda model, x: Times.apply(x, model.average),
        lambda model, x: x * model.average,
        lambda model, x: x * model.average.mul_(1.1) * x,
        lambda model, x: x - model.average,
        lambda model, x: x * model.average.clone(),
    ],
)
def test_a_backward_has_a_buffer_as_it_was_before_it_was_replaced(
    f: Callable[[Any, Tensor], Any],
) -> None:
    made = _averaging(f)
    model = _received(made)
    units = range(len(model.description.units) + 1)
    plain = stage_pipeline.plain_step(made)
    assert_same(plain, stage_pipeline.pipeline_step(made, model, (0, units[-1])))
    assert_same(plain, stage_pipeline.pipeline_step(made, model, units, ahead=True))


@pytest.mark.parametrize(
    ("f", "says"),
    [
        (lambda model, x: Written.apply(x + 1, 2.0), r"Written.forward writes to its arguments"),
        (lambda model, x: Drawn.apply(x, 2.0), r"Drawn.backward draws random numbers"),
        (
            lambda model, x: Remembered.apply(x, model.weight, model.bias),
            r"the loss of batch 2 is .* an own backward that writes to what it has not made",
        ),
        (lambda model, x: Arriving.apply(x, 2.0) + x, r"first.* writes to a gradient that arrives"),
        (lambda model, x: Asking.apply(x, 2.0), r"Asking.backward decides on how a gradient lies"),
        (
            lambda model, x: Kept.apply(x).mul_(2),
            r"in plain torch too: .* output 0 of Kept",
        ),
        (lambda model, x: TooFew.apply(x, 2.0), r"TooFew.* gradients \(expected 2, got 1\)"),
        (lambda model, x: TooMany.apply(x, 2.0), r"TooMany.* gradients \(expected 2, got 3\)"),
        (
            lambda model, x: Misshapen.apply(x, model.weight, model.bias),
            r"batch 1 in plain torch too: .*MisshapenBackward .* index 2 - got \[6\] .* with \[8\]",
        ),
        (lambda model, x: Number.apply(x, model.weight, model.bias), r"None \(got int\)"),
        (_cast, r"Reversed.* inside torch.vmap or torch.autocast"),
    ],
)
def test_what_cannot_travel_is_explained(f: Callable[[Model, Tensor], Any], says: str) -> None:
    made = _made(f)
    with pytest.raises(CaptureError, match=says):
        compared(made.model, made.loss, [stack(made.data[:6])])


# -- samples that are divided --------------------------------------------------------------------


class Normalised(Reversed):
    """Gradients as large for every batch."""

    @staticmethod
    def backward(ctx: Any, *arriving: Tensor) -> Any:
        return arriving[0] / arriving[0].abs().mean(), None


class Clipped(Reversed):
    """Gradients of at most that norm, which is larger than most."""

    @staticmethod
    def backward(ctx: Any, *arriving: Tensor) -> Any:
        return arriving[0] * (ctx.by / arriving[0].norm()).clamp(max=1), None


class Summed(Squares):
    """Gradients of the sum, for the mean."""

    @staticmethod
    def backward(ctx: Any, *arriving: Tensor) -> Any:
        output, target = ctx.saved_tensors
        return arriving[0] * 2 * (output - target), None


@pytest.mark.parametrize(
    ("f", "loss", "mixes"),
    [
        *((IN_MODELS[name], mse_loss, False) for name in ("reversed", "weighted", "largest")),
        (IN_MODELS["swish"], Squares.apply, False),
        (lambda model, x: Normalised.apply(x, 1.0), mse_loss, True),
        (lambda model, x: Clipped.apply(x, 100.0), mse_loss, True),
        (IN_MODELS["swish"], Summed.apply, True),
    ],
)
def test_a_backward_that_looks_across_samples_is_found(
    f: Callable[[Model, Tensor], Any], loss: Any, mixes: bool
) -> None:
    made = _made(f, loss)
    model = stage_pipeline.captured(made)
    x, y = stack(made.data[:SAMPLES])
    found = first_mixing_unit(
        model.description, model.state(), model.flatten_input(x), model.targets((x, y))
    )
    assert (found is not None) is mixes


# -- what another device sends -------------------------------------------------------------------


@cache
def _sent() -> bytes:
    return stage_pipeline.captured(_made(IN_MODELS["swish"])).description.to_bytes()


def _with_backward(change: Callable[[list[Any]], None]) -> bytes:
    """A description whose own backward (arguments of the node) has been changed."""
    fields: Any = cbor.loads(_sent(), LIMIT_BYTES)
    (node,) = (node for node in fields["train"]["nodes"] if node[1] == OWN_BACKWARD)
    change(node[2])
    return cbor.dumps(fields)


@pytest.mark.parametrize(
    "change",
    [
        lambda args: args.pop(),
        lambda args: args.append(None),
        lambda args: args.insert(0, args.pop()),
        lambda args: args[1].append({"n": 0}),
        lambda args: args[2].pop(),
        lambda args: args[2].append(3),
        lambda args: args[3]["b"][1].append(None),
        lambda args: args[3]["b"][1].__setitem__(0, {"n": 99}),
        lambda args: args[3]["b"][0][0].__setitem__(1, "aten.from_file.default"),
        lambda args: args[3]["b"][0][0].__setitem__(1, OWN_BACKWARD),
        lambda args: args[3]["b"][0][0][2].__setitem__(0, {"s": "first.weight"}),
        lambda args: args[3].update(n=0),
    ],
)
def test_a_malformed_backward_is_refused(change: Callable[[list[Any]], None]) -> None:
    with pytest.raises(ProtocolError):
        decode_model(_with_backward(change))


def test_what_is_not_changed_is_taken() -> None:
    decode_model(_with_backward(lambda args: None))
