"""Where values of a micro-batch stopped being finite: devices' reports, and the user's message."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated

from p2ptrain.errors import ProtocolError
from p2ptrain.model.stage.failures import NonFiniteUnit
from p2ptrain.net.fields import FrameFields
from p2ptrain.net.forms import Count, Rare, Row


@dataclass(frozen=True, slots=True)
class NonFiniteFinding:
    """What was found in one stage.

    Attributes:
        devices: names of those where it happened; several only where the stage is tiled.
        stage: its number.
        first: its first unit.
        units: one of them it was, one alone unless the stage is tiled; empty where the stage's
            inputs already were not finite.
        parameters: whether weights there were not finite before.
        tiled: whether the stage is.
        backward: it was in their backward.
        sample: which one's values they are, in words; None = it is not one's, or not known.
        parameter: whose gradient it is; None where it is another value.
    """

    devices: tuple[str, ...]
    stage: int
    first: int
    units: range
    parameters: bool
    tiled: bool = False
    backward: bool = False
    sample: str | None = None
    parameter: str | None = None


@dataclass(frozen=True, slots=True)
class _UnitSpan:
    since: Count
    unit: Count

    def __post_init__(self) -> None:
        if self.since > self.unit:
            raise ValueError(f"units {self.since} to {self.unit}")


@dataclass(frozen=True, slots=True)
class FindingFields(FrameFields):
    """What a device answers: whether it found something, and in which units."""

    found: bool
    units: Annotated[_UnitSpan, Row()] | None = None
    parameters: Annotated[bool, Rare()] = False

    @staticmethod
    def of(found: NonFiniteUnit | None) -> FindingFields:
        """The form of what was found."""
        if found is None:
            return FindingFields(False)
        last = found.unit
        units = (
            None if last is None else _UnitSpan(last if found.since is None else found.since, last)
        )
        return FindingFields(True, units, found.parameters)

    def range(self, end: int) -> range:
        """The units named, in a model of `end` units. Raises ProtocolError."""
        if self.units is None:
            return range(0)
        if self.units.unit >= end:
            raise ProtocolError(f"unit {self.units.unit} of a model of {end}")
        return range(self.units.since, self.units.unit + 1)


def earliest(findings: Sequence[NonFiniteFinding]) -> NonFiniteFinding:
    """Of the devices of a stage: the first units that one names, and all who name the same."""
    least = min(findings, key=lambda finding: (finding.units.stop, finding.units.start))
    same = [finding for finding in findings if finding.units == least.units]
    return replace(
        least,
        devices=tuple(device for finding in same for device in finding.devices),
        parameters=any(finding.parameters for finding in same),
    )


def describe_finding(
    finding: NonFiniteFinding | None, units: Sequence[str], micro_batch: int, *, where: bool = False
) -> str:
    """Where values stopped being finite, as far as is known, and what to do.

    Args:
        units: names of the model's.
        micro_batch: of its round.
        where: it is known whether it was in a forward or a backward.
    """
    advice = ". Try a smaller learning rate or clip_grad_norm=1.0"
    if finding is None:
        return advice
    sample = "" if finding.sample is None else f", {finding.sample}"
    if not finding.units:
        if finding.stage == 0 and finding.sample is not None:
            return f". The data contain NaN or infinity ({finding.sample}). Look at that sample"
        if finding.stage == 0:
            return (
                f". The data contain NaN or infinity (in micro-batch {micro_batch} of this step). "
                "Look at the samples"
            )
        place = f'layer "{units[finding.first]}" on {finding.devices[0]}'
        return f". The first NaN or infinity came into {place} from the layer before{advice}"
    first, last = units[finding.units[0]], units[finding.units[-1]]
    place = f'layer "{first}"'
    if len(finding.units) > 1:
        place = f'layers "{first}" to "{last}"'
    tiled = " (in tiles)" if finding.tiled else ""
    place = f"{place}{tiled} on {', '.join(finding.devices)}"
    if finding.parameters:
        return f". An earlier update made weights of {place} NaN or infinite{advice}"
    if where:
        what = "" if finding.parameter is None else f" (the gradient of {finding.parameter})"
        way = "backward" if finding.backward else "forward"
        place += f", in the {way} of micro-batch {micro_batch}{sample}{what}"
    return f". The first NaN or infinity came from {place}{advice}"
