"""Checks of the network: interfaces, firewall, speed of the links to other members.

Only an administrator can read a firewall's rules; any user can see that one is on. So where one is
on, the advice lists what has to pass: multicast DNS, and the port that members connect to. The
member that runs on this device measures its links.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from p2ptrain.cli.checks.check import Check, bad, ok, warn
from p2ptrain.errors import UserError
from p2ptrain.mesh.config import DEFAULT_PORT
from p2ptrain.mesh.discovery.interfaces import (
    InterfaceAddress,
    choose,
    interface_statistics,
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
        return _judged("macOS's", "enabled" in _output_of(_MAC_COMMAND).lower(), _PYTHON_ADVICE)
    if platform == "win32":
        words = _output_of(_WINDOWS_COMMAND).upper().split()
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


def _output_of(command: Sequence[str]) -> str:
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
    return [_link(entry) for entry in found]


def _link(entry: Mapping[str, Any]) -> Check:
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
