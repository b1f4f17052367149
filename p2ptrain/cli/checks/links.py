"""How fast the links to the other members are, measured by the member that runs here."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from p2ptrain.cli.checks.check import Check, bad, ok, warn
from p2ptrain.errors import UserError

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
