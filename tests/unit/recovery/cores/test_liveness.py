"""Devices that can work together."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from p2ptrain.recovery.cores.liveness import fully_linked


def test_whichever_device_lacks_most_links_is_left_out() -> None:
    links = {"h": "abc", "a": "hb", "b": "hac", "c": "hb"}
    assert fully_linked("habc", links, "h") == ({"h", "a", "b"}, {"c": ("a",)})


def test_a_link_that_one_end_denies_is_none() -> None:
    assert fully_linked("hab", {"h": "ab", "a": "hb", "b": "h"}, "h")[1] == {"b": ("a",)}


def test_the_holder_stays_even_alone() -> None:
    left, out = fully_linked("hab", {"a": "b", "b": "a"}, "h")
    assert left == {"h"}
    assert set(out) == {"a", "b"}


@given(st.dictionaries(st.sampled_from("habcd"), st.sets(st.sampled_from("habcd"))))
def test_who_stays_is_linked_pairwise(links: dict[str, set[str]]) -> None:
    left, out = fully_linked("habcd", links, "h")
    assert left | set(out) == set("habcd")
    assert all(b in links[a] and a in links[b] for a in left for b in left if a != b)
    assert all(peers for peers in out.values())
