"""Whose data keeps coming."""

from __future__ import annotations

from p2ptrain.mesh.membership.core_events import LinkTraffic
from p2ptrain.mesh.membership_driver import FLOW_BYTES, TrafficWatch
from p2ptrain.net.link.stream import StreamArrival


def look(watch: TrafficWatch, received_bytes: dict[str, int], now: float) -> dict[str, float]:
    """Whose was much."""
    traffic = watch.look(
        {peer: StreamArrival(count) for peer, count in received_bytes.items()}, now
    )
    return {} if traffic is None else dict(traffic.came)


def test_traffic_is_dated_before_its_last_bytes() -> None:
    watch = TrafficWatch()
    assert look(watch, {"pi": 0, "nas": 10 * FLOW_BYTES}, 1.0) == {}  # from before we looked
    assert look(watch, {"pi": FLOW_BYTES, "nas": 10 * FLOW_BYTES}, 1.1) == {"pi": 1.0}
    assert look(watch, {"pi": FLOW_BYTES, "nas": 10 * FLOW_BYTES}, 1.2) == {}


def test_few_bytes_add_up() -> None:
    watch = TrafficWatch()
    looks = [look(watch, {"pi": count * FLOW_BYTES // 4}, float(count)) for count in range(9)]
    assert [count for count, came in enumerate(looks) if came] == [4, 8]


def test_another_link_counts_from_zero() -> None:
    watch = TrafficWatch()
    look(watch, {"pi": 5 * FLOW_BYTES}, 1.0)
    assert look(watch, {"pi": FLOW_BYTES}, 1.1) == {}
    assert look(watch, {"pi": 2 * FLOW_BYTES}, 1.2) == {"pi": 1.1}
    look(watch, {}, 1.3)
    assert look(watch, {"pi": 9 * FLOW_BYTES}, 1.4) == {}


def test_what_waits_for_a_lost_packet_is_a_sign() -> None:
    """Nothing of it can be read, and it is no traffic, however many packets there are."""
    watch = TrafficWatch()
    watch.look({"pi": StreamArrival(100, 3), "nas": StreamArrival(100)}, 1.0)
    assert watch.look({"pi": StreamArrival(100, 9), "nas": StreamArrival(100)}, 1.1) == LinkTraffic(
        {}, {"pi": 1.0}
    )
    assert watch.look({"pi": StreamArrival(100, 9), "nas": StreamArrival(100)}, 1.2) is None
