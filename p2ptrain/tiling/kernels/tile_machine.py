"""Work that waits for other tiles: which messages have come, are missing, or are to go out."""

from __future__ import annotations

from collections.abc import Generator, Iterable
from typing import TypeAlias

import torch
from torch import Tensor

from p2ptrain.errors import InternalError, ProtocolError
from p2ptrain.tiling.kernels.tile_program import TileProgram
from p2ptrain.tiling.kernels.tile_steps import Subject, TileMessage

Key: TypeAlias = tuple[Subject, int]
"""(what, from which tile)."""

Work: TypeAlias = Generator[tuple[Key, ...] | None, None, None]
"""Yields what it waits for, resumes when that is there. None: its own messages go out first."""


class TileMachine:
    """One micro-batch on one tile, without what it computes. Messages in, messages out."""

    def __init__(self, program: TileProgram, samples: int) -> None:
        """`samples`: of the micro-batch."""
        self._program = program
        self._samples = samples
        self._is_paused = False
        self._inbox: dict[Key, Tensor] = {}
        self._received: set[Key] = set()
        self._missing: set[Key] = set()  # of what the work waits for
        self._outbox: list[TileMessage] = []
        self._work: Work | None = None

    @property
    def is_waiting(self) -> bool:
        """Whether a forward or backward has begun and not ended."""
        return self._work is not None

    @property
    def is_paused(self) -> bool:
        """Whether it waits for `resume` alone: others wait for what it has said."""
        return self._is_paused

    @property
    def awaits(self) -> frozenset[Key]:
        """The messages, each from one tile, that it needs and that have not come yet."""
        return frozenset(self._missing)

    def receive(self, message: TileMessage) -> list[TileMessage]:
        """Take what another tile says, and go on if nothing else is missing.

        Raises:
            ProtocolError: this pass expects no such message, has it already, or it has another
                shape or element type.
        """
        key, tensor = (message.subject, message.sender), message.tensor
        expected = self._program.expected(message.subject, message.sender, self._samples)
        if expected != (tuple(tensor.shape), tensor.dtype) or key in self._received:
            raise ProtocolError(
                f"tile {message.sender} sent {message.subject} of {tuple(tensor.shape)} "
                f"{tensor.dtype} to tile {self._program.tile}, which expects "
                f"{'it once' if key in self._received else expected or 'no such thing'}"
            )
        self._received.add(key)
        self._inbox[key] = tensor
        self._missing.discard(key)
        return self._go_on()

    def resume(self) -> list[TileMessage]:
        """Continue after a pause; returns messages for other tiles."""
        self._is_paused = False
        return self._go_on()

    @property
    def _may_go_on(self) -> bool:
        return not self._is_paused and not self._missing

    # -- going on --------------------------------------------------------------------------------

    def _begin(self, work: Work) -> list[TileMessage]:
        if self._work is not None:
            raise InternalError(f"tile {self._program.tile} is still at work")
        self._work = work
        return self._go_on()

    def _go_on(self) -> list[TileMessage]:
        while self._may_go_on and self._work is not None:
            try:
                with torch.no_grad():  # segments alone are recorded
                    awaited = next(self._work)
            except StopIteration:
                self._work = None
                break
            self._missing = {key for key in awaited or () if key not in self._inbox}
            self._is_paused = awaited is None
        sent, self._outbox = self._outbox, []
        return sent

    def _send(self, receivers: Iterable[int], subject: Subject, tensor: Tensor) -> None:
        tile = self._program.tile
        self._outbox += [TileMessage(tile, other, subject, tensor) for other in receivers]

    def _take(self, subject: Subject, sender: int) -> Tensor:
        return self._inbox.pop((subject, sender))

    def _everyone(self, subject: Subject) -> tuple[Key, ...]:
        return tuple((subject, other) for other in self._others)

    @property
    def _others(self) -> list[int]:
        tiles = range(self._program.layout.tiles)
        return [tile for tile in tiles if tile != self._program.tile]
