"""What the doctor says of a machine's addresses."""

from __future__ import annotations

import pytest

from p2ptrain.cli.checks import network
from p2ptrain.cli.checks.check import Verdict
from p2ptrain.mesh.discovery.interfaces import Address

LOOPBACK = [Address("lo", "127.0.0.1")]


@pytest.mark.parametrize(
    ("others", "verdict", "says"),
    [
        ([Address("lo", "::1")], Verdict.BAD, "no network address"),
        ([Address("eth0", "fe80::1%eth0")], Verdict.OK, "fe80::1%eth0"),
        ([Address("eth0", "fd00::1")], Verdict.OK, "fd00::1"),
    ],
)
def test_a_machine_without_ipv4_is_told_what_it_has(
    monkeypatch: pytest.MonkeyPatch, others: list[Address], verdict: Verdict, says: str
) -> None:
    monkeypatch.setattr(network, "machine_addresses", lambda: [*LOOPBACK, *others])
    (check,) = network.interfaces()
    assert check.verdict is verdict
    assert says in check.found
