from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import IntEnum, StrEnum
from typing import Annotated, Any, ClassVar, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2ptrain.errors import OptionError, ProtocolError
from p2ptrain.net import cbor
from p2ptrain.net.forms import By, Flat, Key, Length, Local, Range, Rare, Row, Text, write_form
from p2ptrain.net.read_form import read_form


class Colour(StrEnum):
    RED = "red"
    BLUE = "blue"


class Level(IntEnum):
    LOW = 0
    HIGH = 1


@dataclass(frozen=True, slots=True)
class Place:
    job: Annotated[str, Text(8, 1)]
    epoch: Annotated[int, Range(0, 2**53)]


@dataclass(frozen=True, slots=True)
class Point:
    x: float
    y: Annotated[float, Range(0.0, 1.0, above=True)] = 1.0

    def __post_init__(self) -> None:
        if self.x > 1e6 * self.y:
            raise ValueError("too far out")


def _complex(value: object) -> complex:
    if not isinstance(value, float):
        raise ValueError("no part of a complex number")
    return complex(value, 1.0)


@dataclass(frozen=True, slots=True)
class Everything:
    place: Annotated[Place, Flat()]
    colour: Colour
    level: Level
    point: Point
    corner: Annotated[Point | None, Row()]
    numbers: Annotated[tuple[int, ...], Length(3, 1)]
    pair: tuple[Annotated[str, Text(4)], float]
    ids: Annotated[frozenset[Annotated[str, Text(4)]], Length(3)]
    shares: Mapping[str, tuple[Annotated[Point, Row()], ...]]
    blob: Annotated[bytes, Length(4)]
    sure: Annotated[bool, Key("is_sure")]
    either: int | Annotated[str, Text(4)]
    mode: Literal["one", "two"]
    loose: Annotated[float, Range(0.0, math.inf, finite=False)]
    words: Annotated[str, Text(8, clean=True)]
    other: Annotated[complex, By(_complex, lambda v: v.real)]
    plain: Any = None
    late: int | None = None
    digits: Annotated[str, Text(4, like="[0-9]+")] = "0"
    rare: Annotated[bool, Rare()] = False


short = st.text("abxé ü", max_size=4)
numbers = st.floats(-1e3, 1e3)
points = st.builds(Point, numbers, st.floats(0.5, 1.0))
everything = st.builds(
    Everything,
    place=st.builds(Place, st.text("ab", min_size=1, max_size=8), st.integers(0, 2**53)),
    colour=st.sampled_from(Colour),
    level=st.sampled_from(Level),
    point=points,
    corner=st.none() | points,
    numbers=st.lists(st.integers(-(2**63), 2**63), min_size=1, max_size=3).map(tuple),
    pair=st.tuples(short, numbers),
    ids=st.frozensets(short, max_size=3),
    shares=st.dictionaries(short, st.lists(points, max_size=2).map(tuple), max_size=2),
    blob=st.binary(max_size=4),
    sure=st.booleans(),
    either=st.integers(0, 9) | short,
    mode=st.sampled_from(["one", "two"]),
    loose=st.floats(0.0, allow_nan=False),
    words=st.text("ab c", max_size=8),
    other=numbers.map(lambda x: complex(x, 1.0)),
    plain=st.none() | st.lists(st.integers(0, 9), max_size=2),
    late=st.none() | st.integers(0, 9),
    digits=st.text("0123456789", min_size=1, max_size=4),
    rare=st.booleans(),
)
junk = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=6)
    | st.binary(max_size=6)
    | st.sampled_from(["red", "one", 0, 1]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=8,
)
EXAMPLE = Everything(
    *(Place("job", 3), Colour.RED, Level.HIGH, Point(0.5), Point(0.25, 0.5), (1, 2)),
    *(("a", 0.5), frozenset({"b", "a"}), {"k": (Point(1.0),)}, b"xy", True, "or", "two"),
    *(math.inf, "words", 2 + 1j, [1], 4, "77", True),
)
PATHS = list(write_form(EXAMPLE))


@given(everything)
def test_what_is_written_is_read_again(form: Everything) -> None:
    data = cbor.dumps(write_form(form))
    assert read_form(Everything, cbor.loads(data, 1 << 16), "form") == form


@given(junk)
def test_junk_in_the_place_of_a_form_is_one_error(value: Any) -> None:
    with pytest.raises(ProtocolError, match=r"^form: "):
        read_form(Everything, value, "form")


