"""A share of a core as a control group's quota and period. Pure.

A quota of 0.2 core lets a device compute 1 ms of every 5, as a device a fifth as fast would over
any longer time. Over a shorter time it is faster: after a pause it finds a whole quota, and 2 ms of
work may take 2 ms instead of 10 (`tools/processor_share.py`). So periods are as short as the kernel
allows, and whoever compares times with those of slower devices times work of tens of milliseconds.
"""

from __future__ import annotations

from dataclasses import dataclass

LEAST_QUOTA_MICROSECONDS = 1_000
"""The kernel takes no less, neither as a quota nor as a period."""


@dataclass(frozen=True, slots=True)
class Quota:
    """So many microseconds of processor time in every period; `microseconds` None: no limit."""

    microseconds: int | None
    period_microseconds: int

    @classmethod
    def of_share(cls, share: float) -> Quota:
        """The quota whose processor time is `share` of one core (0.001 to 1) to 0.05%."""
        if share >= 1:
            return cls(None, LEAST_QUOTA_MICROSECONDS)
        period = round(LEAST_QUOTA_MICROSECONDS / share)
        return cls(LEAST_QUOTA_MICROSECONDS, period)
