"""What a holder's recovery core has done, as one port: the driver does it, and the simulator.

What takes time is begun here; the core's method named with it says how it went.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from enum import StrEnum
from typing import Any, Concatenate, ParamSpec, Protocol, TypeAlias

from p2ptrain.recovery.choose_version import StateLost
from p2ptrain.recovery.cores.job_history import NotedHistory
from p2ptrain.recovery.generation_request import GenerationRequest, ReconfigureReason
from p2ptrain.recovery.placement import Placement
from p2ptrain.recovery.version import Version

P = ParamSpec("P")

PortCall: TypeAlias = Callable[[], Coroutine[Any, Any, None] | None]
"""A method of the port with its arguments. What it returns ends before the next one is called."""


class HolderPhase(StrEnum):
    """What the job does."""

    STARTING = "starting"
    TRAINING = "training"
    DRAINING = "draining"
    SETTLING = "settling"
    ASKING = "asking"
    WAITING = "waiting"
    OVER = "over"


class TellCore(Protocol):
    """Calls a method of the core with the time of now, and carries out what follows."""

    def __call__(
        self,
        event: Callable[Concatenate[float, P], list[PortCall]],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> None: ...


class HolderPort(Protocol):
    """See the module."""

    def stop_rounds(self) -> None:
        """Order nothing more, decide nothing more: cancel what is under way, and its feeding."""

    def drain_rounds(self) -> None:
        """Order no new round; `rounds_drained` once the last one is committed."""

    def write_down(self, noted: NotedHistory) -> Coroutine[Any, Any, None] | None:
        """Write this down, synced, before the next call."""

    def prepare(self, ask: GenerationRequest) -> None:
        """Have it made ready; `generation_ready`, or `refused`."""

    def begin(self, placed: Placement, reason: ReconfigureReason, alive: frozenset[str]) -> None:
        """Notify all living members that the generation is in force, then order rounds from its
        version on."""

    def retain_only(self, versions: tuple[Version, ...], alive: frozenset[str]) -> None:
        """Notify all living members which versions are to be kept, the stable one first."""

    def report_failure(self, device: str) -> None:
        """Report that a device of the plan died."""

    def report_waiting(self, devices: tuple[str, ...]) -> None:
        """Report for which devices the job waits."""

    def grant_leave(self, device: str) -> None:
        """A device that wanted to leave may: nothing depends on it any more."""

    def deny_leave(self, device: str, reason: str) -> None:
        """Deny the leave of a device, with the reason."""

    def collect_weights(self, placed: Placement) -> None:
        """Read the weights from the devices that have them; `weights_home`."""

    def end_part(self, first: int, end: int, devices: tuple[str, ...]) -> None:
        """Report that units [first, end) have ended these devices; and end the job."""

    def stop_job(self, reason: str | None = None, lost: StateLost | None = None) -> None:
        """End it. `reason` None = it is done; else the user's message."""
