"""What this device has of one job, epoch after epoch, and what of it others may read.

the stages that run, or ran last       the first weights, on the device with the data
parts fetched for an epoch to come     all of them by version and units
"""

from __future__ import annotations

from torch import Tensor

from p2ptrain.errors import PeerError
from p2ptrain.model.description import ModelDescription
from p2ptrain.model.wire import copy_into
from p2ptrain.training.engagement import Engagement
from p2ptrain.training.fetching import version_source
from p2ptrain.training.recovery.holdings import Holding, Kind
from p2ptrain.training.recovery.version import Version
from p2ptrain.training.state_transfer import (
    INITIAL,
    STAGE,
    WEIGHTS,
    After,
    Source,
    StateServer,
    at_once,
)
from p2ptrain.training.versions import Named, VersionStore


class JobStore:
    """See the module. For the event loop alone.

    Attributes:
        engagement: the stages of the epoch that runs here or, stopped, ran last.
    """

    def __init__(self, job: str, states: StateServer, device: str) -> None:
        """Nothing is there yet.

        Args:
            states: what others read from.
            device: own name, for messages.
        """
        self.engagement: Engagement | None = None
        self._job = job
        self._states = states
        self._device = device
        self._versions: VersionStore | None = None
        self._offered: set[str] = set()

    def versions(self, description: ModelDescription) -> VersionStore:
        """Everything but what is trained; `description` is the job's."""
        if self._versions is None:
            self._versions = VersionStore(description)
        return self._versions

    # -- what others may read --------------------------------------------------------------------

    def offer(self, version: Version) -> None:
        """Let others read what is here of that version."""

        def tensors(first: int, end: int) -> Named:
            return self.named(version, first, end)

        self._serve(version_source(version), tensors)

    def offer_snapshot(self, step: int) -> None:
        """Let others read the copy that the running stages take after update `step`."""
        engagement = self.engagement
        assert engagement is not None

        def kept(first: int, end: int) -> Named:
            return engagement.snapshot(step, first, end)

        self._serve(f"snapshot:{step}", kept, engagement.applied)

    def withdraw(self) -> None:
        """Nothing can be read any more, but what the holder itself offers."""
        self._states.retract(self._job, self._offered)
        self._offered.clear()

    def _serve(self, source: str, tensors: Source, after: After = at_once) -> None:
        self._offered.add(source)
        self._states.offer(self._job, source, tensors, after)

    # -- what is here ----------------------------------------------------------------------------

    def named(
        self, version: Version, first: int, end: int, *, own: bool = False
    ) -> dict[str, Tensor]:
        """The tensors of units [first, end) at `version`, from wherever they are here.

        Args:
            own: they may be trained on: what must stay as it is, is copied.

        Raises:
            PeerError: some are not here.
        """
        named: dict[str, Tensor] = {}
        unit = first
        while unit < end:
            stop, found = self._from(version, unit, end, own)
            named = {**found, **named}
            unit = stop
        return named

    def _from(self, version: Version, unit: int, end: int, own: bool) -> tuple[int, Named]:
        if self.engagement is not None:
            here = self.engagement.named_from(unit, end, version)
            if here is not None:
                return here
        if self._versions is not None:
            here = self._versions.named_from(unit, end, version)
            if here is not None:
                return here
        if version.computed == 0:
            initial = self._states.now(self._job, INITIAL, unit, end)
            return end, _copied(initial) if own else initial
        raise PeerError(f"{self._device} does not have unit {unit} after update {version.step}")

    # -- what changes ----------------------------------------------------------------------------

    def train(self, engagement: Engagement) -> None:
        """From now on these stages are what is trained here."""
        self.engagement = engagement
        self._states.relays.end(engagement.assignment.key, "training has begun")
        self.withdraw()
        self._serve(STAGE, engagement.state, engagement.applied)
        self._serve(WEIGHTS, engagement.weights, engagement.applied)

    def drop(self, holdings: tuple[Holding, ...]) -> None:
        """Forget these. Whoever trains a LIVE one has stopped."""
        for holding in holdings:
            if holding.kind is Kind.LIVE:
                self._drop_live()
            elif self._versions is not None:
                self._versions.discard(holding)

    def release(self) -> None:
        """Forget everything but what is trained: that is for `end`, once it has stopped."""
        self._versions = None
        self.withdraw()
        if self.engagement is not None:
            self._states.relays.end(self.engagement.assignment.key, "the job has ended")

    async def end(self) -> None:
        """Stop what is trained here, and forget it. No task and no tensor is left."""
        engagement = self.engagement
        if engagement is None:
            return
        await engagement.stop()
        if self.engagement is engagement:
            self.engagement = None

    def _drop_live(self) -> None:
        engagement, self.engagement = self.engagement, None
        if engagement is not None:
            engagement.disconnect()
            why = "this device has no part any more"
            self._states.relays.end(engagement.assignment.key, why)
            self.withdraw()


def _copied(named: Named) -> Named:
    return {name: copy_into(None, tensor) for name, tensor in named.items()}
