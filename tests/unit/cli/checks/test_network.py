"""What the doctor says of a machine's addresses."""

from __future__ import annotations

import pytest

from p2ptrain.cli.checks import network
from p2ptrain.cli.checks.check import Severity
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
