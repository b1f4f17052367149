"""Links that break, devices that die, freeze or cannot reach each other; who is told, and when.

Unlike the mesh's own simulation, membership and election are played by the world: verdicts fall
after the times that the mesh keeps (a killed process 5 to 200 ms, silence 2.5 to 4.2 s), every
device has its own view, a coordinator needs the votes of a majority of it, terms never repeat.
Messages of one kind between two devices keep their order, those of different kinds do not.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from random import Random
from typing import Any, Protocol

from p2ptrain.training.recovery.choose import GlobalCopy
from p2ptrain.training.recovery.holder_events import Journal
from tests.simulation.kernel import Kernel
from tests.simulation.recovery.truth import Truth

PROBE_SECONDS = 0.25
LINK_TIMEOUT_SECONDS = 10.0

Pair = frozenset[str]


class Process(Protocol):
    """What the world asks and tells of a device."""

    id: str
    runs: bool
    frozen: bool
    instance: int
    left: bool
    alive: dict[str, bool]
    follows: tuple[str, int] | None
    term: int

    def receive(self, peer: str, kind: str, fields: dict[str, Any]) -> None: ...
    def on_link_up(self, peer: str, *, known: bool) -> None: ...
    def on_link_lost(self, peer: str) -> None: ...
    def on_died(self, peer: str, *, certain: bool) -> None: ...
    def on_left(self, peer: str) -> None: ...
    def on_coordinator(self) -> None: ...


class Killed(Exception):
    """A process ended in the middle of what it did."""


class Disk:
    """What the holder's machine keeps over the end of its process."""

    journal: Journal | None = None
    reported: int = 0


