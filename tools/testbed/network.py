"""Devices on a network of their own: Linux network namespaces on a bridge, as root.

    switch (a namespace)          device i (a namespace)
    bridge -- port i  ~~veth~~  eth0  10.77.0.(i+1)/24

Multicast snooping is off, so that the bridge passes mDNS on as a home router's switch does. A
cable's rate is a token bucket at each of its ends: the device's own for what it sends, the port's
for what it receives, so the two directions do not disturb each other.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import subprocess
from collections.abc import Iterator
from typing import Self, TypeAlias

from tools.testbed import quantities
from tools.testbed.cable import Cable, ip

_numbers = itertools.count()

Blocked: TypeAlias = frozenset[tuple[int, int]]
"""Pairs of sender and receiver."""


class Network:
    """`count` devices' network places, for as long as the context lasts.

    Args:
        count: devices, each with an address of its own.
        rate: of each cable in each direction, as `tc` writes it ("100mbit"); None: no limit.
        tag: what the names of its namespaces begin with; unique by itself.
        ipv6: whether devices have IPv6's link-local addresses too.

    Attributes:
        cables: of each device, in order.
    """

    def __init__(
        self, count: int, rate: str | None = None, tag: str | None = None, ipv6: bool = False
    ) -> None:
        self._rate_mbit = None if rate is None else quantities.mbit(rate)
        self._tag = tag or f"p2p{os.getpid()}x{next(_numbers)}"
        self._switch = f"{self._tag}-switch"
        self._blocked: Blocked = frozenset()
        self.cables = [Cable(self._tag, self._switch, device, ipv6) for device in range(count)]

    def __enter__(self) -> Self:
        try:
            self._make_switch()
            for cable in self.cables:
                cable.make()
                cable.set_rate(self._rate_mbit)
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._remove()

    def prefix(self, device: int) -> list[str]:
        """What to put before a command to run it on that device's network."""
        return self.cables[device].prefix()

    def address(self, device: int) -> str:
        """The device's IPv4 address."""
        return self.cables[device].address

    def block_multicast(self) -> None:
        """From now on no port of the switch passes multicast on, as guest networks do."""
        for cable in self.cables:
            cable.block_multicast()

    def pull_cable(self, device: int) -> None:
        """The device's packets end here, without a word to either side."""
        self.cables[device].unplug()

    def plug_cable(self, device: int) -> None:
        """Undo `pull_cable`."""
        self.cables[device].plug()

    def split(self, blocked: Blocked) -> None:
        """From now on nothing passes from sender to receiver of these pairs; all others are whole.

        What was sent and not acknowledged is sent again by the kernel, and arrives once it passes.
        """
        for sender, receiver in self._blocked - blocked:
            self.cables[receiver].let_hear(self.address(sender))
        for sender, receiver in blocked - self._blocked:
            self.cables[receiver].make_deaf_to(self.address(sender))
        self._blocked = blocked

    def take_address(self, device: int) -> None:
        """The device has no IPv4 address any more, as before Wi-Fi is up."""
        self.cables[device].take_address()

    def give_address(self, device: int) -> None:
        """Undo `take_address`."""
        self.cables[device].give_address()

    def _make_switch(self) -> None:
        ip("netns", "add", self._switch)
        bridge = ("name", "bridge", "type", "bridge", "mcast_snooping", "0", "forward_delay", "0")
        ip("-n", self._switch, "link", "add", *bridge)
        ip("-n", self._switch, "link", "set", "bridge", "up")

    def _remove(self) -> None:
        remove_namespaces([*(cable.namespace for cable in self.cables), self._switch])


@contextlib.contextmanager
def private_network() -> Iterator[list[str]]:
    """One network place that several devices share, apart from this machine's real network.

    Yields what to put before commands; where namespaces cannot be made, nothing: then the devices
    of other tests, or of this house, may be heard too.
    """
    with contextlib.ExitStack() as stack:
        try:
            network = stack.enter_context(Network(1))
        except (OSError, subprocess.CalledProcessError):
            yield []
        else:
            yield network.prefix(0)


def remove_namespaces(names: list[str]) -> None:
    """Remove those of these namespaces that exist, with all that is in them."""
    for name in names:
        with contextlib.suppress(subprocess.CalledProcessError):  # it was never made
            ip("netns", "delete", name)
