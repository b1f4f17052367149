"""Checks of the network: interfaces, firewall, multicast, speed of the links to other members.

Only an administrator can read a firewall's rules; any user can see that one is on. So where one is
on, the advice lists what has to pass: multicast DNS, and the port that members connect to. The
member that runs on this device measures its links.

Multicast DNS (RFC 6762) is tried by a datagram to its group that must come back through the same
interface (IP_MULTICAST_LOOP). That finds missing routes and local firewalls. That the access point
passes multicast on is only shown by another device's answer.
"""

from __future__ import annotations

import asyncio
import errno
import secrets
import socket
import struct
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from p2ptrain.cli.checks import Check, bad, ok, warn
from p2ptrain.errors import UserError
from p2ptrain.mesh.config import DEFAULT_PORT
from p2ptrain.mesh.discovery.interfaces import (
    InterfaceAddress,
    choose,
    interface_statistics,
    is_ipv6,
    machine_addresses,
)

_SLOW_MBIT_PER_S = 100


def interfaces() -> list[Check]:
    """A line an address, or one that says there is none."""
    addresses = machine_addresses()
    if all(address.is_loopback for address in addresses):
        return [
            bad(
                "interfaces",
                "this device has no network address that others could reach",
                "connect it to the network (only programs on this device can pair now)",
            )
        ]
    return [_interface(address, addresses) for address in addresses if not address.is_loopback]


def _interface(address: InterfaceAddress, addresses: Sequence[InterfaceAddress]) -> Check:
    subject = f"interface {address.interface}"
    if address.ip not in choose((), addresses):
        return ok(subject, f"{address.ip}, not used: it belongs to containers or virtual machines")
    statistics = interface_statistics().get(address.interface)
    speed = statistics.speed if statistics is not None else 0
    if 0 < speed < _SLOW_MBIT_PER_S:
        return warn(
            subject,
            f"{address.ip}, {speed} Mbit/s",
            "use a cable or a nearer access point: training sends every layer's output",
        )
    return ok(subject, f"{address.ip}, {f'{speed} Mbit/s' if speed else 'speed unknown'}")


UFW_SETTINGS = Path("/etc/ufw/ufw.conf")

FIREWALLD_RUNS = Path("/run/firewalld")

_MAC_COMMAND = ("/usr/libexec/ApplicationFirewall/socketfilterfw", "--getglobalstate")

_WINDOWS_COMMAND = ("netsh", "advfirewall", "show", "currentprofile", "state")

COMMAND_SECONDS = 5.0

_UFW_ADVICE = f"run  sudo ufw allow 5353/udp && sudo ufw allow {DEFAULT_PORT}/tcp"

_FIREWALLD_ADVICE = (
    f"run  sudo firewall-cmd --permanent --add-service=mdns --add-port={DEFAULT_PORT}/tcp "
    "&& sudo firewall-cmd --reload"
)

_PYTHON_ADVICE = "let Python accept connections from the local network where the system asks"


def firewall(
    platform: str = sys.platform,
    ufw_settings: Path = UFW_SETTINGS,
    firewalld_runs: Path = FIREWALLD_RUNS,
) -> Check:
    """One line; what a firewall that is on lets through cannot be seen from here."""
    if platform == "darwin":
        return _judged("macOS's", "enabled" in output_of(_MAC_COMMAND).lower(), _PYTHON_ADVICE)
    if platform == "win32":
        words = output_of(_WINDOWS_COMMAND).upper().split()
        return _judged("Windows's", "ON" in words, _PYTHON_ADVICE)
    if _ufw_is_on(ufw_settings):
        return _judged("ufw", True, _UFW_ADVICE)
    return _judged("firewalld", firewalld_runs.is_dir(), _FIREWALLD_ADVICE)


def _judged(name: str, is_on: bool, advice: str) -> Check:
    if not is_on:
        return ok("firewall", "none was found that is on")
    return warn("firewall", f"{name} is on; devices that find this one may not reach it", advice)


