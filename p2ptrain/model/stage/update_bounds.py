"""How large an update of torch's optimizers can make weights and state: bounds, by arithmetic.

Bounds need not be tight: where they come near the largest number of a type, the tensors are looked
at and the bounds are exact again. They must hold, and one update from exact ones must stay modest.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from p2ptrain.model.stage.optimizer_form import Value

_SQUARES = ("_sq", "square_avg", "sum", "_var", "variance", "acc_delta")
"""How the names of slots end that hold squares of gradients, or what comes of them."""

_MUON_COEFFICIENTS = (3.4445, -4.775, 2.0315)
"""With these its iteration keeps a matrix's singular values below two."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """The largest magnitudes there can be.

    Attributes:
        weight: of parameters.
        first: of state of the size of gradients or weights.
        second: of state of the size of their squares.
    """

    weight: float
    first: float
    second: float

    def most(self, other: Bounds) -> Bounds:
        """Of both."""
        return Bounds(
            max(self.weight, other.weight),
            max(self.first, other.first),
            max(self.second, other.second),
        )


def is_square(slot: str) -> bool:
    """Whether `Bounds.second` counts for a slot of that name."""
    return slot.endswith(_SQUARES)


@dataclass(frozen=True, slots=True)
class ParameterSizes:
    """Of what an optimizer updates.

    Attributes:
        elements: of the largest parameter.
        tiny: the smallest number of the parameters' types that keeps its precision.
        eps: the largest relative rounding of these types.
    """

    elements: int
    tiny: float
    eps: float


class _Numbers:
    """One group's, in one update.

    Attributes:
        lr: the rate.
        given: the gradient, with the weight decay that is added to it.
        shrink: what a decay of the weights themselves multiplies them with at most.
        eps: what roots are kept from zero with; 0.0 where rounding leaves nothing of it.
        lost: a quotient whose divisor's squares are too small to be counted.
        steady: no schedule changes what averages are made with.
    """

    def __init__(
        self,
        numbers: Mapping[str, Value],
        before: Bounds,
        gradient: float,
        sizes: ParameterSizes,
        *,
        decoupled: bool,
        steady: bool,
    ) -> None:
        self._numbers = numbers
        self.sizes = sizes
        self.lr, decay = self.size("lr"), self.size("weight_decay")
        self.given = gradient if decoupled else gradient + decay * before.weight
        self.shrink = 1.0 + self.lr * decay * decoupled
        self.eps = self.size("eps", 0)
        if self.eps < sizes.tiny:
            self.eps = 0.0
        self.lost = math.sqrt(sizes.tiny) / self.eps if self.eps else math.inf
        self.steady = steady

    def size(self, key: str, index: int = 0) -> float:
        """The magnitude of a number, or of the one at `index` of several; infinite where unset."""
        value = self._numbers.get(key, 0.0)
        if isinstance(value, tuple):
            value = value[index]
        return abs(float(value)) if isinstance(value, (int, float)) else math.inf

    def is_set(self, key: str) -> bool:
        """Whether a switch is on, or a number not zero."""
        return bool(self._numbers.get(key))

    def is_negative(self, key: str) -> bool:
        """Whether a number is below zero."""
        value = self._numbers.get(key)
        return isinstance(value, (int, float)) and value < 0

    def is_known(self, key: str, value: Value) -> bool:
        """Whether it is that."""
        return self._numbers.get(key) == value


_Result: TypeAlias = tuple[Bounds, float]
"""What they are then, and the largest number on the way; infinite where that is not known."""


def after(
    name: str,
    numbers: Mapping[str, Value],
    before: Bounds,
    gradient: float,
    sizes: ParameterSizes,
    *,
    steady: bool = True,
) -> _Result:
    """What an update of one group of torch's class `name` makes of them at most.

    Args:
        numbers: of the group, in this update.
        gradient: the largest magnitude.
        steady: no schedule changes what averages are made with.
    """
    decoupled = name in _DECOUPLED or bool(numbers.get("decoupled_weight_decay"))
    group = _Numbers(numbers, before, gradient, sizes, decoupled=decoupled, steady=steady)
    bounds, largest = _BY_NAME[name](group, before)
    return bounds, max(bounds.weight, bounds.first, bounds.second, largest)


def _sgd(group: _Numbers, before: Bounds) -> _Result:
    first = before.first
    if group.is_set("momentum"):
        first = group.size("momentum") * first + (1.0 + group.size("dampening")) * group.given
    weight = before.weight + group.lr * (group.given + first)
    return Bounds(weight, first, before.second), 0.0


def _adam(group: _Numbers, before: Bounds) -> _Result:
    beta = group.size("betas")
    if not group.eps or beta >= 1.0:
        return before, math.inf
    first = max(before.first, group.given)
    second = max(before.second, group.given * group.given)
    scaled = group.lr * first / (1.0 - beta)  # before it is divided
    weight = before.weight * group.shrink + group.lr * _ratio(group, first)
    return Bounds(weight, first, second), scaled


def _ratio(group: _Numbers, first: float) -> float:
    """Of Adam's average to the root of its squares, both without bias."""
    one, two = group.size("betas"), group.size("betas", 1)
    if group.steady and one * one < two < 1.0:  # by the inequality of Cauchy and Schwarz
        return 1.0 + group.lost + 1.0 / math.sqrt((1.0 - two) * (1.0 - one * one / two))
    return first / ((1.0 - one) * group.eps)


