"""Whether an update is finite is known before it is made, whatever the optimizer."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
import torch
from torch import Tensor, nn

from p2ptrain.model.stage.finite import Broken, FiniteUpdates
from p2ptrain.model.stage.optimizer import StageOptimizer
from p2ptrain.model.stage.optimizer_form import AS_GIVEN, OptimizerSpec, PlainColumns
from p2ptrain.model.stage.optimizer_spec import (
    ASGD,
    SGD,
    Adadelta,
    Adafactor,
    Adagrad,
    Adam,
    Adamax,
    AdamW,
    Muon,
    NAdam,
    RAdam,
    RMSprop,
    Rprop,
)

SPECS: Mapping[str, OptimizerSpec] = {
    "SGD": SGD(lr=0.1),
    "momentum": SGD(lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "Adam": Adam(lr=0.1, weight_decay=0.1),
    "Adam without epsilon": Adam(lr=0.1, eps=0.0),
    "AdamW": AdamW(lr=0.1, amsgrad=True),
    "NAdam": NAdam(lr=0.1, weight_decay=0.1),
    "RAdam": RAdam(lr=0.1, decoupled_weight_decay=True, weight_decay=0.1),
    "Adamax": Adamax(lr=0.1, weight_decay=0.1),
    "Adadelta": Adadelta(lr=0.1, weight_decay=0.1),
    "Adagrad": Adagrad(lr=0.1, lr_decay=0.1, weight_decay=0.1),
    "RMSprop": RMSprop(lr=0.1, momentum=0.9, weight_decay=0.1),
    "centered RMSprop": RMSprop(lr=0.1, centered=True),
    "Rprop": Rprop(lr=0.1),
    "ASGD": ASGD(lr=0.1, weight_decay=0.1, t0=1.0),
    "Adafactor": Adafactor(lr=0.1, weight_decay=0.1),
    "Muon": Muon(lr=0.1),
}


def stage(spec: OptimizerSpec, size: float = 1.0) -> tuple[StageOptimizer, FiniteUpdates]:
    torch.manual_seed(2)
    named = {name: nn.Parameter(size * torch.randn(5, 3)) for name in ("one", "two")}
    optimizer = StageOptimizer(spec, named)
    return optimizer, FiniteUpdates(optimizer, {})


def verdict(
    optimizer: StageOptimizer, finite: FiniteUpdates, changes: PlainColumns = AS_GIVEN
) -> Broken | None:
    norm = finite.gradient_norm(optimizer.gradients())
    if isinstance(norm, Broken):
        return norm
    if finite.is_safe(norm, changes):
        return None
    found = finite.look()
    if found is not None or finite.is_safe(norm, changes):
        return found
    return finite.tried(changes)


def is_finite(optimizer: StageOptimizer) -> bool:
    tensors: list[Tensor] = [*optimizer.parameters.values(), *optimizer.state().values()]
    return all(bool(tensor.isfinite().all()) for tensor in tensors)


@pytest.mark.parametrize("rate", [0.1, 1e29])
@pytest.mark.parametrize("gradient", [1e-30, 1.0, 1e10, 1e18, 1e20, 1e38])
@pytest.mark.parametrize("spec", SPECS)
def test_it_says_what_torch_then_makes(spec: str, gradient: float, rate: float) -> None:
    """Not more, not less: an update is broken where torch's own leaves something not finite."""
    optimizer, finite = stage(SPECS[spec])
    for _ in range(3):
        for parameter in optimizer.parameters.values():
            parameter.grad = gradient * torch.randn(5, 3).clamp(-3, 3)
        found = verdict(optimizer, finite, {"lr": (rate,)})
        optimizer.step({"lr": (rate,)})
        assert (found is None) == is_finite(optimizer)
        if found is not None:
            return


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_a_gradient_is_named(value: float) -> None:
    optimizer, finite = stage(SGD(lr=0.1))
    for parameter in optimizer.parameters.values():
        parameter.grad = torch.ones(5, 3)
    optimizer.parameters["one"].grad[2, 1] = value  # type: ignore[index]
    assert verdict(optimizer, finite) == Broken("gradient", "one")


def test_a_weight_that_is_broken_already_is_named() -> None:
    optimizer, finite = stage(SGD(lr=0.1))
    optimizer.parameters["two"].data[0, 0] = torch.nan
    assert verdict(optimizer, finite) == Broken("weight", "two")


@pytest.mark.parametrize(
    "change", [lambda mean: mean.fill_(torch.nan), lambda mean: mean[1].fill_(torch.inf)]
)
def test_running_statistics_count_as_weights(change: Callable[[Tensor], object]) -> None:
    optimizer, _ = stage(SGD(lr=0.1))
    mean, least = torch.zeros(3), torch.full((3,), torch.inf)
    finite = FiniteUpdates(optimizer, {"mean": mean, "count": torch.tensor(3), "least": least})
    assert finite.broken_buffer() is None, "one that begins infinite is the model's own way"
    change(mean)
    assert finite.broken_buffer() == Broken("buffer", "mean")


def test_small_types_are_looked_at_and_not_refused() -> None:
    """Half precision ends at 65,504: its bounds are always near."""
    weight = nn.Parameter(torch.full((4,), 3e4, dtype=torch.float16))
    optimizer = StageOptimizer(SGD(lr=1.0), {"weight": weight})
    finite = FiniteUpdates(optimizer, {})
    weight.grad = torch.full((4,), -3e4, dtype=torch.float16)
    assert verdict(optimizer, finite) is None
    optimizer.step()
    assert verdict(optimizer, finite) == Broken("weight", "weight")


@pytest.mark.parametrize("spec", SPECS)
def test_usual_updates_cost_arithmetic_only(spec: str) -> None:
    """Once the tensors were looked at, bounds say for long that all is well."""
    _, finite = stage(SPECS[spec])
    assert finite.look() is None
    known = spec not in ("centered RMSprop", "Adam without epsilon")
    assert [finite.is_safe(1.0) for _ in range(8)] == [known] * 8


def test_a_scheduled_beta_is_not_taken_to_have_been_the_same() -> None:
    _, finite = stage(SPECS["Adam"])
    finite.look()
    assert finite.is_safe(1e15, {"lr": (1e15,)})
    finite.look()
    assert not finite.is_safe(1e15, {"lr": (1e15,), "betas": ((0.8, 0.999),)})
