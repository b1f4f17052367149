"""Short answers read as a person would say them."""

from __future__ import annotations

from p2ptrain.cli.output import aligned, words


def test_columns_are_as_wide_as_their_widest_cell() -> None:
    assert aligned([("name", "state", ""), ("old-notebook", "left", "x")]) == [
        "name          state",
        "old-notebook  left   x",
    ]


def test_bytes_truths_and_numbers_in_words() -> None:
    values = {"role": "member", "sent_bytes": 16_271_949, "connected": False, "paired": True}
    assert words(values) == "role member, sent 16.3 MB, not connected, paired"
    assert words({"samples_per_s": 1234.56, "step": 7}) == "samples per s 1,234.6, step 7"


def test_what_is_not_set_or_no_single_value_is_left_out() -> None:
    assert words({"introduced_by": None, "addresses": ["a"], "id": "x"}) == "id x"
