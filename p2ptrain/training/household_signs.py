"""What the mesh says of the household, told to the rules of a job: who is there, who is gone."""

from __future__ import annotations

from collections.abc import Callable

from p2ptrain.mesh.interface import (
    LinkLost,
    LinkUp,
    MemberChanged,
    MemberState,
    Mesh,
    MeshEvent,
)
from p2ptrain.training.recovery import holder_events as rules


class HouseholdSigns:
    """See the module. `watch` from the start of a job to its end.

    Args:
        alone: the job wants no other device.
        tell: hears each sign.
    """

    def __init__(self, mesh: Mesh, alone: bool, tell: Callable[[rules.HolderEvent], None]) -> None:
        self._mesh = mesh
        self._alone = alone
        self._tell = tell

    def watch(self) -> Callable[[], None]:
        """Tell what is so now, and what changes, until the returned function is called."""
        unsubscribe = self._mesh.subscribe(self._on_mesh_event)
        for member in self._mesh.members.values():
            if member.state is MemberState.ALIVE:
                self._on_member(member.id, member.state)
        return unsubscribe

    def _on_mesh_event(self, event: MeshEvent) -> None:
        match event:
            case MemberChanged(member, _, certain):
                self._on_member(member.id, member.state, certain=certain)
            case LinkLost(peer):
                self._tell(rules.LinkTrouble(self._mesh.self_id, peer))
            case LinkUp(peer):
                self._tell(rules.LinkBack(self._mesh.self_id, peer))

    def _on_member(self, device: str, state: MemberState, *, certain: bool = False) -> None:
        if self._alone and device != self._mesh.self_id:
            return
        match state:
            case MemberState.ALIVE:
                self._tell(rules.Appeared(device))
            case MemberState.DEAD | MemberState.LEFT:
                self._tell(rules.Died(device, certain, left=state is MemberState.LEFT))
            case MemberState.SUSPECT:
                pass  # it may refute
