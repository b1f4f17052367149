"""Who fetches what from whom."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2ptrain.errors import InternalError
from p2ptrain.recovery.choose_version import VersionChoice
from p2ptrain.recovery.fetch_plan import Fetch, plan_fetches
from p2ptrain.recovery.placement import PlacedStage
from p2ptrain.recovery.version import Version


def _choice(*places: str) -> VersionChoice:
    return VersionChoice(Version(4, 1), tuple(tuple(one) for one in places), 0, "")


def test_own_memory_first_then_neighbouring_units_in_one() -> None:
    plan = [PlacedStage(0, 3, ("a",)), PlacedStage(3, 4, ("b",))]
    assert plan_fetches(_choice("a", "ba", "b", "c"), plan) == {
        "a": (Fetch(0, 2, "a"), Fetch(2, 3, "b")),
        "b": (Fetch(3, 4, "c"),),
    }


def test_a_group_passes_on_what_it_lacks() -> None:
    plan = [PlacedStage(0, 2, ("b", "c", "d"))]
    assert plan_fetches(_choice("a", "ac"), plan) == {
        "b": (Fetch(0, 1, "a"), Fetch(1, 2, "c")),
        "c": (Fetch(0, 1, "b", relayed=True), Fetch(1, 2, "c")),
        "d": (Fetch(0, 1, "c", relayed=True), Fetch(1, 2, "b", relayed=True)),
    }


def test_a_unit_without_a_place_is_a_bug() -> None:
    with pytest.raises(InternalError, match="layer 1 is nowhere"):
        plan_fetches(_choice("a", ""), [PlacedStage(0, 2, ("a",))])


_PLACES = st.lists(
    st.sets(st.sampled_from("abcde"), min_size=1).map(sorted), min_size=1, max_size=8
)


@given(_PLACES, st.data())
def test_everything_needed_arrives_exactly_once_and_no_relay_waits_in_a_circle(
    places: list[list[str]], data: st.DataObject
) -> None:
    units = len(places)
    cut = data.draw(st.integers(0, units))
    groups = [data.draw(st.permutations("abcde")) for _ in range(2)]
    stages = [
        PlacedStage(first, end, tuple(group[: data.draw(st.integers(1, 4))]))
        for (first, end), group in zip(((0, cut), (cut, units)), groups, strict=True)
        if first < end
    ]
    found = plan_fetches(_choice(*("".join(p) for p in places)), stages)
    for stage in stages:
        for unit in range(stage.first, stage.end):
            has = set(places[unit])
            for device in stage.devices:
                [own] = [f for f in found[device] if f.first <= unit < f.end]
                assert own.relayed or own.peer in places[unit]
                assert not own.relayed or own.peer in has
                has.add(device)
