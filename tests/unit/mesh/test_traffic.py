"""Whose data keeps coming."""

from __future__ import annotations

from p2ptrain.mesh.traffic import FLOW_BYTES, TrafficWatch


def test_traffic_is_dated_before_its_last_bytes() -> None:
    watch = TrafficWatch()
    assert watch.look({"pi": 0, "nas": 10 * FLOW_BYTES}, 1.0) == {}  # from before we looked
    assert watch.look({"pi": FLOW_BYTES, "nas": 10 * FLOW_BYTES}, 1.1) == {"pi": 1.0}
    assert watch.look({"pi": FLOW_BYTES, "nas": 10 * FLOW_BYTES}, 1.2) == {}


def test_few_bytes_add_up() -> None:
    watch = TrafficWatch()
    looks = [watch.look({"pi": count * FLOW_BYTES // 4}, float(count)) for count in range(9)]
    assert [count for count, came in enumerate(looks) if came] == [4, 8]


def test_another_link_counts_anew() -> None:
    watch = TrafficWatch()
    watch.look({"pi": 5 * FLOW_BYTES}, 1.0)
    assert watch.look({"pi": FLOW_BYTES}, 1.1) == {}
    assert watch.look({"pi": 2 * FLOW_BYTES}, 1.2) == {"pi": 1.1}
    watch.look({}, 1.3)
    assert watch.look({"pi": 9 * FLOW_BYTES}, 1.4) == {}
