"""A device's place in the mesh: the real membership and election, and what they tell the node."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Protocol

from p2ptrain.mesh.interface import MemberState
from p2ptrain.mesh.membership.core_events import (
    CoordinatorIs,
    CoordinatorLost,
    ElectionInstruction,
    Instruction,
    MemberUpdated,
)
from p2ptrain.mesh.membership.membership_config import HOME_LAN, MembershipConfig
from tests.simulation.device import Build, Device
from tests.simulation.kernel import Kernel
from tests.simulation.network import Network

SPARSE = MembershipConfig(heartbeat_seconds=0.4, probe_interval_seconds=0.5)
"""Half the messages and a quarter of the ticks of the home preset; silence is noticed later."""
BUILDS = (
    Build(membership_config=SPARSE),
    Build(membership_config=SPARSE),
    Build(membership_config=SPARSE),
    Build(membership_config=HOME_LAN),
)
"""What a household's seed draws from."""
_LIVE = (MemberState.ALIVE, MemberState.SUSPECT)


class Node(Protocol):
    """What the mesh tells of."""

    id: str
    alive: dict[str, bool]
    follows: tuple[str, int] | None

    def on_link_up(self, peer: str) -> None: ...
    def on_link_lost(self, peer: str) -> None: ...
    def on_appeared(self, peer: str) -> None: ...
    def on_died(self, peer: str, *, certain: bool) -> None: ...
    def on_left(self, peer: str) -> None: ...
    def on_coordinator(self) -> None: ...


class MeshMember(Device):
    """As the membership driver does: changes are reported in order, after the core's turn.

    Args:
        tell: has what is given to it called soon, if this process still runs then.
    """

    def __init__(
        self,
        node: Node,
        build: Build,
        network: Network,
        kernel: Kernel,
        rng: Random,
        tell: Callable[[Callable[[], None]], None],
    ) -> None:
        super().__init__(node.id, build, network, kernel, rng)
        self._node = node
        self._tell = tell
        self.watch = lambda _device, out: self._on_out(out)

    def on_link_up(self, peer: str) -> None:
        """See `Device`."""
        super().on_link_up(peer)
        self._receive(lambda: self._tell(lambda: self._node.on_link_up(peer)))

    def on_link_lost(self, peer: str, *, refused: bool) -> None:
        """See `Device`."""
        super().on_link_lost(peer, refused=refused)
        self._receive(lambda: self._tell(lambda: self._node.on_link_lost(peer)))

    def _on_changed(self, change: MemberUpdated) -> None:
        peer = change.record.id
        had_link = self._network.end((self.id, peer)) is not None
        super()._on_changed(change)
        if had_link and self._network.end((self.id, peer)) is None:
            self._tell(lambda: self._node.on_link_lost(peer))  # it was cut here, by the verdict

    def _on_out(self, out: list[Instruction | ElectionInstruction]) -> None:
        for instruction in out:
            match instruction:
                case MemberUpdated() if instruction.record.id != self.id:
                    self._on_change(instruction)
                case CoordinatorIs(leader, term):
                    self._set_coordinator((leader, term))
                case CoordinatorLost():
                    self._set_coordinator(None)

    def _on_change(self, change: MemberUpdated) -> None:
        peer, state, certain = change.record.id, change.record.state, change.record.certain
        was_alive = change.previous_state in _LIVE

        def hear() -> None:
            node = self._node
            node.alive[peer] = state in _LIVE
            if state is MemberState.LEFT:
                node.on_left(peer)
            elif state is MemberState.DEAD:
                node.on_died(peer, certain=certain)
            elif not was_alive:
                node.on_appeared(peer)

        self._tell(hear)

    def _set_coordinator(self, office: tuple[str, int] | None) -> None:
        def hear() -> None:
            self._node.follows = office
            self._node.on_coordinator()

        self._tell(hear)
