"""This machine's interfaces: which ones lead to other devices, and how fast they are."""

from __future__ import annotations

from collections.abc import Sequence

from p2ptrain.cli.checks.check import Check, bad, ok, warn
from p2ptrain.mesh.interfaces import Address, choose, interface_statistics, machine_addresses

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


def _interface(address: Address, addresses: Sequence[Address]) -> Check:
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
