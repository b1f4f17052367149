"""Time, links and messages; devices that die, freeze, lose their power or cannot reach each other.

Below is the mesh's own simulation: the real membership and election of every device, on links that
behave as TCP does. A job's messages travel on the same links, those of one kind between two devices
in order, those of different kinds not; what is under way when a link ends is lost.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from random import Random
from typing import Any, Protocol

from p2ptrain.recovery.choose_version import FullSnapshot
from p2ptrain.recovery.cores.job_history import NotedHistory
from tests.simulation.kernel import Kernel
from tests.simulation.network import LinkQuality, Network, Path
from tests.simulation.recovery import member
from tests.simulation.recovery.truth import Truth


class Process(member.Node, Protocol):
    """What the world asks and tells of a device."""

    runs: bool
    frozen: bool
    instance: int

    def receive(self, peer: str, kind: str, fields: dict[str, Any]) -> None: ...


class Killed(Exception):
    """A process ended in the middle of what it did."""


class Disk:
    """What the holder's machine keeps over the end of its process."""

    journal: NotedHistory | None = None
    reported: int = 0


class World:
    """See the module."""

    def __init__(self, seed: int, units: int) -> None:
        self.rng = Random(seed)
        self.kernel = Kernel()
        self.truth = Truth(units)
        self.nodes: dict[str, Process] = {}
        self.disk = Disk()
        self.copies: tuple[FullSnapshot, ...] = ()
        self.reported: list[int] = []
        self.ended: str | None = None
        self.calls = itertools.count(1)  # an answer to a process that has died is nobody's
        self.check: Callable[[], None] = lambda: None
        self.kill: Callable[[Process], None] = lambda node: None
        self.kill_rate = 0.0
        self.killed_inside: list[str] = []
        self.groups = self.rng.random() < 0.5
        self.replay_limit: int | None = None
        self.slow = self.rng.choice((0.002, 0.002, 0.02))
        self.no_memory_share = self.rng.choice((0.0, 0.0, 0.2))  # of copies offered
        self.short_share = 0.0  # of stages built, for which there is no memory
        self.no_plan_share = 0.0  # of plans without the one that leaves
        self.late_share = 0.0  # of messages, which come up to three seconds late
        self.network = Network(self.kernel, self.rng)
        self._build = self.rng.choice(member.BUILDS)
        self._members: dict[str, member.MeshMember] = {}
        self._held: dict[Path, list[Callable[[], None]]] = defaultdict(list)
        self._arrives: dict[tuple[str, str, str], float] = {}
        self._inboxes: dict[str, list[Callable[[], None]]] = defaultdict(list)
        self._commands: list[tuple[str, str, str, dict[str, Any]]] = []

    def add(self, node: Process) -> None:
        """Plug a device in."""
        self.nodes[node.id] = node
        self._members[node.id] = member.MeshMember(
            node,
            self._build,
            self.network,
            self.kernel,
            self.rng,
            lambda hear: self._tell(node, hear),
        )
        self.network.add(self._members[node.id])

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

        kernel = self.kernel
        kernel.at(kernel.now + seconds, label.encode(), run)

    def failpoint(self, node: Process) -> None:
        """Here a process may end. Raises Killed where it does."""
        if self.kill_rate and self.rng.random() < self.kill_rate:
            self.killed_inside.append(f"{self.now:.2f} {node.id} in the middle of something")
            self.kill(node)
            raise Killed

    def distrust(self, node: str, device: str, seconds: float) -> None:
        """As one of them sees it, another does not coordinate for a while."""
        self._members[node].distrust(device, seconds)

    # -- messages --------------------------------------------------------------------------

    def linked(self, one: str, other: str) -> bool:
        """Whether `one` has a link to `other`."""
        return self.network.end((one, other)) is not None

    def send(self, sender: str, receiver: str, kind: str, **fields: Any) -> bool:
        """Send; False where there is no link. To itself always works."""
        path, back = (sender, receiver), (receiver, sender)
        link = self.network.end(path)
        if sender != receiver and link is None:
            return False
        if kind in ("state_report", "prepare"):
            self._commands = [*self._commands[-30:], (sender, receiver, kind, fields)]
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
            if same and (sender == receiver or self.network.end(back) is link):
                self._give(receiver, lambda: target.receive(sender, kind, fields))

        def arrive() -> None:
            if sender != receiver and self.network.is_cut(path):
                self._held[path].append(deliver)
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

    def _tell(self, node: Process, hear: Callable[[], None]) -> None:
        """What the mesh says: soon, in order, to the process that runs now."""
        instance = node.instance

        def tell() -> None:
            if node.instance == instance and node.runs:
                self._give(node.id, hear)

        self.after(0.0, f"mesh tells {node.id}", tell)

    # -- faults ----------------------------------------------------------------------------

    def repeat_command(self) -> None:
        """A device that was frozen says now what it said long ago."""
        if self._commands:
            sender, receiver, kind, fields = self.rng.choice(self._commands)
            target = self.nodes[receiver]
            self._give(receiver, lambda: target.receive(sender, kind, {**fields, "request": 0}))

    def block(self, paths: list[Path]) -> None:
        """Nothing passes along these paths (sender, receiver), and nobody is informed."""
        self.network.cut(paths)

    def unblock(self, paths: list[Path]) -> None:
        """Undo one `block`."""
        self.network.heal(paths)
        for path in paths:
            if not self.network.is_cut(path):
                for deliver in self._held.pop(path, ()):
                    deliver()

    def slow_links(self, paths: list[Path], mean_seconds: float) -> None:
        """What membership says along these paths comes late, and some of it twice."""
        quality = LinkQuality(0.001, mean_seconds, duplicate_share=0.1)
        self.network.quality.update(dict.fromkeys(paths, quality))

    def mend_links(self) -> None:
        """No link is slow any more."""
        self.network.quality.clear()

    def cut(self, one: str, other: str) -> None:
        """The link breaks; what is under way is lost; both ends hear of it."""
        self.network.break_link(one, other)

    def process_started(self, device: str) -> None:
        """Its mesh is up as soon as the process is."""
        instance = self.nodes[device].instance

        def start() -> None:
            if self.nodes[device].instance == instance and self.nodes[device].runs:
                self._members[device].start()

        self.after(0.0, f"start {device}", start)

    def process_ended(self, device: str, *, left: bool = False) -> None:
        """Its kernel closes its links; `left`: it has said goodbye."""
        self._inboxes.pop(device, None)
        if left:
            self._members[device].leave()
        elif self._members[device].process_runs:
            self._members[device].crash()

    def power_off(self, device: str) -> None:
        """Nobody is informed."""
        self._inboxes.pop(device, None)
        self._members[device].power_off()

    def lose_disk(self, device: str) -> None:
        """The next process does not know how often it ran, nor for whom it voted."""
        self._members[device].lose_disk()

    def froze(self, device: str) -> None:
        """The process stands still until `thawed`."""
        self._members[device].freeze(float("inf"))

    def thawed(self, device: str) -> None:
        """It reads what waited, in any order of kinds, and doubts itself before others."""
        mesh_first = self.rng.random() < 0.5
        if mesh_first:
            self._members[device].thaw()
        inbox, self._inboxes[device] = self._inboxes[device], []
        for deliver in inbox:
            if self.nodes[device].runs:
                with suppress(Killed):
                    deliver()
        if not mesh_first:
            self._members[device].thaw()
