"""Which state of the weights: how many updates, and who computed them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, TypeAlias

from p2ptrain.net.forms import Count, Row


@dataclass(frozen=True, slots=True, order=True)
class Version:
    """The state of parameters, optimizer and buffers after `step` updates.

    One version has one content, whoever has it: within an epoch each step is computed once. Two
    epochs that computed the same step may differ in bits, where groups sum in another order.

    Attributes:
        step: updates applied.
        computed: the epoch that computed it; 0 = the weights that the job began with.
    """

    step: Count
    computed: Count

    @property
    def age(self) -> tuple[int, int]:
        """What is computed later is greater, also after a step back."""
        return self.computed, self.step


VersionRow: TypeAlias = Annotated[Version, Row()]
"""As it travels within another form."""
