"""Sends samples again to a stage that is being rebuilt."""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import aclosing

from p2ptrain.errors import PeerError
from p2ptrain.holder.input.loader import MicroBatchLoader
from p2ptrain.holder.start.prepare import PreparedJob
from p2ptrain.mesh.interface import Mesh
from p2ptrain.messages.kinds import FEED_SEND
from p2ptrain.messages.tensors import ResendSamples
from p2ptrain.net.fields import text
from p2ptrain.net.message import Message, PartKind
from p2ptrain.runtime.io.tensor_router import TARGETS, TensorRouter


class ReplayFeed:
    """The holder's part. Create it, and `close` it.

    Args:
        devices: ids that may have samples: those of the plan.
        is_private: samples do not leave this device.
    """

    def __init__(
        self,
        mesh: Mesh,
        switchboard: TensorRouter,
        job: str,
        prepared: PreparedJob,
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
        wanted = ResendSamples.read(message.fields)
        if text(message.fields, "job", 64) != self._job:
            raise PeerError("this device holds the data of another job")
        if peer not in self._devices() or (self._is_private and peer != self._mesh.self_id):
            raise PeerError("samples of this job are not for that device")
        prepared = self._prepared
        loader = MicroBatchLoader(
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