@given(st.sampled_from(PATHS), junk)
def test_junk_in_the_place_of_a_field_is_one_error_or_fits(key: str, value: Any) -> None:
    said = ""
    try:
        read_form(Everything, {**write_form(EXAMPLE), key: value}, "form")
    except ProtocolError as error:
        said = str(error)
    assert said == "" or said.startswith(f"form.{key}")
    assert said.isprintable()


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("epoch", True, "form.epoch: expected a whole number, found True"),
        ("epoch", 1.0, "form.epoch: expected a whole number, found 1.0"),
        ("epoch", -1, "form.epoch: expected at least 0, found -1"),
        ("epoch", 10**4000, "form.epoch: expected at most 9.* found a huge number"),
        ("job", "", "form.job: expected a text of 1 to 8 characters"),
        ("job", ["a"], "form.job: expected a text, found a list of 1"),
        ("job", "a\x1b[2J", "holds a control character"),
        ("job", "a\u202eb", "holds a control character"),
        ("job", "a\ud800", "holds a control character"),
        ("colour", ["red"], "form.colour: expected one of red, blue, found a list of 1"),
        ("colour", {"a": 1}, "found an object of 1"),
        ("level", True, "form.level: expected one of 0, 1, found True"),
        ("point", {"x": math.nan}, r"form.point.x: expected a finite number, found nan"),
        ("point", {"x": 10**400}, r"form.point.x: expected a number, found a huge number"),
        ("point", {"x": 0.0, "y": 0.0}, r"form.point.y: expected above 0"),
        ("point", {"x": 1e9}, "form.point: too far out"),
        ("point", {"x": 0.0, "z": 1}, 'form.point: unknown field "z"'),
        ("point", {}, 'form.point: the field "x" is missing'),
        ("corner", [1.0], "form.corner: expected 2 items, found 1"),
        ("numbers", [1, None], r"form.numbers\[1\]: expected a whole number, found None"),
        ("numbers", [], "form.numbers: expected 1 to 3 items, found 0"),
        ("shares", {"k": [[1.0, 2.0]]}, r'form.shares\["k"\]\[0\]\[1\]: expected at most 1'),
        ("blob", b"12345", "form.blob: expected 0 to 4 items, found 5"),
        ("is_sure", 1, "form.is_sure: expected true or false, found 1"),
        ("mode", "three", "form.mode: expected one of one, two"),
        ("other", "x", "form.other: no part of a"),
        ("digits", "7x", "form.digits: expected a text like .*, found '7x'"),
    ],
)
def test_the_error_names_the_place_and_what_was_found(key: str, value: Any, said: str) -> None:
    with pytest.raises(OptionError, match=said) as caught:
        read_form(Everything, {**write_form(EXAMPLE), key: value}, "form", OptionError)
    assert len(str(caught.value)) < 300


def test_text_for_people_is_made_one_line() -> None:
    form = read_form(Everything, {**write_form(EXAMPLE), "words": "a\r\x1b\u202eb"}, "form")
    assert form.words == "a ??b"


def test_a_part_is_read_beside_the_keys_of_others_only_where_that_is_said() -> None:
    fields = {"job": "a", "epoch": 1, "round": 2}
    assert read_form(Place, fields, "form", extra=True) == Place("a", 1)
    with pytest.raises(ProtocolError, match='unknown field "round"'):
        read_form(Place, fields, "form")


def test_what_is_none_by_default_is_left_out_and_what_is_rare_where_it_is_its_default() -> None:
    assert {"late", "rare"} <= write_form(EXAMPLE).keys()
    assert not {"late", "rare"} & write_form(replace(EXAMPLE, late=None, rare=False)).keys()
    assert write_form(Point(0.5)) == {"x": 0.5, "y": 1.0}


@dataclass(frozen=True, slots=True)
class Sum:
    former_keys: ClassVar = frozenset({"colour"})

    total: Annotated[int, By(sum, lambda total: (total, 0), tuple[int, int])]
    note: Annotated[str, Local()] = "mine"

    def __post_init__(self) -> None:
        if self.total < 0:
            raise ValueError("total: below zero")


def test_a_field_may_be_made_of_another_form_and_stay_out_of_it() -> None:
    assert read_form(Sum, {"total": [1, 2], "colour": "red"}, "form") == Sum(3)
    assert write_form(Sum(3, note="other")) == {"total": [3, 0]}
    for value, said in (
        ({"total": [1]}, r"form\.total: expected 2 items"),
        ({"total": [1, "2"]}, r"form\.total\[1\]: expected a whole number"),
        ({"total": [-1, -2]}, r"form\.total: below zero"),
        ({"total": [1, 2], "note": "yours"}, 'unknown field "note"'),
    ):
        with pytest.raises(OptionError, match=said):
            read_form(Sum, value, "form", OptionError)
