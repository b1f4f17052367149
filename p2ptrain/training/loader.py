"""Every piece of every round, read and collated ahead of training in a thread of its own.

Pieces, not whole batches, so that a large mini-batch of large samples never lies in memory at once.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable, Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from p2ptrain.model.captured import Captured
from p2ptrain.training.data import Collated, Samples
from p2ptrain.training.feeder import Feed
from p2ptrain.training.inlet import Piece
from p2ptrain.training.order import SampleOrder, ordered_batches
from p2ptrain.training.prefetch import Prefetcher
from p2ptrain.training.protocol import PieceKey
from p2ptrain.training.rounds import Mode, Round

PIECES_AHEAD = 4


@dataclass(frozen=True, slots=True)
class Loaded:
    """One piece, flattened for the wire, and its target as metrics take it."""

    feed: Feed
    target: Collated


class PieceLoader:
    """Reads the pieces of given rounds in order."""

    def __init__(
        self, captured: Captured, data: Samples, order: SampleOrder, evaluation: Samples | None
    ) -> None:
        self._captured = captured
        self._data = data
        self._order = order
        self._evaluation = evaluation

    async def pieces(self, rounds: Iterable[Round]) -> AsyncGenerator[Loaded, None]:
        """The pieces; raises ScriptError where the user's dataset fails.

        Close it (`aclosing`): else a call of the dataset may outlive whoever has stopped iterating.
        What memory does not hold is no ScriptError: see `budget.is_out_of_memory`.
        """
        pieces = self._pieces(rounds)

        def load(_number: int) -> Loaded | None:
            return next(pieces, None)

        async with Prefetcher(load, _count(), ahead=PIECES_AHEAD) as loaded:
            async for piece in loaded:
                if piece is None:
                    return
                yield piece

    def now(self, rounds: Iterable[Round]) -> Iterator[Loaded]:
        """The same, each read when it is asked for: not for the event loop."""
        return self._pieces(rounds)

    def _pieces(self, rounds: Iterable[Round]) -> Iterator[Loaded]:
        for shape in rounds:
            indices = list(self._indices(shape))
            data = self._data if shape.mode is Mode.TRAIN else self._evaluation
            assert data is not None, "an evaluation round without eval_data"
            seed = f"{self._order.seed} {shape.mode} {shape.step}"
            pieces = data.collate_pieces(indices, seed)
            for number, (inputs, target) in zip(shape.numbers, pieces, strict=True):
                yield self._loaded(shape, number, (inputs, target))

    def _indices(self, shape: Round) -> Iterator[Sequence[int]]:
        if shape.mode is Mode.EVAL:
            yield from ordered_batches(shape.samples, shape.micro_batch)
        else:
            for split in self._order.splits(shape.step, shape.micro_batch):
                yield split.indices

    def _loaded(self, shape: Round, number: int, sample: tuple[Collated, Collated]) -> Loaded:
        inputs: list[Tensor] = self._captured.entering(sample[0], shape.mode.value)
        targets: list[Tensor] = self._captured.flatten_target(sample[1])
        piece = Piece.whole(PieceKey(shape.index, number), shape.mode, shape.size(number))
        return Loaded(Feed(piece, inputs, targets), sample[1])


def _count() -> Iterator[int]:
    number = 0
    while True:
        yield number
        number += 1
