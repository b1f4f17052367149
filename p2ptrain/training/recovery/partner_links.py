"""Which links that its epoch needs broke, as one device has told the holder. Pure."""

from __future__ import annotations

from p2ptrain.training.recovery.device_instructions import DeviceInstruction, TellLink
from p2ptrain.training.recovery.placed import Placed


class PartnerLinks:
    """See the module.

    Args:
        device: own id.
    """

    def __init__(self, device: str) -> None:
        self._device = device
        self._broken: set[str] = set()  # peers

    def begin(self) -> None:
        """An epoch begins: what broke before is known."""
        self._broken.clear()

    def ended(self, running: Placed, peer: str) -> list[DeviceInstruction]:
        """The link to `peer` broke. The holder sees its own links."""
        if running.holder in (peer, self._device) or peer not in running.partners_of(self._device):
            return []
        self._broken.add(peer)
        return [TellLink(running.holder, running.epoch, peer)]

    def started(self, running: Placed, peer: str) -> list[DeviceInstruction]:
        """There is a link to `peer`, perhaps again."""
        if peer not in self._broken:
            return []
        self._broken.discard(peer)
        return [TellLink(running.holder, running.epoch, peer, back=True)]
