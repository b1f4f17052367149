"""This machine's interfaces: which ones lead to other devices, and how fast they are."""

from __future__ import annotations

from collections.abc import Sequence

import psutil

from p2ptrain.cli.checks.check import Check, bad, ok, warn
from p2ptrain.mesh.interfaces import (
    Address,
    choose,
    instead_of_loopback,
    machine_addresses,
    machine_ipv6_addresses,
)

_SLOW_MBIT_PER_S = 100


def interfaces() -> list[Check]:
    """A line an address, or one that says there is none."""
    addresses = machine_addresses()
    if all(address.is_loopback for address in addresses):
        return [_without_ipv4(instead_of_loopback((), machine_ipv6_addresses()))]
    return [_interface(address, addresses) for address in addresses if not address.is_loopback]


def _without_ipv4(told: Sequence[str]) -> Check:
    if told:
        return warn(
            "interfaces",
            f"this device has IPv6 alone ({', '.join(told)}), with which others are not looked for",
            f"name one device on each other one: p2ptrain join --peer '[{told[0]}]'",
        )
    return bad(
        "interfaces",
        "this device has no network address that others could reach",
        "connect it to the network (only processes on this machine can pair now)",
    )


def _interface(address: Address, addresses: Sequence[Address]) -> Check:
    subject = f"interface {address.interface}"
    if address.ip not in choose((), addresses):
        return ok(subject, f"{address.ip}, not used: it belongs to containers or virtual machines")
    statistics = psutil.net_if_stats().get(address.interface)
    speed = statistics.speed if statistics is not None else 0
    if 0 < speed < _SLOW_MBIT_PER_S:
        return warn(
            subject,
            f"{address.ip}, {speed} Mbit/s",
            "use a cable or a nearer access point: training sends every layer's output",
        )
    return ok(subject, f"{address.ip}, {f'{speed} Mbit/s' if speed else 'speed unknown'}")
