"""What was sent is kept as long as it can be of use and there is room."""

from __future__ import annotations

import pytest
import torch

from p2ptrain.errors import PeerError
from p2ptrain.job.rounds import Round, RoundMode
from p2ptrain.messages.round_orders import RoundOrder
from p2ptrain.messages.tensors import MicroBatchKey, MicroBatchSlice
from p2ptrain.recovery.rebuild_plan import MIN_LIMIT_BYTES, replay_log_bytes
from p2ptrain.runtime.io.replay_log import MAX_STEPS, ReplayLog
from p2ptrain.runtime.io.tensor_router import ACTIVATIONS

START = 5
BYTES = 64
"""Of one piece; two a step."""


def _order(step: int, mode: RoundMode = RoundMode.TRAIN) -> RoundOrder:
    return RoundOrder(Round(step + 1, mode, step, 8, 4))


def _log(*steps: int, limit: int = 1 << 20) -> ReplayLog:
    log = ReplayLog(START, limit)
    for step in steps:
        log.note_order(_order(step))
        for number in range(2):
            piece = MicroBatchSlice.whole(MicroBatchKey(step + 1, number), RoundMode.TRAIN, 4)
            values = [torch.full((BYTES // 4,), float(step)), None]
            log.sent(_order(step), 2, ACTIVATIONS, piece, values)
        log.counts(step, (0.5, "float32"))
    return log


def test_what_was_sent_and_reported_comes_back() -> None:
    log = _log(5, 6)
    assert log.orders(5, 7) == [(_order(step), (0.5, "float32")) for step in (5, 6)]
    pieces = list(log.pieces(6, 2, ACTIVATIONS))
    assert [piece.key.micro_batch for piece, _ in pieces] == [0, 1]
    assert all(values[0] is not None and values[0][0] == 6.0 for _, values in pieces)
    assert list(log.pieces(6, 1, ACTIVATIONS)) == []  # nothing went there


def test_what_a_newer_version_makes_useless_goes() -> None:
    log = _log(5, 6, 7)
    log.forget_before(7)
    assert log.since == 7
    with pytest.raises(PeerError, match="step 7 is not kept"):
        log.pieces(6, 2, ACTIVATIONS)
    assert log.orders(7, 8)


def test_where_there_is_no_room_the_oldest_goes() -> None:
    log = _log(5, 6, 7, limit=5 * BYTES)
    assert log.since == 6
    assert list(log.pieces(6, 2, ACTIVATIONS))
    with pytest.raises(PeerError):
        log.orders(5, 7)


def test_a_step_larger_than_all_the_room_is_not_half_there() -> None:
    log = _log(5, 6, limit=BYTES)
    assert log.since == 7
    with pytest.raises(PeerError):
        log.pieces(6, 2, ACTIVATIONS)


def test_evaluations_leave_no_trace() -> None:
    log = ReplayLog(START)
    log.note_order(_order(5, RoundMode.EVAL))
    piece = MicroBatchSlice.whole(MicroBatchKey(6, 0), RoundMode.EVAL, 4)
    log.sent(_order(5, RoundMode.EVAL), 2, ACTIVATIONS, piece, [torch.zeros(4)])
    with pytest.raises(PeerError):
        log.orders(5, 6)


def test_an_evaluation_beside_a_step_of_the_same_number_is_distinguished() -> None:
    log = _log(5)
    piece = MicroBatchSlice.whole(MicroBatchKey(9, 0), RoundMode.EVAL, 4)
    log.sent(_order(5, RoundMode.EVAL), 2, ACTIVATIONS, piece, [torch.zeros(4)])
    assert len(list(log.pieces(5, 2, ACTIVATIONS))) == 2


def test_views_count_as_what_they_keep_alive() -> None:
    log = ReplayLog(START, 1000)
    log.note_order(_order(5))
    piece = MicroBatchSlice.whole(MicroBatchKey(6, 0), RoundMode.TRAIN, 4)
    log.sent(_order(5), 2, ACTIVATIONS, piece, [torch.zeros(10_000)[:4]])
    assert log.since == 6


def test_orders_of_a_stage_that_sends_nothing_do_not_pile_up() -> None:
    """One device, or a group alone: nothing is sent to other stages, and no copy is ever kept."""
    log = ReplayLog(START)
    for step in range(START, START + MAX_STEPS + 3):
        log.note_order(_order(step))
    assert log.since == START + 3
    assert len(log.orders(log.since, START + MAX_STEPS + 3)) == MAX_STEPS
    with pytest.raises(PeerError):
        log.orders(START + 2, START + 4)


def test_the_room_follows_the_plan() -> None:
    assert replay_log_bytes(0) == MIN_LIMIT_BYTES
    assert replay_log_bytes(2 << 30) == (2 << 30) // 20
    assert replay_log_bytes(40 << 30, 1 << 30) == 1 << 30, "most of the plan lies in a card"
    assert replay_log_bytes(40 << 30, 8 << 30) == 2 << 30
