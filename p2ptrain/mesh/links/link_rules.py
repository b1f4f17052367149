"""Which of two links to the same device is kept, and which process of an identity. Pure.

Both sides dial, because either may sit behind a firewall; usually one dial is first. Where both
cross, the one of the smaller id wins. A device that restarts shows a new instance while its old
link may not have ended yet: only a question over the old link separates a restart from a copied
identity.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

from p2ptrain._version import PROTOCOL_VERSION
from p2ptrain.mesh.links.hello import Hello, LinkRefusal, is_younger


class LinkAction(Enum):
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
class LinkDecision:
    """An action and why."""

    action: LinkAction
    reason: str
    refusal: LinkRefusal | None = None


@dataclass(frozen=True, slots=True)
class LinkSituation:
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


def judge_incoming(peer_id: str, theirs: Hello, here: LinkSituation) -> LinkDecision:
    """What to do with a link on which `theirs` is the first message."""
    if theirs.version != PROTOCOL_VERSION:
        return _refuse(LinkRefusal.VERSION, f"it speaks protocol version {theirs.version}")
    if peer_id == here.own_id:
        return _judge_own(theirs, here)
    current = here.current
    if current is None:
        if here.dialling and here.own_id < peer_id:
            return _refuse(LinkRefusal.CROSSED, "our own dial to it wins")
        return LinkDecision(LinkAction.ACCEPT, "first link")
    if current.instance != theirs.instance:
        return LinkDecision(LinkAction.ASK_OLD, "another process than the one connected")
    if theirs.last_token == current.token:
        return LinkDecision(LinkAction.ACCEPT, "the device lost the link we have")
    return _refuse(LinkRefusal.CROSSED, "a link is up already")


def between_instances(peer_id: str, old: Hello, new: Hello) -> LinkDecision:
    """Two processes with one identity, both alive: the younger one must stop."""
    if is_younger(new, peer_id, old, peer_id):
        return _refuse(LinkRefusal.COPIED, "an older process with its identity is connected")
    return LinkDecision(LinkAction.ACCEPT, "it is older than the process connected so far")


def _judge_own(theirs: Hello, here: LinkSituation) -> LinkDecision:
    if theirs.instance == here.own.instance:
        return _refuse(LinkRefusal.OWN, "this device dialled itself")
    if is_younger(theirs, here.own_id, here.own, here.own_id):
        return _refuse(LinkRefusal.COPIED, "a younger process with our identity")
    return LinkDecision(LinkAction.STOP_SELF, "an older process with our identity")


def _refuse(refusal: LinkRefusal, reason: str) -> LinkDecision:
    return LinkDecision(LinkAction.REFUSE, reason, refusal)
