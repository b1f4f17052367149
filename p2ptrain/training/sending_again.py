"""What a device sent to a stage that is lost, sent once more to whoever makes it anew.

rebuilding device ── log.send {step} ──► neighbours: activations, gradients of that step
                  ── feed.send {round} ─► holder: the samples, read once more
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import aclosing
from dataclasses import dataclass
from typing import Annotated

from p2ptrain import failpoints
from p2ptrain.errors import PeerError, ProtocolError
from p2ptrain.mesh.interface import Mesh
from p2ptrain.model.wire import copy_into
from p2ptrain.net.forms import Count, Flat
from p2ptrain.net.message import Message, PartKind
from p2ptrain.training.engagement import Engagement
from p2ptrain.training.loader import PieceLoader
from p2ptrain.training.preparation import Prepared
from p2ptrain.training.protocol import FEED_SEND, LOG_SEND, EpochKey, FrameFields, text
from p2ptrain.training.rounds import Mode, Round
from p2ptrain.training.switchboard import TARGETS, Line, Switchboard


@dataclass(frozen=True, slots=True)
class LogSend(FrameFields):
    """Send what went to `line.stage` on that flow in a step of an epoch that is over.

    Attributes:
        line: where it goes now.
        logged: that epoch.
        step: updates applied before the round.
    """

    line: Annotated[Line, Flat()]
    logged: Count
    step: Count

    @property
    def key(self) -> EpochKey:
        """Of the epoch that is over."""
        return EpochKey(self.line.key.job, self.logged)


@dataclass(frozen=True, slots=True)
class FeedSend(FrameFields):
    """Send the samples of a training round.

    Attributes:
        line: the stage that they go to; its flow is one of those it takes from the holder.
    """

    line: Annotated[Line, Flat()]
    shape: Annotated[Round, Flat()]

    def __post_init__(self) -> None:
        if self.shape.mode is not Mode.TRAIN:
            raise ProtocolError("only rounds of training are fed again")


async def send_logged(
    engagement: Engagement | None, switchboard: Switchboard, mesh: Mesh, peer: str, message: Message
) -> Message:
    """Answer `log.send`, once all is on its way.

    Raises:
        PeerError: it is not kept any more.
    """
    wanted = LogSend.read(message.fields)
    if engagement is None or engagement.assignment.key != wanted.key:
        raise PeerError(f"{mesh.name} has nothing of that epoch any more")
    line, wire = wanted.line, engagement.assignment.wire
    for piece, values in engagement.log.pieces(wanted.step, line.stage, line.flow):
        if failpoints.armed:
            place = {"stage": line.stage, "step": wanted.step}
            await failpoints.reach("log.send.between", device=mesh.self_id, **place)
        # on this device nothing is packed: the stage may write to what it gets
        own = [v if v is None or peer != mesh.self_id else copy_into(None, v) for v in values]
        await switchboard.send_values(peer, line, piece, own, wire=wire)
    return Message(LOG_SEND)


class FeedingAgain:
    """The holder's part. Create it, and `close` it.

    Args:
        devices: ids that may have samples: those of the plan.
        is_private: samples do not leave this device.
    """

    def __init__(
        self,
        mesh: Mesh,
        switchboard: Switchboard,
        job: str,
        prepared: Prepared,
        devices: Callable[[], Collection[str]],
        *,
        is_private: bool,
    ) -> None:
        self._mesh = mesh
        self._switchboard = switchboard
        self._job = job
        self._prepared = prepared
        self._devices = devices
        self._is_private = is_private
        mesh.route(FEED_SEND, self._send)

    def close(self) -> None:
        """Answer nothing any more."""
        self._mesh.unroute(FEED_SEND)

    async def _send(self, peer: str, message: Message) -> Message:
        wanted = FeedSend.read(message.fields)
        if text(message.fields, "job", 64) != self._job:
            raise PeerError("this device holds the data of another job")
        if peer not in self._devices() or (self._is_private and peer != self._mesh.self_id):
            raise PeerError("samples of this job are not for that device")
        prepared = self._prepared
        loader = PieceLoader(
            prepared.captured, prepared.samples, prepared.order, prepared.evaluation
        )
        async with aclosing(loader.pieces([wanted.shape])) as pieces:
            async for loaded in pieces:
                feed = loaded.feed
                values = feed.targets if wanted.line.flow == TARGETS else feed.inputs
                await self._switchboard.send_values(
                    peer, wanted.line, feed.piece, values, PartKind.INPUT
                )
        return Message(FEED_SEND)
