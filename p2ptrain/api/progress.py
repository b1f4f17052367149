"""What every member knows of the running job, so that `status` shows it on any device.

The holder sends a line a second at most; a member forgets it when the job ends or the holder is
gone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, TypeAlias

from p2ptrain.errors import PeerError
from p2ptrain.events import Event, Plan, Step
from p2ptrain.mesh.interface import GONE, MemberChanged, MemberState, Mesh, MeshEvent, display_name
from p2ptrain.net.fields import FrameFields, printable
from p2ptrain.net.forms import Count, Length, Text
from p2ptrain.net.message import Message

PROGRESS = "job.progress"

INTERVAL_SECONDS = 1.0

ENDED_LIMIT = 16

Outcome: TypeAlias = Literal["done", "failed", "stopped"]

NOW_LIMIT = 256


@dataclass(frozen=True, slots=True)
class JobLine(FrameFields):
    """The holder's progress report, as far as it is known.

    Attributes:
        model: its name.
        devices: names of those of the plan.
        over: the job has ended.
        outcome: how.
        now: what all wait for, where that is no device.
    """

    model: Annotated[str, Text(256, clean=True)] | None = None
    epoch: Count | None = None
    step: Count | None = None
    loss: float | None = None
    samples_per_s: float | None = None
    devices: Annotated[tuple[Annotated[str, Text(64, clean=True)], ...], Length(64)] | None = None
    over: bool | None = None
    outcome: Outcome | None = None
    now: Annotated[str, Text(NOW_LIMIT, clean=True)] | None = None


class ProgressBoard:
    """Keeps the newest line of each holder on this device.

    Attributes:
        ended: the last line of each job that has ended, by its holder; the newest 16.
    """

    def __init__(self, mesh: Mesh) -> None:
        self._lines: dict[str, dict[str, Any]] = {}  # by holder, the newest last
        self.ended: dict[str, JobLine] = {}
        self._mesh = mesh
        mesh.route(PROGRESS, self._receive)
        mesh.subscribe(self._on_mesh_event)

    @property
    def line(self) -> Mapping[str, Any] | None:
        """The running job of which a holder has said something last, or None."""
        return next(reversed(self._lines.values()), None)

    @property
    def holder(self) -> str | None:
        """The device whose line that is."""
        return next(reversed(self._lines), None)

    async def _receive(self, peer: str, message: Message) -> None:
        said = JobLine.read(message.fields)
        self._lines.pop(peer, None)
        self.ended.pop(peer, None)
        if said.over:
            self.ended[peer] = said
            while len(self.ended) > ENDED_LIMIT:
                del self.ended[next(iter(self.ended))]
        else:
            line = {"holder": display_name(self._mesh, peer), **replace(said, over=None).fields()}
            self._lines[peer] = line

    def _on_mesh_event(self, event: MeshEvent) -> None:
        if isinstance(event, MemberChanged) and event.member.state in GONE:
            self._lines.pop(event.member.id, None)


class ProgressReporter:
    """The holder's side: turns its events into lines for all members.

    Args:
        model: its name.
        waits: what all wait for now, where that is no device.
    """

    def __init__(self, mesh: Mesh, model: str, waits: Callable[[], str | None]) -> None:
        self._mesh = mesh
        self._waits = waits
        self._line = JobLine(model)
        self._reported_at = float("-inf")

    def note(self, event: Event) -> None:
        """Remember what an event says."""
        if isinstance(event, Plan):
            names = [device.name for stage in event.stages for device in stage.devices]
            self._line = replace(self._line, epoch=event.epoch, devices=tuple(names[:64]))
        elif isinstance(event, Step):
            speed, step = event.samples_per_s, event.step
            self._line = replace(self._line, step=step, loss=event.loss, samples_per_s=speed)

    def over(self, outcome: Outcome) -> None:
        """The next line says that the job has ended, and how."""
        self._line = replace(self._line, over=True, outcome=outcome)

    async def tell(self, now: float) -> None:
        """Send the newest line to every member that is alive, if the last one is old enough."""
        if now - self._reported_at < INTERVAL_SECONDS and not self._line.over:
            return
        self._reported_at = now
        waits = self._waits()
        self._line = replace(self._line, now=None if waits is None else printable(waits, NOW_LIMIT))
        alive = [m.id for m in self._mesh.members.values() if m.state is MemberState.ALIVE]
        await asyncio.gather(*map(self._send, alive))

    async def _send(self, member: str) -> None:
        """One that does not take it in time is out of reach: the membership will say so."""
        with suppress(PeerError, TimeoutError):
            async with asyncio.timeout(INTERVAL_SECONDS):
                await self._mesh.send(member, Message(PROGRESS, self._line.fields()))
