"""Random streams of the user's data, apart from those of everything else in this process.

Only torch's generator, numpy's and `random` are swapped, and only while the user's code runs, so
that what it draws hangs neither on the models computed here nor on what was read before.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

import numpy
import torch

States: TypeAlias = tuple[torch.Tensor, Any, Any]
"""Of torch's default generator, of numpy's and of `random`."""


class RandomStreams:
    """Random streams of their own for torch, numpy and `random`, swapped in while active."""

    def __init__(self, seed: str | int) -> None:
        """`seed`: a number is `torch.manual_seed`'s; a text is hashed."""
        if isinstance(seed, str):
            seed = int.from_bytes(hashlib.sha256(seed.encode()).digest()[:8], "big")
        self._seed = seed
        self._states: States | None = None

    @property
    def states(self) -> States | None:
        """How far they are; None = they have not begun."""
        return self._states

    def go_on(self, states: States) -> None:
        """From there."""
        self._states = states

    @contextmanager
    def active(self) -> Iterator[None]:
        outside = _random_states()
        if self._states is None:
            torch.default_generator.manual_seed(self._seed)
            numpy.random.seed(self._seed % 2**32)
            random.seed(self._seed)
        else:
            _set_random_states(self._states)
        try:
            yield
        finally:
            self._states = _random_states()
            _set_random_states(outside)


def _random_states() -> States:
    return torch.get_rng_state(), numpy.random.get_state(), random.getstate()


def _set_random_states(states: States) -> None:
    torch.set_rng_state(states[0])
    numpy.random.set_state(states[1])
    random.setstate(states[2])
