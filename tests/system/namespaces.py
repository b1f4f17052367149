"""Devices on a network of their own: Linux network namespaces on a bridge, as root.

    switch (a namespace)          device i (a namespace)
    bridge -- port i  ~~veth~~  eth0  10.77.0.(i+1)/24

Multicast snooping is off, so that the bridge passes mDNS on as a home router's switch does.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import subprocess
from collections.abc import Iterator
from types import TracebackType
from typing import Self

_numbers = itertools.count()


class Network:
    """`count` devices' network places, for as long as the context lasts.

    Args:
        count: devices, each with an address of its own.
        rate: of each cable in each direction, as `tc` writes it ("100mbit"); None: no limit.
    """

    def __init__(self, count: int, rate: str | None = None) -> None:
        self._count = count
        self._rate = rate
        self._tag = f"p2p{os.getpid()}x{next(_numbers)}"

    def __enter__(self) -> Self:
        try:
            self._make_switch()
            for device in range(self._count):
                self._make_device(device)
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._remove()

    def prefix(self, device: int) -> list[str]:
        """What to put before a command to run it on that device's network.

        Not `ip netns exec`: that mounts /sys anew, and no cgroup limit could be read.
        """
        return ["nsenter", f"--net=/run/netns/{self._name(device)}"]

    def address(self, device: int) -> str:
        """The device's IPv4 address."""
        return f"10.77.0.{device + 1}"

    def block_multicast(self) -> None:
        """From now on no port of the switch passes multicast on, as guest networks do."""
        for device in range(self._count):
            options = ("type", "bridge_slave", "mcast_flood", "off")
            _ip("-n", self._switch, "link", "set", f"port{device}", *options)

    def pull_cable(self, device: int) -> None:
        """The device's packets end here, without a word to either side."""
        _ip("-n", self._switch, "link", "set", f"port{device}", "down")

    def take_address(self, device: int) -> None:
        """The device has no address any more, as before Wi-Fi is up."""
        _ip("-n", self._name(device), "address", "flush", "dev", "eth0")

    def give_address(self, device: int) -> None:
        """Undo `take_address`."""
        own = f"{self.address(device)}/24"
        _ip("-n", self._name(device), "address", "add", own, "dev", "eth0")

    def plug_cable(self, device: int) -> None:
        """Undo `pull_cable`."""
        _ip("-n", self._switch, "link", "set", f"port{device}", "up")

    @property
    def _switch(self) -> str:
        return f"{self._tag}-switch"

    def _name(self, device: int) -> str:
        return f"{self._tag}-{device}"

    def _make_switch(self) -> None:
        _ip("netns", "add", self._switch)
        bridge = ("name", "bridge", "type", "bridge", "mcast_snooping", "0", "forward_delay", "0")
        _ip("-n", self._switch, "link", "add", *bridge)
        _ip("-n", self._switch, "link", "set", "bridge", "up")

    def _make_device(self, device: int) -> None:
        name, port = self._name(device), f"port{device}"
        _ip("netns", "add", name)
        ends = ("type", "veth", "peer", "name", "eth0", "netns", name)
        _ip("-n", self._switch, "link", "add", port, *ends)
        _ip("-n", self._switch, "link", "set", port, "master", "bridge", "up")
        _ip("-n", name, "link", "set", "lo", "up")
        _ip("-n", name, "address", "add", f"{self.address(device)}/24", "dev", "eth0")
        _ip("-n", name, "link", "set", "eth0", "up")
        _ip("-n", name, "route", "add", "default", "dev", "eth0")
        if self._rate is not None:
            self._limit(self._switch, port, self._rate)
            self._limit(name, "eth0", self._rate)

    @staticmethod
    def _limit(namespace: str, interface: str, rate: str) -> None:
        bucket = ("tbf", "rate", rate, "burst", "64kb", "latency", "200ms")
        _run("tc", "-n", namespace, "qdisc", "add", "dev", interface, "root", *bucket)

    def _remove(self) -> None:
        for name in (*map(self._name, range(self._count)), self._switch):
            with contextlib.suppress(subprocess.CalledProcessError):
                _ip("netns", "delete", name)


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


def _ip(*arguments: str) -> None:
    _run("ip", *arguments)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=10)
