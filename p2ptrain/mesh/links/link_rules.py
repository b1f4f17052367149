"""Which of two links to the same device is kept, and which process of an identity. Pure.

Both sides dial, so that either may sit behind a firewall; usually one dial is first. Where both
cross, the one of the smaller id wins. A device that restarts shows a new instance while its old
link may not have ended yet: only asking over the old link tells a restart from a copied identity.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

from p2ptrain._version import PROTOCOL_VERSION
from p2ptrain.mesh.links.hello import Hello, Refusal, is_younger


class Action(Enum):
    """What to do with an incoming link."""

    ACCEPT = auto()
    """Take it; an older link to the same device is dropped."""
    REFUSE = auto()
    """Answer with the refusal."""
    ASK_OLD = auto()
    """Another instance: accept it if the old link does not answer, else `between_instances`."""
    STOP_SELF = auto()
    """An older process with our own identity is running."""


@dataclass(frozen=True, slots=True)
class Decision:
    """An action and why."""

    action: Action
    reason: str
    refusal: Refusal | None = None


@dataclass(frozen=True, slots=True)
class Situation:
    """What this device knows when a hello comes in.

    Attributes:
        own_id, own: this device.
        current: hello of the link to the same device that is up, or None.
        dialling: our own hello to it is on its way, not answered yet.
    """

    own_id: str
    own: Hello
    current: Hello | None
    dialling: bool


def judge_incoming(peer_id: str, theirs: Hello, here: Situation) -> Decision:
    """What to do with a link on which `theirs` is the first message."""
    if theirs.version != PROTOCOL_VERSION:
        return _refuse(Refusal.VERSION, f"it speaks protocol version {theirs.version}")
    if peer_id == here.own_id:
        return _judge_own(theirs, here)
    current = here.current
    if current is None:
        if here.dialling and here.own_id < peer_id:
            return _refuse(Refusal.CROSSED, "our own dial to it wins")
        return Decision(Action.ACCEPT, "first link")
    if current.instance != theirs.instance:
        return Decision(Action.ASK_OLD, "another process than the one connected")
    if theirs.last_token == current.token:
        return Decision(Action.ACCEPT, "the device lost the link we have")
    return _refuse(Refusal.CROSSED, "a link is up already")


def between_instances(peer_id: str, old: Hello, new: Hello) -> Decision:
    """Two processes with one identity, both alive: the younger one must stop."""
    if is_younger(new, peer_id, old, peer_id):
        return _refuse(Refusal.COPIED, "an older process with its identity is connected")
    return Decision(Action.ACCEPT, "it is older than the process connected so far")


def _judge_own(theirs: Hello, here: Situation) -> Decision:
    if theirs.instance == here.own.instance:
        return _refuse(Refusal.OWN, "this device dialled itself")
    if is_younger(theirs, here.own_id, here.own, here.own_id):
        return _refuse(Refusal.COPIED, "a younger process with our identity")
    return Decision(Action.STOP_SELF, "an older process with our identity")


def _refuse(refusal: Refusal, reason: str) -> Decision:
    return Decision(Action.REFUSE, reason, refusal)
