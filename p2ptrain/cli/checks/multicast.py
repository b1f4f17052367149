"""Whether multicast DNS (RFC 6762) works: first on this machine, then who answers on the network.

The first test sends a datagram to the mDNS group through one interface and waits for its own copy
(IP_MULTICAST_LOOP). It finds missing routes and local firewalls. That the access point passes
multicast on is only shown by another device's answer.
"""

from __future__ import annotations

import asyncio
import errno
import secrets
import socket
import struct

from p2ptrain.cli.checks.check import Check, bad, ok, warn
from p2ptrain.mesh.discovery.interfaces import choose, is_ipv6, machine_addresses

GROUP = "224.0.0.251"

GROUP_IPV6 = "ff02::fb"

PORT = 5353

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
        await loop.sock_sendto(sender, query, (GROUP_IPV6 if is_ipv6(ip) else GROUP, PORT))
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
        receiver.bind(("", PORT))
        if is_ipv6(ip):
            group = socket.inet_pton(socket.AF_INET6, GROUP_IPV6) + struct.pack("@I", _index(ip))
            receiver.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_JOIN_GROUP, group)
        else:
            group = socket.inet_aton(GROUP) + socket.inet_aton(ip)
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

    from p2ptrain.mesh.discovery.candidates import INSTANCE_DIGITS, SERVICE, parse
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
