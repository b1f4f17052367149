"""Whether a firewall of this device may keep the others out.

What rules it has only an administrator may see; that one is on, anybody. So where one is, the
advice says what has to pass: multicast DNS, and the port that members connect to.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from p2ptrain.cli.checks.check import Check, ok, warn
from p2ptrain.mesh.config import DEFAULT_PORT

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
        return _judged("macOS's", "enabled" in _said(_MAC_COMMAND).lower(), _PYTHON_ADVICE)
    if platform == "win32":
        words = _said(_WINDOWS_COMMAND).upper().split()
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


def _said(command: Sequence[str]) -> str:
    """What a command prints; nothing where it is not there or does not end."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=COMMAND_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout
