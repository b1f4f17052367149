"""Which members this device has a link to, which it lost, and what it last heard over one."""

from __future__ import annotations


class PeerLinks:
    """A peer never linked is neither linked nor lost: messages to it may or may not arrive."""

    def __init__(self) -> None:
        self._heard: dict[str, float] = {}  # linked peers -> time of their last message
        self._flowed: dict[str, float] = {}  # those of them that sent much -> when
        self._signs: dict[str, float] = {}  # those from whom anything came, if only a part -> when
        self._lost: set[str] = set()

    def up(self, peer: str, now: float) -> None:
        """The first link to `peer` is up."""
        self._lost.discard(peer)
        self._heard[peer] = now

    def lost(self, peer: str) -> None:
        """The last link to `peer` ended."""
        self._heard.pop(peer, None)
        self._flowed.pop(peer, None)
        self._signs.pop(peer, None)
        self._lost.add(peer)

    def heard(self, peer: str, now: float) -> None:
        """A message came over the link to `peer`."""
        if peer in self._heard:
            self._heard[peer] = self._signs[peer] = now

    def flowed(self, peer: str, at: float) -> None:
        """Much came over the link to `peer`, of whatever kind."""
        if peer in self._heard:
            self._flowed[peer] = at

    def gave_sign(self, peer: str, at: float) -> None:
        """Something came over the link to `peer`, and be it what cannot be read yet."""
        if peer in self._heard:
            self._signs[peer] = at

    def last_flow(self, peer: str) -> float:
        """When much came over an open link; -infinity where nothing like that did."""
        return self._flowed.get(peer, float("-inf"))

    def others_since(self, moment: float, but: str) -> bool:
        """Whether anything came since then over an open link to any other peer."""
        return any(at >= moment for peer, at in self._signs.items() if peer != but)

    def forget_loss(self, peer: str) -> None:
        """The loss is dealt with: `peer` is gone."""
        self._lost.discard(peer)

    def is_up(self, peer: str) -> bool:
        """True while there is a link."""
        return peer in self._heard

    def is_lost(self, peer: str) -> bool:
        """True from the loss of a link until it is back or the peer is gone."""
        return peer in self._lost

    def last_heard(self, peer: str) -> float:
        """When the last message came over an open link; -infinity where there is no link."""
        return self._heard.get(peer, float("-inf"))
