"""What every member knows of the job that runs, so that `status` can tell it anywhere.

The holder sends a line a second at most; a member forgets it when the holder is gone or says so.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from p2ptrain.errors import PeerError
from p2ptrain.mesh.called import called
from p2ptrain.mesh.interface import GONE, MemberChanged, MemberState, Mesh, MeshEvent
from p2ptrain.net.message import Message
from p2ptrain.observe.events import Event, PlanEvent, Step
from p2ptrain.training.protocol import shown

PROGRESS = "job.progress"
INTERVAL_SECONDS = 1.0


class ProgressBoard:
    """Keeps the newest line on this device."""

    def __init__(self, mesh: Mesh) -> None:
        self._holder: str | None = None
        self._line: dict[str, Any] | None = None
        self._mesh = mesh
        mesh.route(PROGRESS, self._receive)
        mesh.subscribe(self._on_mesh_event)

    @property
    def line(self) -> Mapping[str, Any] | None:
        """The running job as its holder last told, or None."""
        return self._line

    async def _receive(self, peer: str, message: Message) -> None:
        if message.fields.get("over"):
            if peer == self._holder:  # another's may have ended before it began
                self._holder = self._line = None
            return
        self._holder = peer
        self._line = {"holder": called(self._mesh, peer), **_known(message.fields)}

    def _on_mesh_event(self, event: MeshEvent) -> None:
        if not isinstance(event, MemberChanged) or event.member.id != self._holder:
            return
        if event.member.state in GONE:
            self._holder = self._line = None


_SHOWN = {
    "model": str,
    "epoch": int,
    "step": int,
    "loss": float,
    "samples_per_s": float,
    "devices": list,
}


def _known(fields: Mapping[str, Any]) -> dict[str, Any]:
    known = {key: fields[key] for key, kind in _SHOWN.items() if isinstance(fields.get(key), kind)}
    if "model" in known:
        known["model"] = shown(known["model"])
    if "devices" in known:
        known["devices"] = [shown(name) for name in known["devices"] if isinstance(name, str)]
    return known


class ProgressReporter:
    """The holder's side: turns its events into lines for all members."""

    def __init__(self, mesh: Mesh, model: str) -> None:
        self._mesh = mesh
        self._fields: dict[str, Any] = {"model": model}
        self._told_at = float("-inf")

    def note(self, event: Event) -> None:
        """Remember what an event says."""
        if isinstance(event, PlanEvent):
            names = [device.name for stage in event.stages for device in stage.devices]
            self._fields |= {"epoch": event.epoch, "devices": names[:64]}
        elif isinstance(event, Step):
            self._fields |= {
                "step": event.step,
                "loss": event.loss,
                "samples_per_s": event.samples_per_s,
            }

    def over(self) -> None:
        """The next line says that the job has ended."""
        self._fields["over"] = True

    async def tell(self, now: float) -> None:
        """Send the newest line to every member that is alive, if the last one is old enough."""
        if now - self._told_at < INTERVAL_SECONDS and "over" not in self._fields:
            return
        self._told_at = now
        for member in list(self._mesh.members.values()):
            if member.state is MemberState.ALIVE:
                try:
                    await self._mesh.send(member.id, Message(PROGRESS, self._fields))
                except PeerError:
                    continue  # out of reach: the membership will say so
