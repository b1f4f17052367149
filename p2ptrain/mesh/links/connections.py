"""One link to every trusted device that can be reached.

Each trusted device has a task that dials it while there is no link, with back-off. Any hint about
an address (discovery, a member's report) wakes that task. Links that devices dial to us come in
through `incoming`. hello.py decides which links are kept; paths.py changes their paths.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from random import Random

from p2ptrain.aio.tasks import TaskScope, set_within
from p2ptrain.errors import (
    Error,
    LinkClosed,
    NotPaired,
    PeerError,
    ProtocolError,
    UserError,
    VersionMismatch,
)
from p2ptrain.logs import get_logger
from p2ptrain.mesh.conduct import Offence
from p2ptrain.mesh.discovery.addresses import AddressBook
from p2ptrain.mesh.guard import Guard
from p2ptrain.mesh.links.hello import (
    Hello,
    LinkAction,
    LinkDecision,
    LinkRefusal,
    LinkSituation,
    between_instances,
    judge_incoming,
    new_token,
    refusal_of,
    refused,
    to_message,
)
from p2ptrain.mesh.links.link_probe import (
    PING_KIND,
    TIMEOUT_SECONDS,
    Dial,
    PathConfig,
    all_ports_refuse,
)
from p2ptrain.mesh.links.paths import ConnectionTimes, KnownPeer, PathMover, PathSchedule
from p2ptrain.mesh.links.peer_link import PeerLink
from p2ptrain.mesh.links.router import Router
from p2ptrain.mesh.notifications import WarnOnce
from p2ptrain.net.fields import mismatch
from p2ptrain.net.link.link import Link
from p2ptrain.net.link.stream import Address, StreamArrival
from p2ptrain.net.message import Message
from p2ptrain.net.transport.dial import Backoff

log = get_logger(__name__)

WAITING_LIMIT = 16
"""Links that a device has dialled and that are not up yet. It may try twelve addresses at once; a
hostile one would take all file descriptors of this process."""


class Connections:
    """Owns all links of this device; a `peer_link.LinkOwner`.

    Attributes:
        is_copy: an older process has this one's identity, so this one ends.
    """

    def __init__(
        self,
        self_id: str,
        router: Router,
        guard: Guard,
        notices: WarnOnce,
        tasks: TaskScope,
        rng: Random,
        *,
        own_hello: Callable[[], Hello],
        dial: Dial,
        on_up: Callable[[str, Hello], None],
        on_lost: Callable[[str, bool], None],
        on_replaced: Callable[[str], None],
        on_not_paired: Callable[[str], None],
        on_copied: Callable[[str, Sequence[Address]], None],
        times: ConnectionTimes | None = None,
        paths: PathConfig | None = None,
    ) -> None:
        """Nothing is dialled before `keep`.

        Args:
            self_id: this device.
            own_hello: what to say now, without tokens.
            dial: how to reach a device.
            on_up: (peer id, its hello) a link is up.
            on_lost: (peer id, whether a redial was refused) the last link is gone; may come twice,
                the second time with True.
            on_replaced: (peer id) a link has ended because the one that comes up replaces it.
            on_not_paired: (peer id) a device that we trust does not trust us.
            on_copied: (peer id, where) it says that an older process there has our identity.
        """
        self.is_copy = False
        self._self_id = self_id
        self._router = router
        self._guard = guard
        self._notices = notices
        self._tasks = tasks
        self._rng = rng
        self._say = own_hello
        self._dial = dial
        self._on_up = on_up
        self._on_lost = on_lost
        self._on_replaced = on_replaced
        self._on_not_paired = on_not_paired
        self._on_copied = on_copied
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="p2ptrain-lz4")
        self._times = times or ConnectionTimes()
        self._paths = paths or PathConfig()
        self._mover = PathMover(
            tasks,
            dial,
            self.dial,
            self._paths,
            answers=self._answers_on_path,
        )
        self._peers: dict[str, KnownPeer] = {}
        # In the order in which they were made, each with what ends it if it stays silent.
        self._all_links: dict[PeerLink, asyncio.TimerHandle | None] = {}
        self._posts: dict[PeerLink, asyncio.Task[None] | None] = {}
        self._leaving = False

    # What the mesh asks

    def connected(self) -> list[str]:
        """Ids of the devices with a link that is up."""
        return [peer_id for peer_id, peer in self._peers.items() if peer.is_up]

    def arrivals(self) -> dict[str, StreamArrival]:
        """What came so far over each link that is up, by the device's id."""
        arrivals = {}
        for peer_id in self._peers:
            link = self.link(peer_id)
            if link is not None:
                link.link.look()
                arrivals[peer_id] = link.link.arrival()
        return arrivals

    def link(self, peer_id: str) -> PeerLink | None:
        """The link that is up, if there is one."""
        peer = self._peers.get(peer_id)
        return peer.current if peer is not None and peer.is_up else None

    def ends(self, peer_id: str) -> tuple[str, str] | None:
        """The IPs that the link to the device runs between, ours first."""
        link = self.link(peer_id)
        return link.link.ends() if link is not None else None

    def hello_of(self, peer_id: str) -> Hello | None:
        """What the device said of itself on its link."""
        link = self.link(peer_id)
        return link.theirs if link is not None else None

    def addresses(self, peer_id: str) -> AddressBook:
        """Where that device may be."""
        peer = self._peers.get(peer_id)
        return peer.addresses if peer is not None else AddressBook()

    def post(self, peer_id: str, message: Message) -> None:
        """Send a small control message if there is a link; never waits."""
        link = self.link(peer_id)
        if link is not None:
            link.post(message)

    def keep(self, peer_id: str, proven: Iterable[Address] = ()) -> None:
        """Keep a link to this device from now on."""
        if peer_id in self._peers or self._leaving:
            return
        peer = KnownPeer(Backoff(self._rng), PathSchedule(self._paths))
        peer.addresses.prove(proven)
        self._peers[peer_id] = peer
        if peer_id != self._self_id:
            peer.task = self._tasks.spawn(self._keep_dialling(peer_id, peer), "dial")

    def hint(self, peer_id: str, addresses: Iterable[Address]) -> None:
        """The device may be there: try now."""
        peer = self._peers.get(peer_id)
        if peer is not None:
            peer.addresses.add_hints(addresses)
            peer.paths.heard(peer.addresses.all(), self._now())
            peer.backoff.reset()
            peer.wake.set()

    def drop(self, peer_id: str, reason: str) -> None:
        """The device is no longer trusted: end its links now and forget it."""
        peer = self._peers.pop(peer_id, None)
        if peer is not None and peer.task is not None:
            peer.task.cancel()
        for link in [link for link in self._all_links if link.peer_id == peer_id]:
            link.link.abort(reason)

    def cut(self, peer_id: str, reason: str) -> None:
        """End the device's links, which break the protocol or stand still; it is dialled again."""
        for link in [link for link in self._all_links if link.peer_id == peer_id]:
            link.link.abort(reason)

    def resume(self, peer_id: str) -> None:
        """A full lane of this device has room again."""
        link = self.link(peer_id)
        if link is not None and self._router.has_room(peer_id):
            link.link.resume_receiving()

    async def close(self) -> None:
        """Stop dialling, send what is queued, end all links."""
        self._leaving = True
        for peer in self._peers.values():
            if peer.task is not None:
                peer.task.cancel()
        await asyncio.gather(*(self._send_goodbye(link) for link in tuple(self._all_links)))
        self._executor.shutdown(wait=False)

    async def _send_goodbye(self, link: PeerLink) -> None:
        try:
            async with asyncio.timeout(self._times.goodbye_seconds):
                await link.flush_post()
        except (LinkClosed, TimeoutError) as error:
            log.info("goodbye_not_sent", peer=link.peer_id[:16], why=str(error) or "too slow")
        link.link.close("it leaves")
        await link.link.closed

    # Links that others dial

    def incoming(self, peer_id: str) -> Link:
        """A link for a device that dials us.

        Raises:
            LinkClosed: this device is leaving, and a peer whose link has ended dials again at once.
            NotPaired: it is not trusted (any more), or was cut off.
        """
        if self._leaving:
            raise LinkClosed("this device is leaving")
        if peer_id != self._self_id and not self._guard.is_listened_to(peer_id):
            raise NotPaired(f"device {peer_id[:16]} is not paired")
        self._make_room(peer_id)
        link = self._new_link(peer_id, None)
        loop = asyncio.get_running_loop()
        patience = loop.call_later(self._times.hello_seconds, self._end_if_silent, link)
        self._all_links[link] = patience
        return link.link

    def _make_room(self, peer_id: str) -> None:
        """Of the links that a device has dialled and that are not up, the oldest gives way."""
        dialled = [link for link in self._all_links if link.peer_id == peer_id and not link.own]
        waiting = [link for link in dialled if link.theirs is None]
        if len(waiting) >= WAITING_LIMIT:
            self._forget(waiting[0])  # at once: several may come before it has ended
            waiting[0].link.abort("the device connects too often")

    def _forget(self, link: PeerLink) -> None:
        """A timer would keep it longer, and it may be one of many with large buffers."""
        patience = self._all_links.pop(link, None)
        if patience is not None:
            patience.cancel()

    def hello_received(self, link: PeerLink, hello: Hello) -> None:
        """See `LinkOwner`."""
        self._tasks.spawn(self._welcome(link, hello), "welcome")

    def answered(self, link: PeerLink, hello: Hello) -> None:
        """See `LinkOwner`."""
        peer = self._peers.get(link.peer_id)
        if peer is None or (peer.current is not None and peer.current is not link.replaces):
            link.link.abort("another link is up")
            return
        self._replace(peer, "there is a better path")
        self._establish(peer, link, hello)

    def ended(self, link: PeerLink, error: PeerError) -> None:
        """See `LinkOwner`."""
        self._forget(link)
        post = self._posts.pop(link, None)
        if post is not None:
            post.cancel()
        peer = self._peers.get(link.peer_id)
        if peer is not None and peer.current is link:
            peer.current = None
            peer.missed = True
            peer.backoff.reset()
            peer.wake.set()
        elif peer is not None or link.theirs is None:
            return  # a link that never was up, or was replaced
        log.info("link_lost", peer=link.peer_id[:16], why=str(error))
        if isinstance(error, ProtocolError):
            self._guard.note(link.peer_id, Offence.MALFORMED, why=str(error))
        self._router.lost(link.peer_id, f"the link to {_name(link)} ended: {error}")
        self._on_lost(link.peer_id, False)

    async def _welcome(self, link: PeerLink, hello: Hello) -> None:
        if self._leaving:
            await _send_last(link, refused(LinkRefusal.LEAVING))
            return
        peer = self._peers.get(link.peer_id)
        own = self._say()
        current = peer.current.theirs if peer is not None and peer.current is not None else None
        if current is not None and peer is not None and peer.current is not None:
            current = replace(current, token=peer.current.token)
        dialling = peer is not None and peer.dialling
        here = LinkSituation(self._self_id, own, current, dialling)
        decision = judge_incoming(link.peer_id, hello, here)
        if decision.action is LinkAction.ASK_OLD and peer is not None and peer.current is not None:
            decision = await self._ask_old(peer.current, hello)
        await self._act(link, hello, own, decision)

    async def _ask_old(self, old: PeerLink, hello: Hello) -> LinkDecision:
        """Whether the process connected so far, at the end of `old`, still answers."""
        before = old.theirs_now()
        if not await self._answers(old.peer_id, self._times.ask_old_seconds):
            return LinkDecision(LinkAction.ACCEPT, "its earlier process does not answer")
        if before is None or self.link(old.peer_id) is not old:
            return LinkDecision(LinkAction.ACCEPT, "its earlier process is gone")
        decision = between_instances(old.peer_id, before, hello)
        if decision.action is LinkAction.ACCEPT:
            await _send_last(old, refused(LinkRefusal.COPIED, hello))
        return decision

    async def _answers_on_path(self, peer_id: str) -> bool:
        times = self._times
        waits = self._self_id > peer_id
        return await self._answers(peer_id, times.ask_old_seconds if waits else times.path_seconds)

    async def _answers(self, peer_id: str, seconds: float) -> bool:
        """Whether it answers over its link so soon."""
        try:
            async with asyncio.timeout(seconds):
                ping = Message(PING_KIND)
                await self._router.call(peer_id, ping, timeout_seconds=TIMEOUT_SECONDS)
        except (Error, TimeoutError):  # a peer's answer may name any error of ours
            return False
        return True

    async def _act(self, link: PeerLink, hello: Hello, own: Hello, decision: LinkDecision) -> None:
        log.debug("hello", peer=link.peer_id[:16], action=decision.action.name, why=decision.reason)
        if decision.action is LinkAction.STOP_SELF:
            await _send_last(link, refused(LinkRefusal.LEAVING))
            self._end_this_process()
            return
        if decision.refusal is LinkRefusal.VERSION:
            self._notices.mismatch(link.peer_id, mismatch(hello.version, hello.software))
        if decision.refusal is not None or self._leaving:
            older = self.hello_of(link.peer_id) if decision.refusal is LinkRefusal.COPIED else None
            await _send_last(link, refused(decision.refusal or LinkRefusal.LEAVING, older))
            return
        peer = self._peers.get(link.peer_id)
        if peer is None:
            link.link.abort("the device was removed")
            return
        answer = replace(own, token=hello.token)
        try:
            await link.link.send(to_message(answer))
        except LinkClosed:
            return  # the peer learns it from its own end
        if link.link.is_open:
            self._replace(peer, "the device dialled again")
            link.said = answer
            self._establish(peer, link, hello)

    def _replace(self, peer: KnownPeer, reason: str) -> None:
        old, peer.current = peer.current, None
        if old is not None:
            self._router.lost(old.peer_id, f"the link to {_name(old)} was replaced")
            self._on_replaced(old.peer_id)
            old.link.abort(reason)

    def _establish(self, peer: KnownPeer, link: PeerLink, hello: Hello) -> None:
        link.come_up(hello)
        peer.current = link
        peer.last_token = link.token
        peer.missed = False
        peer.at = tuple((ip, hello.port) for ip in hello.addresses)
        peer.addresses.prove(peer.at)
        peer.paths.link_up(self._now())
        peer.wake.set()
        peer.backoff.reset()
        self._posts[link] = self._tasks.spawn(link.run_post(), "post")
        log.info("link_up", peer=link.peer_id[:16], name=hello.name, dialled=link.own is not None)
        self._on_up(link.peer_id, hello)

    def _new_link(self, peer_id: str, own: Hello | None) -> PeerLink:
        link = PeerLink(peer_id, self, self._router, own, self._executor)
        self._all_links[link] = None
        return link

    def _end_if_silent(self, link: PeerLink) -> None:
        if link.theirs is None:
            link.link.abort("no hello came")

    # Links that we dial

    def look_elsewhere(self, peer_id: str) -> None:
        """The device is silent on its link: it may answer over another path."""
        peer = self._peers.get(peer_id)
        if peer is not None:
            self._mover.leave(peer_id, peer)

    async def _keep_dialling(self, peer_id: str, peer: KnownPeer) -> None:
        if self._self_id > peer_id:
            await asyncio.sleep(self._times.crossing_seconds)
        while True:
            peer.wake.clear()
            addresses = peer.addresses.all()
            if peer.current is None and addresses:
                await self._try_safely(peer_id, peer, addresses)
            elif self._pause_seconds(peer_id, peer) == 0.0:
                peer.paths.looked(self._now())
                self._mover.measure(peer_id, peer)
            await set_within(peer.wake, self._pause_seconds(peer_id, peer))

    def _pause_seconds(self, peer_id: str, peer: KnownPeer) -> float | None:
        """Until a device is dialled again, or the paths to it are looked at; None: until woken."""
        if peer.current is None:
            return peer.backoff.next_seconds() if peer.addresses.all() else None
        return peer.paths.seconds_left(self._now()) if self._self_id < peer_id else None

    async def _try_safely(
        self, peer_id: str, peer: KnownPeer, addresses: Sequence[Address]
    ) -> None:
        """Whatever goes wrong with one device costs the links to the others nothing."""
        try:
            await self._try(peer_id, peer, addresses)
        except UserError:
            raise  # of this device: it cannot go on
        except Exception:
            log.exception("dial_broke", peer=peer_id[:16])
        peer.missed = False

    async def _try(self, peer_id: str, peer: KnownPeer, addresses: Sequence[Address]) -> None:
        try:
            await self.dial(peer_id, addresses)
        except VersionMismatch as error:
            self._notices.mismatch(peer_id, str(error))
        except PeerError as error:
            log.debug("dial_failed", peer=peer_id[:16], why=str(error))
            if peer.missed and await all_ports_refuse(peer.at) and peer.current is None:
                self._on_lost(peer_id, True)

    async def dial(
        self, peer_id: str, addresses: Sequence[Address], replaces: PeerLink | None = None
    ) -> None:
        """Dial once and say hello.

        Args:
            replaces: the link that is up and gives way to the new one.

        Raises:
            NotPaired, VersionMismatch, LinkClosed: no link came of it.
        """
        peer = self._peers.get(peer_id)
        last = peer.last_token if peer is not None else ""
        own = self._own_hello(new_token(), last)
        made: list[PeerLink] = []

        def make_link(expected_id: str) -> Link:
            made.append(self._new_link(expected_id, own))
            made[-1].replaces = replaces
            return made[-1].link

        try:
            await self._dial(addresses, peer_id, make_link)
            # Made again, since connecting takes time: the uptimes decide which device is younger.
            made[-1].own = made[-1].said = self._own_hello(own.token, own.last_token)
            await self._greet(made[-1], peer)
        finally:
            for link in made:
                if link.theirs is None:
                    link.link.abort("no link came of the dial")
                    self._forget(link)

    def _end_this_process(self) -> None:
        async def fail() -> None:
            raise copied_identity()

        self.is_copy = True
        self._tasks.spawn(fail(), "failure")

    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    def _own_hello(self, token: str, last_token: str) -> Hello:
        return replace(self._say(), token=token, last_token=last_token)

    async def _greet(self, link: PeerLink, peer: KnownPeer | None) -> None:
        if peer is not None:
            peer.dialling = True
        try:
            async with asyncio.timeout(self._times.hello_seconds):
                await link.link.send(to_message(link.own or self._say()))
                refusal = await link.settled
        except NotPaired:
            self._on_not_paired(link.peer_id)
            raise
        except TimeoutError as error:
            raise LinkClosed(f"device {link.peer_id[:16]} did not answer our hello") from error
        finally:
            if peer is not None:
                peer.dialling = False
        if refusal is not None:
            self._refused(link, refusal)

    def _refused(self, link: PeerLink, message: Message) -> None:
        said = refusal_of(message)
        if said.reason is LinkRefusal.COPIED and link.peer_id == self._self_id:
            self._end_this_process()  # it has our key: that is proved
        elif said.reason is LinkRefusal.COPIED:
            self._on_copied(link.peer_id, said.elsewhere)
        if said.reason is LinkRefusal.VERSION:
            raise VersionMismatch(mismatch(said.version, said.software))
        raise LinkClosed(f"device {link.peer_id[:16]} refused the link: {said.reason.value}")


def copied_identity() -> UserError:
    """What the younger of two processes with one identity stops with."""
    return UserError(
        "another running device uses the identity in this state folder: every device needs its "
        "own. Stop the other one, or start this one with another --state-dir and pair it "
        "(do not copy a state folder to a second device)"
    )


async def _send_last(link: PeerLink, message: Message) -> None:
    try:
        await link.link.send(message)
    except LinkClosed:
        return  # it has ended already, which is all that was wanted
    link.link.close("refused")


def _name(link: PeerLink) -> str:
    return link.theirs.name if link.theirs is not None else link.peer_id[:16]
