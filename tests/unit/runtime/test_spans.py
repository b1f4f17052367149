"""Spans are recorded while a holder asks, the newest ones only, and travel as they were."""

from __future__ import annotations

from dataclasses import replace
from time import perf_counter

import numpy as np
import pytest

from p2ptrain.errors import ProtocolError
from p2ptrain.messages.spans import SpanColumns
from p2ptrain.plan.types.timeline import KINDS
from p2ptrain.runtime.spans import SpanLimits, SpanRecorder


def add(spans: SpanRecorder, number: int, *, at: float | None = None) -> None:
    now = perf_counter() if at is None else at
    spans.add("send output", now, now, stage=1, round=2, micro_batch=number, peer="ab")


def test_nothing_is_kept_before_it_is_asked_for_nor_long_after() -> None:
    spans = SpanRecorder(SpanLimits(idle_seconds=5.0))
    add(spans, 0)
    assert not spans.take(10)
    add(spans, 1)
    assert [span[3] for span in spans.take(10)] == [1]
    add(spans, 2)
    add(spans, 3, at=perf_counter() + 6.0)
    assert not spans.is_on
    assert not spans.take(10)


def test_the_oldest_go_where_too_many_wait() -> None:
    spans = SpanRecorder(SpanLimits(most=3))
    spans.take(1)
    for number in range(5):
        add(spans, number)
    assert [span[3] for span in spans.take(2)] == [2, 3]
    assert spans.dropped == 2


def test_they_travel_as_they_were() -> None:
    sent = [(KINDS.index("send sum"), 1, 7, 1 << 40, 2.5, 3.25, "ab"), (0, 0, 7, -1, 1.0, 1.0, "")]
    read = SpanColumns.from_bytes(SpanColumns.of(sent).to_bytes())
    assert len(read) == 2
    assert read.devices == ("ab", "")
    assert read.place_rows().tolist() == [[1, 7, 1 << 40, 0], [0, 7, -1, 1]]
    assert read.time_rows().tolist() == [[2.5, 3.25], [1.0, 1.0]]
    assert len(SpanColumns.from_bytes(SpanColumns.of([]).to_bytes())) == 0


@pytest.mark.parametrize(
    "change",
    [
        {"kinds": bytes([len(KINDS)])},
        {"kinds": b"\0\0"},
        {"devices": ()},
        {"times": np.array([[2.0, 1.0]]).tobytes()},
        {"times": np.array([[0.0, np.nan]]).tobytes()},
        {"places": b""},
    ],
)
def test_what_no_device_records_is_refused(change: dict[str, object]) -> None:
    good = SpanColumns.of([(0, 0, 0, 0, 1.0, 2.0, "ab")])
    with pytest.raises(ProtocolError):
        SpanColumns.from_bytes(replace(good, **change).to_bytes())  # type: ignore[arg-type]
