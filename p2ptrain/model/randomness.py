"""Dropout and its like, the same whatever device computes them.

Before a unit that draws random numbers runs, torch's generator is seeded from (seed, step,
micro-batch, unit), and afterwards it is put back. So masks do not depend on how the model is cut,
nor on what else a device computes.
"""

from __future__ import annotations

import contextlib
import hashlib
import threading
from collections.abc import Iterator

import torch

randomness_lock = threading.Lock()
"""Held while torch's global generator is seeded for a unit. Whoever draws from that generator in
another thread (a data set with random augmentation) holds it meanwhile."""


@contextlib.contextmanager
def seeded(seed: tuple[int, ...], unit: int) -> Iterator[None]:
    """Run the body with the CPU generator seeded for `unit`; then restore it.

    Args:
        seed: (the job's seed, step, micro-batch).
        unit: index in the whole model.
    """
    with randomness_lock:
        before = torch.get_rng_state()
        torch.default_generator.manual_seed(derived_seed(seed, unit))
        try:
            yield
        finally:
            torch.set_rng_state(before)


def derived_seed(seed: tuple[int, ...], unit: int) -> int:
    """63 bits that depend on every number given, equal on every device and Python version."""
    text = ",".join(str(number) for number in (*seed, unit))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1
