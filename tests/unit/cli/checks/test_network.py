"""What the doctor says of a machine's addresses."""

from __future__ import annotations

import pytest

from p2ptrain.cli.checks import network
from p2ptrain.cli.checks.check import Verdict
from p2ptrain.mesh.interfaces import Address

LOOPBACK = [Address("lo", "127.0.0.1")]


@pytest.mark.parametrize(
    ("ipv6", "verdict", "says"),
    [
        ([Address("lo", "::1")], Verdict.BAD, "no network address"),
        ([Address("eth0", "fe80::1%eth0")], Verdict.BAD, "no network address"),
        ([Address("eth0", "fe80::1%eth0"), Address("eth0", "fd00::1")], Verdict.WARN, "fd00::1"),
    ],
)
def test_a_machine_without_ipv4_is_told_what_to_do(
    monkeypatch: pytest.MonkeyPatch, ipv6: list[Address], verdict: Verdict, says: str
) -> None:
    monkeypatch.setattr(network, "machine_addresses", lambda: LOOPBACK)
    monkeypatch.setattr(network, "machine_ipv6_addresses", lambda: ipv6)
    (check,) = network.interfaces()
    assert check.verdict is verdict
    assert says in check.found
    assert (says in check.advice) == (verdict is Verdict.WARN)
