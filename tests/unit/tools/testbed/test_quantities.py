"""Sizes, rates and times as people write them."""

from __future__ import annotations

import pytest

from tools.testbed.cable import bucket_bytes, piece_bytes
from tools.testbed.control_groups import Quota
from tools.testbed.quantities import mbit, size_bytes


def test_units_are_those_of_tc_and_of_memory() -> None:
    assert mbit("100mbit") == 100
    assert mbit("1Gbit") == 1000
    assert mbit("512 kbit") == pytest.approx(0.512)
    assert size_bytes("2GiB") == 2 * 2**30
    assert size_bytes("1.5GB") == 1_500_000_000
    assert size_bytes("4096") == 4096


@pytest.mark.parametrize("text", ["", "fast", "-1mbit", "100", "1 2mbit", "100mbyte", "0mbit"])
def test_what_is_no_rate_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"rate|zero"):
        mbit(text)


@pytest.mark.parametrize("share", [0.001, 0.08, 0.18, 0.195, 0.295, 0.31, 0.999])
def test_a_quota_is_its_share_of_a_period_to_a_two_thousandth(share: float) -> None:
    quota = Quota.of_share(share)
    assert quota.microseconds is not None
    assert quota.microseconds / quota.period_microseconds == pytest.approx(share, rel=5e-4)
    assert quota.burst_microseconds <= quota.microseconds  # the kernel takes no more
    assert 1_000 <= quota.period_microseconds <= 1_000_000


def test_a_whole_core_has_no_quota() -> None:
    assert Quota.of_share(1.0).microseconds is None
    assert Quota.of_share(1.0).burst_microseconds == 0


def test_buckets_take_a_piece_of_tcp_whole() -> None:
    """Else the kernel cuts it into packets there, headers added."""
    for rate_mbit in (1.0, 10.0, 100.0, 1000.0, 10000.0):
        assert bucket_bytes(rate_mbit) >= 1.1 * piece_bytes(rate_mbit)
    assert bucket_bytes(1000.0) == 625_000
    assert piece_bytes(None) == 65_536