class World:
    """Time, links, rumours."""

    def __init__(self, seed: int, units: int) -> None:
        self.rng = Random(seed)
        self.kernel = Kernel()
        self.truth = Truth(units)
        self.nodes: dict[str, Process] = {}
        self.disk = Disk()
        self.copies: tuple[GlobalCopy, ...] = ()
        self.reported: list[int] = []
        self.ended: str | None = None
        self.check: Callable[[], None] = lambda: None
        self.kill: Callable[[Process], None] = lambda node: None
        self.kill_rate = 0.0
        self.killed_inside: list[str] = []
        self.groups = self.rng.random() < 0.5
        self.replay_limit: int | None = None
        self.slow = self.rng.choice((0.002, 0.002, 0.02))
        self.no_memory_share = self.rng.choice((0.0, 0.0, 0.2))  # of copies offered
        self.late_share = 0.0  # of messages, which come up to three seconds late
        self._links: dict[Pair, int] = {}  # generation, by pair; absent = no link
        self._generation = 0
        self._blocked: Counter[Pair] = Counter()
        self._held: dict[Pair, list[tuple[int, Callable[[], None]]]] = defaultdict(list)
        self._arrives: dict[tuple[str, str, str], float] = {}
        self._inboxes: dict[str, list[Callable[[], None]]] = defaultdict(list)
        self._heard: dict[tuple[str, str], float] = {}
        self._patience: dict[tuple[str, str], float] = {}
        self._met: dict[tuple[str, str], int] = {}  # instance of the peer that was met last
        self._broken_since: dict[Pair, float] = {}
        self._term = 0
        self._without: dict[str, float] = {}
        self._commands: list[tuple[str, str, str, dict[str, Any]]] = []

    @property
    def now(self) -> float:
        """Simulated seconds."""
        return self.kernel.now

    def after(self, seconds: float, label: str, action: Callable[[], None]) -> None:
        """Do it later, then check everything."""

        def run() -> None:
            with suppress(Killed):
                action()
            self.check()

        self.kernel.after(seconds, label.encode(), run)

    def failpoint(self, node: Process) -> None:
        """Here a process may end. Raises Killed where it does."""
        if self.kill_rate and self.rng.random() < self.kill_rate:
            self.killed_inside.append(f"{self.now:.2f} {node.id} in the middle of something")
            self.kill(node)
            raise Killed

    # -- messages --------------------------------------------------------------------------

    def linked(self, one: str, other: str) -> bool:
        """Whether there is a link."""
        return frozenset((one, other)) in self._links

    def send(self, sender: str, receiver: str, kind: str, **fields: Any) -> bool:
        """Send; False where there is no link. To itself always works."""
        pair = frozenset((sender, receiver))
        if sender != receiver and pair not in self._links:
            return False
        if kind in ("inventory", "prepare"):
            self._commands = [*self._commands[-30:], (sender, receiver, kind, fields)]
        generation = self._links.get(pair, 0)
        lane = (sender, receiver, kind)
        delay = self.slow * self.rng.expovariate(1.0) + 0.0002
        if self.late_share and self.rng.random() < self.late_share:
            delay += self.rng.uniform(0.0, 3.0)
        at = max(self._arrives.get(lane, 0.0), self.now + delay)
        self._arrives[lane] = at
        target = self.nodes[receiver]
        instance = target.instance

        def deliver() -> None:
            same = target.instance == instance and target.runs
            if same and (sender == receiver or self._links.get(pair) == generation):
                self._give(receiver, lambda: target.receive(sender, kind, fields))

        def arrive() -> None:
            if self._blocked[pair] and sender != receiver:
                self._held[pair].append((generation, deliver))
            else:
                deliver()

        self.after(at - self.now, f"{sender}>{receiver} {kind}", arrive)
        return True

    def _give(self, receiver: str, deliver: Callable[[], None]) -> None:
        node = self.nodes[receiver]
        if node.frozen:
            self._inboxes[receiver].append(deliver)
        elif node.runs:
            with suppress(Killed):
                deliver()

    # -- faults ----------------------------------------------------------------------------

    def repeat_command(self) -> None:
        """A coordinator that was frozen says now what it said long ago."""
        if self._commands:
            sender, receiver, kind, fields = self.rng.choice(self._commands)
            target = self.nodes[receiver]
            self._give(receiver, lambda: target.receive(sender, kind, {**fields, "request": 0}))

    def block(self, pairs: list[Pair]) -> None:
        """Nothing passes between these pairs, and nobody is told."""
        for pair in pairs:
            self._blocked[pair] += 1

    def unblock(self, pairs: list[Pair]) -> None:
        """Undo one `block`."""
        for pair in pairs:
            self._blocked[pair] -= 1
            if not self._blocked[pair]:
                held, self._held[pair] = self._held[pair], []
                for generation, deliver in held:
                    if self._links.get(pair) == generation:
                        deliver()

    def cut(self, pair: Pair) -> None:
        """The link breaks; what is under way is lost; both ends hear of it."""
        if self._links.pop(pair, None) is None:
            return
        self._held.pop(pair, None)
        one, other = sorted(pair)
        for device, peer in ((one, other), (other, one)):
            if self.nodes[device].runs:
                node, instance = self.nodes[device], self.nodes[device].instance

                def tell(node: Process = node, peer: str = peer, instance: int = instance) -> None:
                    if node.instance == instance and node.runs:
                        node.on_link_lost(peer)

                delay = self.rng.uniform(0.0, 0.01)
                self.after(
                    delay,
                    f"lost {device} {peer}",
                    lambda device=device, tell=tell: self._give(device, tell),  # type: ignore[misc]
                )

    def process_ended(self, device: str, *, left: bool = False) -> None:
        """Its links close; who can be reached finds out soon why."""
        self._inboxes.pop(device, None)
        instance = self.nodes[device].instance
        for peer, node in self.nodes.items():
            if peer == device or not node.runs:
                continue
            pair = frozenset((device, peer))
            reached = pair in self._links and not self._blocked[pair]
            # what its kernel has still goes out
            self.after(self.rng.uniform(0.0, 0.01), "closed", partial(self.cut, pair))
            if not reached:
                continue

            def tell(peer: str = peer, node: Process = node) -> None:
                same = self._met.get((peer, device)) == instance and node.alive.get(device)
                if same and not self._blocked[frozenset((device, peer))]:
                    self._bury(node, device, certain=True, left=left)

            self.after(
                self.rng.uniform(0.012, 0.2),
                f"verdict {peer} {device}",
                lambda peer=peer, tell=tell: self._give(peer, tell),  # type: ignore[misc]
            )

    def _bury(self, node: Process, device: str, *, certain: bool, left: bool = False) -> None:
        node.alive[device] = False
        self.cut(frozenset((node.id, device)))
        if left:
            node.on_left(device)
        else:
            node.on_died(device, certain=certain)

    def thawed(self, device: str) -> None:
        """It reads what waited, in any order of kinds, and doubts itself before others."""
        for key in self._heard:
            if key[0] == device:
                self._heard[key] = self.now
        inbox, self._inboxes[device] = self._inboxes[device], []
        for deliver in inbox:
            if self.nodes[device].runs:
                with suppress(Killed):
                    deliver()

    # -- membership and election --------------------------------------------------------------

    def start(self) -> None:
        """Look around, again and again."""
        self.after(PROBE_SECONDS, "probe", self.start)
        self._look()

    def _passes(self, one: str, other: str) -> bool:
        a, b = self.nodes[one], self.nodes[other]
        up = a.runs and b.runs and not a.frozen and not b.frozen
        return up and not self._blocked[frozenset((one, other))]

    def _reaches(self, one: str, other: str) -> bool:
        return self._passes(one, other) or any(
            self._passes(one, helper) and self._passes(helper, other) for helper in self.nodes
        )

    def _look(self) -> None:
        ids = list(self.nodes)
        for one in ids:
            for other in ids:
                if one != other and self.nodes[one].runs and not self.nodes[one].frozen:
                    with suppress(Killed):
                        self._watch(self.nodes[one], other)
        for i, one in enumerate(ids):
            for other in ids[i + 1 :]:
                with suppress(Killed):
                    self._join(one, other)
        for one in ids:
            self._elect(self.nodes[one])

    def _watch(self, node: Process, peer: str) -> None:
        key = (node.id, peer)
        if self._reaches(node.id, peer):
            self._heard[key] = self.now
            self._patience.pop(key, None)
        elif node.alive.get(peer):
            patience = self._patience.setdefault(key, self.rng.uniform(2.5, 4.2))
            if self.now - self._heard.get(key, 0.0) > patience:
                self._bury(node, peer, certain=False)

    def _join(self, one: str, other: str) -> None:
        pair = frozenset((one, other))
        if pair in self._links:
            if self._passes(one, other):
                self._broken_since.pop(pair, None)
                self._gossip(self.nodes[one], self.nodes[other])
            elif self.now - self._broken_since.setdefault(pair, self.now) > LINK_TIMEOUT_SECONDS:
                self._broken_since.pop(pair)
                self.cut(pair)
            return
        gone = self.nodes[one].left or self.nodes[other].left
        if not self._passes(one, other) or gone or self.rng.random() < 0.3:
            return
        self._generation += 1
        self._links[pair] = self._generation
        for device, peer in ((one, other), (other, one)):
            self._meet(self.nodes[device], self.nodes[peer])

    def _gossip(self, one: Process, other: Process) -> None:
        """Whom they follow; it may have been elected while one of them did not listen."""
        for node, peer in ((one, other), (other, one)):
            if peer.follows is not None and peer.follows[1] > node.term:
                self._hear_of_coordinator(node, *peer.follows)

    def _meet(self, node: Process, peer: Process) -> None:
        key = (node.id, peer.id)
        if self._met.get(key, peer.instance) != peer.instance:
            node.alive[peer.id] = False
            node.on_died(peer.id, certain=True)
        known = node.alive.get(peer.id, False)
        node.alive[peer.id] = True
        self._met[key] = peer.instance
        self._heard[key] = self.now
        node.on_link_up(peer.id, known=known)
        if peer.follows is not None:
            self._hear_of_coordinator(node, *peer.follows)

    def _elect(self, node: Process) -> None:
        if not node.runs or node.frozen:
            return
        leader = node.follows[0] if node.follows else None
        outdated = leader == node.id and any(
            peer.term > node.term and self._passes(node.id, peer.id) and peer.alive.get(node.id)
            for peer in self.nodes.values()
        )
        if leader is not None and (leader == node.id or node.alive.get(leader)) and not outdated:
            self._without.pop(node.id, None)
            return
        if node.follows is not None:
            node.follows = None
            node.on_coordinator()
        since = self._without.setdefault(node.id, self.now)
        if self.now - since < self.rng.uniform(0.2, 1.5):
            return
        view = [node.id, *(peer for peer, alive in node.alive.items() if alive)]
        votes = [
            peer
            for peer in view
            if peer == node.id or (self._passes(node.id, peer) and self.linked(node.id, peer))
        ]
        if 2 * len(votes) > len(view):
            self._term += 1
            for peer in votes:
                self._hear_of_coordinator(self.nodes[peer], node.id, self._term, late=True)

    def _hear_of_coordinator(
        self, node: Process, leader: str, term: int, *, late: bool = False
    ) -> None:
        def hear() -> None:
            if not node.runs or term <= node.term:
                return
            if leader == node.id or node.alive.get(leader):
                node.follows, node.term = (leader, term), term
                node.on_coordinator()

        delay = self.rng.uniform(0.0, 0.05) if late and node.id != leader else 0.0
        self.after(delay, f"coordinator {node.id} {leader}", lambda: self._give(node.id, hear))
