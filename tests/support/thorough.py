"""How many examples the slower property tests draw: a sample, or many times as many.

P2PTRAIN_EXAMPLES=10 make test
"""

from __future__ import annotations

import os

_FACTOR = int(os.environ.get("P2PTRAIN_EXAMPLES", "1"))


def examples_of(count: int) -> int:
    """The examples of a test that makes do with `count` in everyday runs."""
    return count * _FACTOR
