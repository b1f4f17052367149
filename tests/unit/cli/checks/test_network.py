"""What the doctor says of the network: addresses, firewalls, the links a member has measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from p2ptrain.cli.checks import Severity, network
from p2ptrain.cli.checks.network import firewall, link, links
from p2ptrain.mesh.config import DEFAULT_PORT
from p2ptrain.mesh.discovery.interfaces import InterfaceAddress

LOOPBACK = [InterfaceAddress("lo", "127.0.0.1")]


@pytest.mark.parametrize(
    ("others", "verdict", "says"),
    [
        ([InterfaceAddress("lo", "::1")], Severity.BAD, "no network address"),
        ([InterfaceAddress("eth0", "fe80::1%eth0")], Severity.OK, "fe80::1%eth0"),
        ([InterfaceAddress("eth0", "fd00::1")], Severity.OK, "fd00::1"),
    ],
)
def test_a_machine_without_ipv4_gets_a_list_of_what_it_has(
    monkeypatch: pytest.MonkeyPatch, others: list[InterfaceAddress], verdict: Severity, says: str
) -> None:
    monkeypatch.setattr(network, "machine_addresses", lambda: [*LOOPBACK, *others])
    (check,) = network.interfaces()
    assert check.verdict is verdict
    assert says in check.found


def linux(tmp_path: Path) -> Severity:
    return firewall("linux", tmp_path / "ufw.conf", tmp_path / "firewalld").verdict


def test_without_a_firewall_there_is_nothing_to_do(tmp_path: Path) -> None:
    assert linux(tmp_path) is Severity.OK


@pytest.mark.parametrize(
    ("line", "verdict"),
    [
        ("ENABLED=yes", Severity.WARN),
        ("enabled = YES", Severity.WARN),
        ("ENABLED=no", Severity.OK),
        ("# ENABLED=yes", Severity.OK),
    ],
)
def test_ufw_says_in_its_settings_whether_it_is_on(
    tmp_path: Path, line: str, verdict: Severity
) -> None:
    (tmp_path / "ufw.conf").write_text(f"# settings\n{line}\nLOGLEVEL=low\n")
    assert linux(tmp_path) is verdict


def test_firewalld_is_on_while_its_folder_is_there(tmp_path: Path) -> None:
    (tmp_path / "firewalld").mkdir()
    found = firewall("linux", tmp_path / "ufw.conf", tmp_path / "firewalld")
    assert found.verdict is Severity.WARN
    assert str(DEFAULT_PORT) in found.advice
    assert "mdns" in found.advice


@pytest.mark.parametrize(
    ("platform", "said", "verdict"),
    [
        ("darwin", "Firewall is enabled. (State = 1)\n", Severity.WARN),
        ("darwin", "Firewall is disabled. (State = 0)\n", Severity.OK),
        ("darwin", "", Severity.OK),
        ("win32", "Public Profile Settings:\n---\nState                 ON\nOk.\n", Severity.WARN),
        ("win32", "Public Profile Settings:\n---\nState                 OFF\nOk.\n", Severity.OK),
    ],
)
def test_other_systems_are_asked(
    monkeypatch: pytest.MonkeyPatch, platform: str, said: str, verdict: Severity
) -> None:
    monkeypatch.setattr(network, "output_of", lambda command: said)
    assert firewall(platform).verdict is verdict


def test_a_command_that_is_not_there_says_nothing() -> None:
    assert network.output_of(["/does/not/exist"]) == ""


@pytest.mark.parametrize(
    ("entry", "verdict", "said"),
    [
        ({"bytes_per_s": 11.7e6, "latency_s": 0.0012}, Severity.OK, "93.6 Mbit/s, 1.2 ms"),
        ({"bytes_per_s": 1.0e6, "latency_s": 0.003}, Severity.WARN, "8 Mbit/s, 3 ms"),
        ({"bytes_per_s": 11.7e6, "latency_s": 0.045}, Severity.WARN, "93.6 Mbit/s, 45 ms"),
        ({"error": "the link has ended"}, Severity.BAD, "does not work: the link has ended"),
    ],
)
def test_a_link_is_judged_by_rate_and_latency(
    entry: dict[str, Any], verdict: Severity, said: str
) -> None:
    found = link({"name": "pi", "id": "00", **entry})
    assert (found.subject, found.verdict, found.found) == ("link to pi", verdict, said)
    assert bool(found.advice) == (verdict is not Severity.OK)


async def test_without_a_member_nothing_is_measured(tmp_path: Path) -> None:
    [found] = await links(tmp_path)
    assert found.verdict is Severity.OK
    assert found.found.startswith("not measured: p2ptrain is not running")
