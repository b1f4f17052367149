"""Objects with update, compute and reset get batches as plain torch gives them."""

from __future__ import annotations

import torch
from torch import Tensor

from p2ptrain.holder.input import metrics
from p2ptrain.holder.input.metrics import MetricValues


class Given:
    """Counts what it is given."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def reset(self) -> None:
        self.sizes = []

    def update(self, output: Tensor, target: Tensor) -> None:
        assert len(output) == len(target)
        self.sizes.append(len(output))

    def compute(self) -> float:
        return float(sum(self.sizes))


def sizes_after(pieces: list[tuple[int, int, bool]]) -> list[int]:
    """Of (samples, width, whether a batch ends there)."""
    given = Given()
    values = MetricValues({"given": given}, frozenset())
    for samples, width, ends in pieces:
        output, target = torch.ones(samples, width), torch.ones(samples)
        values.add(output, target, samples, ends_batch=ends)
    assert values.result(has_loss=False) == {"given": sum(samples for samples, _, _ in pieces)}
    assert not values.failures
    return given.sizes


def test_the_pieces_of_a_batch_come_together() -> None:
    assert sizes_after([(4, 2, False), (4, 2, False), (1, 2, True), (4, 2, True)]) == [9, 4]


def test_pieces_of_several_widths_come_as_they_are() -> None:
    assert sizes_after([(4, 2, False), (4, 3, True)]) == [4, 4]


def test_large_batches_come_in_parts() -> None:
    width = metrics.UPDATE_BYTES // 4
    assert sizes_after([(1, width, False), (1, width, False), (1, 1, True)]) == [1, 1, 1]
