"""Where values of a micro-batch stopped being finite: devices' reports, and the user's message."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import Annotated

from p2ptrain.errors import ProtocolError
from p2ptrain.model.stage.failures import NonFiniteUnit
from p2ptrain.net.fields import FrameFields
from p2ptrain.net.forms import Count, Rare


@dataclass(frozen=True, slots=True)
class NonFiniteFinding:
    """What was found in one stage.

    Attributes:
        devices: names of those where it happened; several where the stage is.
        stage: its number.
        first: its first unit.
        unit: which it was; None where the stage's inputs already were not finite.
        parameters: whether weights there were not finite before.
        tiled: whether the stage is; where its inputs were not finite, the one before it.
        backward: it was in their backward.
        sample: which one's values they are, in words; None = it is not one's, or not known.
        parameter: whose gradient it is; None where it is another value.
    """

    devices: tuple[str, ...]
    stage: int
    first: int
    unit: int | None
    parameters: bool
    tiled: bool = False
    backward: bool = False
    sample: str | None = None
    parameter: str | None = None


@dataclass(frozen=True, slots=True)
class FindingFields(FrameFields):
    """What a device answers: whether it found something, and in which unit."""

    found: bool
    unit: Count | None = None
    parameters: Annotated[bool, Rare()] = False

    @staticmethod
    def of(found: NonFiniteUnit | None) -> FindingFields:
        """The form of what was found."""
        return FindingFields(False) if found is None else FindingFields(True, *astuple(found))

    def check(self, units: int) -> None:
        """Raises ProtocolError: the model has no such unit."""
        if self.unit is not None and self.unit >= units:
            raise ProtocolError(f"unit {self.unit} of a model of {units}")


def advice(*, asynchronous: bool) -> str:
    """What to do about numbers that become too large; asynchronous training cannot clip."""
    other = ", or --mode sync" if asynchronous else " or clip_grad_norm=1.0"
    return f"Try a smaller learning rate{other}"


def describe_finding(
    finding: NonFiniteFinding | None,
    units: Sequence[str],
    micro_batch: int,
    *,
    where: bool = False,
    asynchronous: bool = False,
) -> str:
    """Where values stopped being finite, as far as is known, and what to do.

    Args:
        units: names of the model's.
        micro_batch: of its round.
        where: it is known whether it was in a forward or a backward.
    """
    what_to_do = f". {advice(asynchronous=asynchronous)}"
    if finding is None:
        return what_to_do
    sample = "" if finding.sample is None else f", {finding.sample}"
    if finding.unit is None:
        if finding.stage == 0 and finding.sample is not None:
            return f". The data contain NaN or infinity ({finding.sample}). Look at that sample"
        if finding.stage == 0:
            return (
                f". The data contain NaN or infinity (in micro-batch {micro_batch} of this step). "
                "Look at the samples"
            )
        if finding.tiled:
            tiles = f'layers "{units[0]}" to "{units[finding.first - 1]}" (in tiles)'
            if finding.first == 1:
                tiles = f'layer "{units[0]}" (in tiles)'
            return f". The first NaN or infinity came from the data or from {tiles}{what_to_do}"
        place = f'layer "{units[finding.first]}" on {finding.devices[0]}'
        return f". The first NaN or infinity came into {place} from the layer before{what_to_do}"
    tiled = " (in tiles)" if finding.tiled else ""
    place = f'layer "{units[finding.unit]}"{tiled} on {", ".join(finding.devices)}'
    if finding.parameters:
        return f". An earlier update made weights of {place} NaN or infinite{what_to_do}"
    if where:
        what = "" if finding.parameter is None else f" (the gradient of {finding.parameter})"
        way = "backward" if finding.backward else "forward"
        place += f", in the {way} of micro-batch {micro_batch}{sample}{what}"
    return f". The first NaN or infinity came from {place}{what_to_do}"
