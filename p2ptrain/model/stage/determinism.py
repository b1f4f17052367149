"""Dropout and its like, the same on whatever device a unit runs; and one default type everywhere.

Before a unit that draws random numbers runs, torch's generator is seeded from (seed, step,
micro-batch, the unit's first node that draws), and afterwards it is restored. So masks depend
neither on how the model is cut nor on what else a device computes. A unit's number would not do:
where tiling is planned, one more unit is cut off.

`torch.zeros(3)` in a forward() travels without its type, as does the quotient of two whole numbers:
both have torch's default type, which belongs to a process. So every device sets the holder's.
"""

from __future__ import annotations

import contextlib
import hashlib
import threading
from collections.abc import Iterator

import torch

from p2ptrain.errors import OptionError

randomness_lock = threading.Lock()
"""Held while torch's global generator is seeded for a unit. Another thread that
draws from that generator (a data set with random augmentation) holds it meanwhile."""


@contextlib.contextmanager
def seeded(seed: tuple[int, ...], node: int) -> Iterator[None]:
    """Run the body with the CPU generator seeded for the nodes from `node` on; then restore it.

    Args:
        seed: (the job's seed, step, micro-batch).
        node: index in the whole model's graph.
    """
    with randomness_lock:
        before = torch.get_rng_state()
        torch.default_generator.manual_seed(derived_seed(seed, node))
        try:
            yield
        finally:
            torch.set_rng_state(before)


def derived_seed(seed: tuple[int, ...], node: int) -> int:
    """63 bits that depend on every number given, equal on every device and Python version."""
    text = ",".join(str(number) for number in (*seed, node))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def check_default_type() -> None:
    """Raises OptionError: this process has another default type than those of other devices."""
    found = torch.get_default_dtype()
    if found is not torch.float32:
        raise OptionError(
            f"torch's default type is {found} here, and torch.float32 on other devices: call "
            "torch.set_default_dtype(torch.float32) before training. Models and data may have any "
            "type of their own (model.double())"
        )
