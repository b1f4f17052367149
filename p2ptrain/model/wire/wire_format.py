"""How floating-point values travel between devices: a job's choice.

The names alone, so that a command line needs no torch; `rounding` does the work.
"""

from __future__ import annotations

from enum import StrEnum


class WireFormat(StrEnum):
    """Exactly, or rounded as `rounding` says."""

    EXACT = "exact"
    BF16 = "bf16"
    INT8 = "int8"