def _nadam(group: _Numbers, before: Bounds) -> _Result:
    """The gradient is divided by the root too; products of betas are below the first beta."""
    bounds, largest = _adam(group, before)
    one, two = group.size("betas"), group.size("betas", 1)
    if two >= 1.0 or largest == math.inf:
        return before, math.inf
    own = (1.0 / math.sqrt(1.0 - two) + group.lost) / (1.0 - one)
    return Bounds(bounds.weight + group.lr * own, bounds.first, bounds.second), largest


def _radam(group: _Numbers, before: Bounds) -> _Result:
    """The first updates are divided by nothing."""
    bounds, largest = _adam(group, before)
    return Bounds(bounds.weight + largest, bounds.first, bounds.second), largest


def _adamax(group: _Numbers, before: Bounds) -> _Result:
    one, two = group.size("betas"), group.size("betas", 1)
    if not group.eps or one >= 1.0:
        return before, math.inf
    first = max(before.first, group.given + group.eps)
    step = first / ((1.0 - one) * group.eps)
    if group.steady and one < two:
        step = 1.0 / (1.0 - one / two)
    weight = before.weight + group.lr * step
    return Bounds(weight, first, before.second), group.lr * first / (1.0 - one)


def _adadelta(group: _Numbers, before: Bounds) -> _Result:
    rho = group.size("rho")
    if not group.eps or rho >= 1.0:
        return before, math.inf
    root = math.sqrt(before.second + group.eps)
    delta = root * (1.0 / math.sqrt(1.0 - rho) + math.sqrt(group.lost))
    second = max(before.second, group.given * group.given, delta * delta)
    on_the_way = root / math.sqrt(group.eps) * max(group.given, 1.0)
    return Bounds(before.weight + group.lr * delta, before.first, second), on_the_way


def _adagrad(group: _Numbers, before: Bounds) -> _Result:
    """The root is at least the gradient."""
    if not group.eps:
        return before, math.inf
    second = before.second + group.given * group.given
    weight = before.weight + group.lr * (1.0 + group.lost)
    return Bounds(weight, before.first, second), group.lr * group.given


def _rmsprop(group: _Numbers, before: Bounds) -> _Result:
    """With `centered`, rounding may make a variance negative."""
    alpha = group.size("alpha")
    if not group.eps or alpha >= 1.0 or group.is_set("centered"):
        return before, math.inf
    second = max(before.second, group.given * group.given)
    step = 1.0 / math.sqrt(1.0 - alpha) + group.lost
    if group.is_set("momentum"):
        step += group.size("momentum") * before.first
    first = max(before.first, step)
    return Bounds(before.weight + group.lr * step, first, second), group.lr * group.given


def _rprop(group: _Numbers, before: Bounds) -> _Result:
    step = group.size("step_sizes", 1)
    first = max(before.first, group.given, step)
    return Bounds(before.weight + step, first, before.second), first * group.size("etas", 1)


def _asgd(group: _Numbers, before: Bounds) -> _Result:
    """The rate that it keeps comes of earlier ones, which are at most the present one."""
    if not group.steady or group.is_negative("lambd") or group.is_negative("alpha"):
        return before, math.inf
    weight = before.weight * (1.0 + group.size("lambd") * group.lr) + group.lr * group.given
    first = max(before.first, weight)
    return Bounds(weight, first, before.second), 2.0 * first


def _adafactor(group: _Numbers, before: Bounds) -> _Result:
    """The update is scaled to a root mean square of `d` at most."""
    eps, elements = group.size("eps"), group.sizes.elements
    if eps == math.inf:
        eps = group.sizes.eps
    if eps * eps < group.sizes.tiny:
        return before, math.inf
    second = max(before.second, elements * group.given * group.given)
    unscaled = group.given / eps
    step = max(group.size("eps", 1), before.weight) * group.size("d") * math.sqrt(elements)
    weight = before.weight * group.shrink + group.lr * step
    squares = max(unscaled * unscaled, before.weight * before.weight) * elements
    return Bounds(weight, before.first, second), max(second * second, squares)


def _muon(group: _Numbers, before: Bounds) -> _Result:
    usual = group.is_known("ns_coefficients", _MUON_COEFFICIENTS)
    if not usual or not group.eps or group.size("momentum") > 1.0:
        return before, math.inf
    first = max(before.first, group.given)
    step = 2.0 * math.sqrt(group.sizes.elements)
    weight = before.weight * group.shrink + group.lr * step
    return Bounds(weight, first, before.second), group.sizes.elements * first * first


_DECOUPLED = frozenset({"AdamW", "Adafactor", "Muon"})
"""Whose weight decay is none of the gradient's."""

_BY_NAME: Mapping[str, Callable[[_Numbers, Bounds], _Result]] = {
    "SGD": _sgd,
    "Adam": _adam,
    "AdamW": _adam,
    "NAdam": _nadam,
    "RAdam": _radam,
    "Adamax": _adamax,
    "Adadelta": _adadelta,
    "Adagrad": _adagrad,
    "RMSprop": _rmsprop,
    "Rprop": _rprop,
    "ASGD": _asgd,
    "Adafactor": _adafactor,
    "Muon": _muon,
}
