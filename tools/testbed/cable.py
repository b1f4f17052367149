"""One device's place on the network: its namespace, its address and the cable to the switch.

The bucket of a cable holds what the cable carries in 5 ms, at least 16 KiB: enough that a processor
which serves the bucket late does not cost rate at 1 Gbit/s, and so little that a short message is
not carried faster than a real cable would. TCP hands over pieces of at most half a bucket: larger
ones the kernel would cut into packets here, which at 100 Mbit/s costs several times the processor
time of all the rest. The queue before it holds 50 ms, about what a cheap home
switch does at 100 Mbit/s. Where the rate falls, the new bucket has room for the largest piece that
may wait from before: the kernel never lets a larger one go, nor anything behind it.
"""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass

_BUCKET_SECONDS = 0.005
_LEAST_BUCKET_BYTES = 16 * 1024
_QUEUE_SECONDS = 0.05
_MOST_PIECE_BYTES = 65_536
_WITH_HEADERS = 1.06
"""On the wire a piece is so many times longer: each of its packets has a header."""


@dataclass(frozen=True, slots=True)
class Cable:
    """Between port `number` of the switch and the device's `eth0`.

    Args:
        tag: what the namespace's name begins with.
        switch: the switch's namespace.
        number: from 0; one network has up to 250.
        ipv6: whether the device has IPv6's link-local address too.
    """

    tag: str
    switch: str
    number: int
    ipv6: bool = False

    @property
    def namespace(self) -> str:
        """The device's."""
        return f"{self.tag}-{self.number}"

    @property
    def address(self) -> str:
        """The device's IPv4 address."""
        return f"10.77.0.{self.number + 1}"

    def prefix(self) -> list[str]:
        """What to put before a command to run it on the device's network.

        Not `ip netns exec`: that mounts /sys again, and no cgroup limit could be read.
        """
        return ["nsenter", f"--net=/run/netns/{self.namespace}"]

    def make(self) -> None:
        """Create the namespace, and plug it in."""
        ip("netns", "add", self.namespace)
        # without IPv6, since split networks and taken addresses would leave a way by it;
        # with it, since addresses are usable at once only without a search for doubles
        setting = "default/accept_dad" if self.ipv6 else "all/disable_ipv6"
        value = 0 if self.ipv6 else 1
        write = f"echo {value} > /proc/sys/net/ipv6/conf/{setting}"
        run(*self.prefix(), "sh", "-c", write)
        ends = ("type", "veth", "peer", "name", "eth0", "netns", self.namespace)
        ip("-n", self.switch, "link", "add", self._port, *ends)
        ip("-n", self.switch, "link", "set", self._port, "master", "bridge", "up")
        ip("-n", self.namespace, "link", "set", "lo", "up")
        self.give_address()
        ip("-n", self.namespace, "link", "set", "eth0", "up")
        ip("-n", self.namespace, "route", "add", "default", "dev", "eth0")

    def set_rate(self, mbit: float | None) -> None:
        """What it carries from now on, in each direction at once; None: no limit.

        What waits in its queues stays there and goes on at the new rate.
        """
        for namespace, interface in ((self.switch, self._port), (self.namespace, "eth0")):
            if mbit is None:
                _remove_bucket(namespace, interface)
            else:
                _set_bucket(namespace, interface, mbit)
        ip("-n", self.namespace, "link", "set", "eth0", "gso_max_size", str(piece_bytes(mbit)))

    def unplug(self) -> None:
        """Packets end here, without a word to either side."""
        ip("-n", self.switch, "link", "set", self._port, "down")

    def plug(self) -> None:
        """Undo `unplug`."""
        ip("-n", self.switch, "link", "set", self._port, "up")

    def make_deaf_to(self, address: str) -> None:
        """Nothing from that address is heard here, without a word to anybody.

        What the device sends there still arrives. Multicast is heard: it only says who is where.
        """
        if "lookup local" in ip("-n", self.namespace, "rule", "show", "pref", "0"):
            # the kernel's own rule, which takes all that is for this device, must come after ours
            ip("-n", self.namespace, "rule", "add", "pref", "100", "lookup", "local")
            ip("-n", self.namespace, "rule", "delete", "pref", "0")
        ip("-n", self.namespace, "rule", "add", *_deaf_to(address))

    def let_hear(self, address: str) -> None:
        """Undo `make_deaf_to`."""
        ip("-n", self.namespace, "rule", "delete", *_deaf_to(address))

    def block_multicast(self) -> None:
        """The switch passes no multicast on to this device."""
        options = ("type", "bridge_slave", "mcast_flood", "off")
        ip("-n", self.switch, "link", "set", self._port, *options)

    def take_address(self) -> None:
        """The device has no IPv4 address any more."""
        ip("-n", self.namespace, "-4", "address", "flush", "dev", "eth0")

    def give_address(self) -> None:
        """Undo `take_address`."""
        ip("-n", self.namespace, "address", "add", f"{self.address}/24", "dev", "eth0")

    def sent_bytes(self) -> int:
        """What the device has sent, with Ethernet's headers."""
        return self._counted("tx")

    def received_bytes(self) -> int:
        """What the device has received, with Ethernet's headers."""
        return self._counted("rx")

    @property
    def _port(self) -> str:
        return f"port{self.number}"

    def _counted(self, direction: str) -> int:
        said = ip("-n", self.namespace, "-s", "-j", "link", "show", "dev", "eth0")
        (interface,) = json.loads(said)
        return int(interface["stats64"][direction]["bytes"])


def bucket_bytes(mbit: float) -> int:
    """How much a cable of this rate may carry at once."""
    return max(_LEAST_BUCKET_BYTES, round(mbit * 1e6 / 8 * _BUCKET_SECONDS))


def piece_bytes(mbit: float | None) -> int:
    """The most that TCP hands over at once (generic segmentation offload)."""
    return _MOST_PIECE_BYTES if mbit is None else min(_MOST_PIECE_BYTES, bucket_bytes(mbit) // 2)


def _deaf_to(address: str) -> tuple[str, ...]:
    return ("pref", "10", "from", address, "iif", "eth0", "blackhole")


def ip(*arguments: str) -> str:
    """Run `ip`; returns what it said. Raises subprocess.CalledProcessError."""
    return run("ip", *arguments)


def _set_bucket(namespace: str, interface: str, mbit: float) -> None:
    waiting_bytes = min(_bucket_bytes_now(namespace, interface) // 2, _MOST_PIECE_BYTES)
    burst = str(max(bucket_bytes(mbit), round(waiting_bytes * _WITH_HEADERS)))
    rate = f"{round(mbit * 1e6)}bit"
    latency = f"{round(1e6 * _QUEUE_SECONDS)}us"
    bucket = ("tbf", "rate", rate, "burst", burst, "latency", latency)
    run("tc", "-n", namespace, "qdisc", "replace", "dev", interface, "root", *bucket)


def _bucket_bytes_now(namespace: str, interface: str) -> int:
    shown = json.loads(run("tc", "-n", namespace, "-j", "qdisc", "show", "dev", interface))
    return max((one["options"].get("burst", 0) for one in shown), default=0)


def _remove_bucket(namespace: str, interface: str) -> None:
    if "tbf" in run("tc", "-n", namespace, "qdisc", "show", "dev", interface):
        run("tc", "-n", namespace, "qdisc", "delete", "dev", interface, "root")


def run(*command: str) -> str:
    """Run a command; returns what it said. Raises subprocess.CalledProcessError."""
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=10)
    return done.stdout
