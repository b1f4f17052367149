"""One link while it lives: the hello first, then messages for the router."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import replace
from typing import Protocol

from p2ptrain.errors import LinkClosed, PeerError, ProtocolError
from p2ptrain.mesh.interface import LinkStatistics
from p2ptrain.mesh.links.hello import HELLO_KIND, REFUSED_KIND, Hello, from_message
from p2ptrain.mesh.links.link_probe import PathAnswers, PathConfig
from p2ptrain.mesh.links.router import Router
from p2ptrain.net.frame import Header
from p2ptrain.net.link.link import Link
from p2ptrain.net.message import Message, Priority

DISCARD_LIMIT_BYTES = 2**30
"""Most bytes of one message that are read only to be thrown away (see `Router.open_parts`). They
take memory for one block; values of a generation that has ended may be many."""

POSTBOX_LIMIT = 512
"""Most membership and election messages waiting for a slow link; the oldest go first."""


class LinkOwner(Protocol):
    """What a link reports: implemented by `Connections`."""

    def hello_received(self, link: PeerLink, hello: Hello) -> None:
        """The first message of a link that was dialled by the peer."""

    def answered(self, link: PeerLink, hello: Hello) -> None:
        """The peer's hello in answer to ours: the link is up."""

    def ended(self, link: PeerLink, error: PeerError) -> None:
        """The link is gone."""


class PeerLink:
    """A `LinkReceiver`.

    Attributes:
        peer_id: proved by the link's certificate.
        own: the hello we dialled with, or None where the peer dialled.
        replaces: the link in whose place it was dialled, over another path.
        said: our hello on this link, on either side.
        theirs: the peer's hello once the link is up.
        settled: None once our hello is answered, or the refusal, or the error that came before.
    """

    def __init__(
        self,
        peer_id: str,
        owner: LinkOwner,
        router: Router,
        own: Hello | None,
        executor: Executor,
    ) -> None:
        self.peer_id = peer_id
        self.own = own
        self.said = own
        self.theirs: Hello | None = None
        self.replaces: PeerLink | None = None
        self.settled: asyncio.Future[Message | None] = asyncio.get_running_loop().create_future()
        self._owner = owner
        self._router = router
        self._greeted = False
        self._paths = PathAnswers(PathConfig())
        self._up_since = 0.0
        self._post: deque[Message] = deque(maxlen=POSTBOX_LIMIT)
        self._posted = asyncio.Event()
        self.link = Link(peer_id, self, executor=executor)

    @property
    def is_up(self) -> bool:
        """Whether messages may pass."""
        return self.theirs is not None and self.link.is_open

    @property
    def token(self) -> str:
        """The name that the dialling side gave this link."""
        return (self.own or self.theirs or _NO_HELLO).token

    def come_up(self, theirs: Hello) -> None:
        """Both hellos are said: from now on messages may pass."""
        self.theirs = theirs
        self._up_since = asyncio.get_running_loop().time()

    def theirs_now(self) -> Hello | None:
        """The peer's hello as it would say it now: it has been up longer since."""
        if self.theirs is None:
            return None
        passed = asyncio.get_running_loop().time() - self._up_since
        return replace(self.theirs, uptime_seconds=self.theirs.uptime_seconds + passed)

    def statistics(self) -> LinkStatistics:
        """Counters up to now."""
        now = self.link.statistics()
        return LinkStatistics(now.sent_bytes, now.received_bytes, now.sent_parts_bytes)

    # What the link calls (net.link.Receiver)

    def open_parts(self, link: Link, header: Header) -> Sequence[memoryview] | None:
        """Where the parts of a message go; None: nowhere."""
        if self.theirs is None:
            raise ProtocolError("a message with parts came before the hello")
        opened = self._router.open_parts(
            self.peer_id, header.kind, header.fields, header.part_bytes
        )
        if opened is None and sum(header.part_bytes) > DISCARD_LIMIT_BYTES:
            size = sum(header.part_bytes)
            raise ProtocolError(f"no handler here expects a message of {size} bytes")
        return opened

    def deliver(self, link: Link, message: Message) -> None:
        """A message came."""
        try:
            if self.theirs is not None:
                if not self._router.put(self.peer_id, message):
                    link.pause_receiving()
            elif self.own is None:
                self._take_hello(message)
            else:
                self._take_answer(message)
        except ProtocolError as error:
            self._settle(error)
            raise

    def lost(self, link: Link, error: PeerError) -> None:
        """The link has ended."""
        self._settle(error)
        self._owner.ended(self, error)

    # Posting without waiting

    def post(self, message: Message) -> None:
        """Send a small message soon; on a link that is stuck the oldest are dropped."""
        if self.is_up and not self._post and self.link.send_now(message):
            return
        self._post.append(message)
        self._posted.set()

    async def run_post(self) -> None:
        """Send what is posted, until the link ends."""
        while True:
            await self._posted.wait()
            while self._post:
                try:
                    await self.link.send(self._post.popleft(), Priority.CONTROL)
                except LinkClosed:
                    return  # `lost` reports it
            self._posted.clear()

    async def flush_post(self) -> None:
        """Hand over to the link what is posted."""
        while self._post and self.link.is_open:
            await self.link.send(self._post.popleft(), Priority.CONTROL)

    def _take_hello(self, message: Message) -> None:
        if not self._greeted and self._paths.take(self.link, message):
            return
        if self._greeted or message.kind != HELLO_KIND:
            raise ProtocolError("the first message of a link must be its hello")
        self._greeted = True
        self._owner.hello_received(self, from_message(message))

    def _take_answer(self, message: Message) -> None:
        if message.kind == HELLO_KIND:
            self._owner.answered(self, from_message(message))
        elif message.kind != REFUSED_KIND:
            raise ProtocolError("a hello must be answered by a hello or a refusal")
        if not self.settled.done():
            self.settled.set_result(message if message.kind == REFUSED_KIND else None)

    def _settle(self, error: PeerError) -> None:
        if not self.settled.done():
            self.settled.set_exception(error)
            self.settled.exception()  # marked as seen: only a dialler awaits it


_NO_HELLO = Hello("", "", 0.0, 1)
