"""Which plans a job's model allows, so that training together gives what one device would give.

A stage on several devices deals whole micro-batches or divides each by samples. Dealing changes
nothing. Dividing does where units look across samples (BatchNorm, dropout, a contrastive loss):
`auto` then only deals, other planners deal where they have the choice, and who divides by nature
(`hybrid`) is obeyed, with a clear word. Some models cannot be divided at all, and some cannot be
shared in any way.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, TypeAlias

from torch import Tensor

from p2ptrain.errors import PlanError, ScriptError
from p2ptrain.model.description import ModelDescription
from p2ptrain.model.division import (
    LEAVES_OUT,
    division_effects,
    indivisible_boundaries,
    statistics_effects,
)
from p2ptrain.model.division_probe import SAMPLES, Mixing, first_mixing_unit
from p2ptrain.model.left_out import DEFAULT_IGNORED
from p2ptrain.model.running_statistics import shareable
from p2ptrain.net.forms import Length, Text
from p2ptrain.plan.allocation import EVERY_ALLOCATION, Allocation
from p2ptrain.plan.plan import Plan
from p2ptrain.training.operator_errors import OPERATORS_RAISE, first_line, unit_of

SEEN = 16
"""Samples of the data that are looked at for targets that a loss leaves out."""

_DEALING = frozenset({Allocation.MICRO_BATCHES})
_DIVIDE_BY_NATURE = ("hybrid",)
_SHARE_BY_NATURE = ("dp", "hybrid", "pipedream", "tiles")
_TEXT_LIMIT = 1000
_MOST_EFFECTS = 16
Told: TypeAlias = Annotated[str, Text(_TEXT_LIMIT, clean=True)]


@dataclass(frozen=True, slots=True)
class Sharing:
    """What the holder's model allows, as the coordinator has to know it.

    Attributes:
        unshared: why every stage needs a device of its own; "" where stages may be shared.
        divisible: whether every value that crosses a cut can be cut between samples.
        effects: how results change where samples are divided; empty if not at all.
    """

    unshared: Told = ""
    divisible: bool = True
    effects: Annotated[tuple[Told, ...], Length(_MOST_EFFECTS)] = ()

    def allocations(self, planner: str) -> Iterator[frozenset[Allocation]]:
        """What groups may do in a plan by `planner`: the first of these with which it finds one."""
        if not self.divisible:
            yield _DEALING
        elif not self.effects or planner in _DIVIDE_BY_NATURE:
            yield EVERY_ALLOCATION
        else:
            yield _DEALING
            if planner != "auto":
                yield EVERY_ALLOCATION

    def check(self, planner: str, *, asynchronous: bool = False) -> None:
        """PlanError where `planner` shares stages by nature and the model's cannot be shared.

        PipeDream's gives each one device then, in the asynchronous training that it was made for.
        """
        if asynchronous and planner == "pipedream":
            return
        if self.unshared and planner in _SHARE_BY_NATURE:
            raise PlanError(
                f"planner {planner} gives layers to several devices, which this model does not "
                f"allow ({self.unshared}): use --planner auto"
            )

    def changes(self, plan: Plan) -> tuple[str, ...]:
        """How the results of `plan` differ from one device's; empty if not at all."""
        divided = any(
            len(stage.devices) > 1 and stage.allocation is Allocation.SAMPLES
            for stage in plan.stages
        )
        return self.effects if divided else ()


def sharing_of(description: ModelDescription) -> Sharing:
    """Read from the model's graph."""
    return Sharing(
        unshared=(shareable(description, 0, len(description.units)) or "")[:_TEXT_LIMIT],
        divisible=not indivisible_boundaries(description),
        effects=division_effects(description),
    )


@dataclass(frozen=True, slots=True)
class Across:
    """Where a model or its loss looks across samples, so that parts of a batch train another model.

    Attributes:
        samples: how; "" where it does not.
        sum_of: the loss of a batch is the sum of what its parts give, not their mean.
        statistics: how results depend on the number of samples that are computed together, and on
            that alone (BatchNorm, dropout); "" where they do not.
    """

    samples: str = ""
    sum_of: bool = False
    statistics: str = ""


def looks_across(
    description: ModelDescription,
    state: Mapping[str, Tensor],
    batch: tuple[Sequence[Tensor], Sequence[Tensor]],
    ignored: bool,
    least: int,
) -> Across:
    """Read from the model's graph, and tried: whether parts of a batch add up to the whole.

    Args:
        state: tensors by canonical name.
        batch: of `SEEN` samples what the first unit takes, and all leaves of the targets.
        ignored: whether the data has targets that the loss leaves out by torch's default.
        least: the fewest samples that the model is computed with.

    Raises:
        ScriptError: the model cannot compute with these samples.
    """
    statistics = statistics_effects(description)
    shown = [effect for effect in division_effects(description) if effect not in statistics]
    if ignored:
        shown.append(f"{LEAVES_OUT} (those of {DEFAULT_IGNORED})")
    text = "; ".join(statistics)
    if shown:
        return Across("; ".join(shown), statistics=text)
    few = max(SAMPLES, 2 * least)
    if few > SEEN:
        return Across(f"the model needs {least} samples together", statistics=text)
    found = _first_mixing(description, state, *(_few(leaves, few) for leaves in batch))
    if found is None:
        return Across(statistics=text)
    where = f"layer {description.units[found.unit].name}"
    if found.unit == len(description.units) - 1 and not found.is_sum:
        where += ", or the loss is no mean over samples"
    if found.is_sum:
        how = f"the loss is a sum over the samples, not their mean (in {where})"
        return Across(how, sum_of=True, statistics=text)
    return Across(f"samples are not computed independently ({where})", statistics=text)


def _first_mixing(
    description: ModelDescription,
    state: Mapping[str, Tensor],
    inputs: Sequence[Tensor],
    targets: Sequence[Tensor],
) -> Mixing | None:
    try:
        return first_mixing_unit(description, state, inputs, targets)
    except OPERATORS_RAISE as error:
        unit = unit_of(error)
        if unit is None:
            raise
        why = first_line(error).rstrip(".")
        raise ScriptError(
            f"layer {unit} failed with samples of the data: {why}. Look for types "
            "other than the model's, and for labels or indices out of range"
        ) from error


def _few(leaves: Sequence[Tensor], count: int) -> list[Tensor]:
    """So many of `SEEN` samples, as far apart as can be."""
    return [leaf[:: SEEN // count][:count].contiguous() for leaf in leaves]
