"""A share of a core as a control group's quota, period and burst. Pure.

A quota of 0.2 core lets a device compute 1 ms of every 5, as a device a fifth as fast would over
any longer time. Over a shorter time it is faster: after a pause it finds a whole quota and what it
saved (the burst), and 2 ms of work may take 2 ms instead of 10. So
quotas are as short as the kernel allows, and a comparison with slower devices needs work of tens
of milliseconds.

The burst makes up for a CPU that another device held while this one's turn came: with it, and with
the metronome, every device reaches its share also when all compute (`tests/system/full_load.py`).
"""

from __future__ import annotations

from dataclasses import dataclass

LEAST_QUOTA_MICROSECONDS = 1_000
"""The kernel takes no less, neither as a quota nor as a period."""


@dataclass(frozen=True, slots=True)
class Quota:
    """So many microseconds of processor time in every period; `microseconds` None: no limit.

    Attributes:
        burst_microseconds: of earlier periods' unused quota that may be used late.
    """

    microseconds: int | None
    period_microseconds: int
    burst_microseconds: int

    @classmethod
    def of_share(cls, share: float) -> Quota:
        """The quota whose processor time is `share` of one core (0.001 to 1) to 0.05%."""
        if share >= 1:
            return cls(None, LEAST_QUOTA_MICROSECONDS, 0)
        quota = LEAST_QUOTA_MICROSECONDS
        return cls(quota, round(quota / share), quota)
