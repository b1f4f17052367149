"""Sizes and rates as users and `tc` write them.

`100mbit` is 10^8 bit/s; `2GiB` is 2 * 2^30 bytes and `2GB` 2 * 10^9.
"""

from __future__ import annotations

import re
from math import inf

_MBIT = {"kbit": 1e-3, "mbit": 1.0, "gbit": 1e3}
_BYTES = {"": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30}


def mbit(text: str) -> float:
    """A rate such as `100mbit` or `1gbit`, in Mbit/s. Raises ValueError."""
    value = _number(text, _MBIT, "a rate: write it like 100mbit or 1gbit")
    if value <= 0:
        raise ValueError(f"{text!r} is not above zero")
    return value


def size_bytes(text: str) -> int:
    """A size such as `2GiB` or `512MB`, in bytes. Raises ValueError."""
    value = int(_number(text, _BYTES, "a size: write it like 2GiB or 512MB"))
    if value <= 0:
        raise ValueError(f"{text!r} is not above zero")
    return value


def _number(text: str, units: dict[str, float] | dict[str, int], words: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", text.strip().lower())
    if match is None or match[2] not in units:
        raise ValueError(f"{text!r} is not {words}")
    value = float(match[1]) * units[match[2]]
    if value == inf:  # of hundreds of digits
        raise ValueError(f"{text[:20]!r}... is too large")
    return value