def _ufw_is_on(settings: Path) -> bool:
    try:
        lines = settings.read_text().lower().splitlines()
    except OSError:
        return False  # not installed, or not for us to read
    return "enabled=yes" in (line.replace(" ", "") for line in lines)


def output_of(command: Sequence[str]) -> str:
    """What a command prints; nothing where it is not there or does not end."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=COMMAND_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout


SLOW_BYTES_PER_S = 2_500_000
"""20 Mbit/s: activations of most models take longer than their computing."""

LONG_SECONDS = 0.02
"""One way; a cable has less than a thousandth of a second, good Wi-Fi two to five."""


async def links(folder: Path) -> list[Check]:
    """A line a member, or one that says why nothing could be measured."""
    from p2ptrain.control.client import ControlClient

    try:
        async with ControlClient(folder) as client:
            found = await client.links()
    except UserError as error:
        return [ok("links", f"not measured: {error}")]
    if not found:
        return [ok("links", "no other device is here")]
    return [link(entry) for entry in found]


def link(entry: Mapping[str, Any]) -> Check:
    """Whether one link, as a member measured it, is good for a training."""
    subject = f"link to {entry['name']}"
    if "error" in entry:
        return bad(
            subject, f"does not work: {entry['error']}", "run  p2ptrain doctor  on that device"
        )
    rate, latency = float(entry["bytes_per_s"]), float(entry["latency_s"])
    found = f"{rate * 8 / 1e6:.3g} Mbit/s, {latency * 1e3:.2g} ms"
    if "interface" in entry:
        found += f", at {entry['address']} over {entry['interface']}"
    if rate < SLOW_BYTES_PER_S:
        return warn(
            subject, found, "use a cable or a nearer access point; --wire int8 sends a quarter"
        )
    if latency > LONG_SECONDS:
        return warn(subject, found, "prefer a cable: every micro-batch waits for it on its way")
    return ok(subject, found)


MDNS_GROUP = "224.0.0.251"

MDNS_GROUP_IPV6 = "ff02::fb"

MDNS_PORT = 5353

ECHO_SECONDS = 1.0

LISTEN_SECONDS = 3.0


async def echoes() -> list[Check]:
    """Test every interface that a household would be looked for on, by IPv4 and by IPv6."""
    there = machine_addresses()
    used = choose((), there)
    groups = {(a.interface, is_ipv6(a.ip)): a.ip for a in there if a.ip in used}
    return list(await asyncio.gather(*(_echo(name, ip) for (name, _), ip in groups.items())))


async def _echo(interface: str, ip: str) -> Check:
    subject = f"multicast on {interface}{' by IPv6' if is_ipv6(ip) else ''}"
    try:
        heard = await echo(ip, ECHO_SECONDS)
    except OSError as error:
        return bad(
            subject, f"cannot be sent from {ip}: {error.strerror or error}", _FIREWALL_ADVICE
        )
    if not heard:
        return bad(subject, f"a datagram sent from {ip} did not come back", _FIREWALL_ADVICE)
    return ok(subject, f"a datagram sent from {ip} came back")


_FIREWALL_ADVICE = (
    "allow UDP port 5353 in this device's firewall, or name a device by its address on the "
    "others:  p2ptrain join --peer ADDRESS"
)


async def echo(ip: str, timeout_seconds: float) -> bool:
    """Whether a query sent to the mDNS group through `ip` is received here. Raises OSError."""
    loop = asyncio.get_running_loop()
    query = _query(secrets.token_hex(8))
    with _listener(ip) as receiver, _sender(ip) as sender:
        await loop.sock_sendto(
            sender, query, (MDNS_GROUP_IPV6 if is_ipv6(ip) else MDNS_GROUP, MDNS_PORT)
        )
        try:
            async with asyncio.timeout(timeout_seconds):
                while (await loop.sock_recv(receiver, 9000)) != query:
                    pass
        except TimeoutError:
            return False
    return True


def _query(label: str) -> bytes:
    """A well-formed question (RFC 1035) for a name that no device has."""
    name = b"".join(bytes([len(part)]) + part.encode() for part in (label, "p2ptrain", "local"))
    header = struct.pack("!6H", 0, 0, 1, 0, 0, 0)  # id, flags, one question, no records
    return header + name + b"\0" + struct.pack("!2H", 1, 1)  # type A, class IN


def _listener(ip: str) -> socket.socket:
    receiver = _socket(ip)
    try:
        if hasattr(socket, "SO_REUSEPORT"):
            receiver.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        receiver.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        receiver.bind(("", MDNS_PORT))
        if is_ipv6(ip):
            group = socket.inet_pton(socket.AF_INET6, MDNS_GROUP_IPV6) + struct.pack(
                "@I", _index(ip)
            )
            receiver.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_JOIN_GROUP, group)
        else:
            group = socket.inet_aton(MDNS_GROUP) + socket.inet_aton(ip)
            receiver.setsockopt(socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, group)
    except OSError:
        receiver.close()
        raise
    return receiver


def _sender(ip: str) -> socket.socket:
    sender = _socket(ip)
    try:
        if is_ipv6(ip):
            sender.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_MULTICAST_IF, _index(ip))
            sender.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_MULTICAST_LOOP, 1)
            sender.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_MULTICAST_HOPS, 255)
        else:
            sender.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, socket.inet_aton(ip))
            sender.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_LOOP, 1)
            sender.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_TTL, 255)
    except OSError:
        sender.close()
        raise
    return sender


def _socket(ip: str) -> socket.socket:
    made = socket.socket(socket.AF_INET6 if is_ipv6(ip) else socket.AF_INET, socket.SOCK_DGRAM)
    made.setblocking(False)
    return made


def _index(ip: str) -> int:
    """The number of the interface that has this IPv6 address. Raises OSError."""
    interface = next((a.interface for a in machine_addresses() if a.ip == ip), None)
    if interface is None:
        raise OSError(errno.EADDRNOTAVAIL, "the address is gone")
    return socket.if_nametoindex(interface)


async def neighbours() -> list[Check]:
    """Which devices announce themselves within a few seconds. Announces nothing itself."""
    found = await listen(LISTEN_SECONDS)
    if not found:
        return [
            warn(
                "devices",
                f"no other device answered in {LISTEN_SECONDS:.0f} s",
                "start  p2ptrain join  on another device. If it runs there, the network may block "
                "multicast (guest Wi-Fi, client isolation): run  p2ptrain join --peer ADDRESS",
            )
        ]
    return [ok("devices", f"heard {name}") for name in sorted(found)]


async def listen(duration_seconds: float) -> set[str]:
    """Announced devices as "first digits of the id at address port number"."""
    from zeroconf import ServiceStateChange, Zeroconf
    from zeroconf.asyncio import AsyncServiceBrowser, AsyncServiceInfo

    from p2ptrain.mesh.discovery.addresses import INSTANCE_DIGITS, SERVICE, parse
    from p2ptrain.mesh.discovery.mdns import addresses_of, listen_on

    names: set[str] = set()

    def on_change(
        zeroconf: Zeroconf, service_type: str, name: str, state_change: ServiceStateChange
    ) -> None:
        if state_change is not ServiceStateChange.Removed:
            names.add(name)

    network = listen_on(choose((), machine_addresses()))
    try:
        browser = AsyncServiceBrowser(network.zeroconf, SERVICE, handlers=[on_change])
        await asyncio.sleep(duration_seconds)  # the time is what is measured here
        await browser.async_cancel()
        found: set[str] = set()
        for name in names:
            info = AsyncServiceInfo(SERVICE, name)
            info.load_from_cache(network.zeroconf)
            device = parse(name, info.properties, addresses_of(info), info.port)
            if device is not None:
                ip, port = device.addresses[0]
                found.add(f"{device.id[:INSTANCE_DIGITS]} at {ip} port {port}")
        return found
    finally:
        await network.async_close()
