"""How it is reported where values stopped being finite."""

from __future__ import annotations

import pytest

from p2ptrain.errors import ProtocolError
from p2ptrain.messages.findings import (
    FindingFields,
    NonFiniteFinding,
    describe_finding,
    earliest,
)
from p2ptrain.model.stage.failures import NonFiniteUnit

UNITS = ["one", "two", "three", "four"]


@pytest.mark.parametrize(
    ("finding", "words"),
    [
        (None, ". Try a smaller learning rate"),
        (
            NonFiniteFinding(("a",), 0, 0, range(0), False, tiled=True),
            ". The data contain NaN or infinity (in micro-batch 7 of this step). Look at the",
        ),
        (
            NonFiniteFinding(("b",), 1, 2, range(0), False),
            '. The first NaN or infinity came into layer "three" on b from the layer before. Try',
        ),
        (
            NonFiniteFinding(("b",), 1, 2, range(3, 4), False),
            '. The first NaN or infinity came from layer "four" on b. Try a smaller learning rate',
        ),
        (
            NonFiniteFinding(("a", "b"), 0, 0, range(1, 3), False, tiled=True),
            '. The first NaN or infinity came from layers "two" to "three" (in tiles) on a, b. Try',
        ),
        (
            NonFiniteFinding(("a", "b"), 0, 0, range(1), True, tiled=True),
            '. An earlier update made weights of layer "one" (in tiles) on a, b NaN or infinite.',
        ),
    ],
)
def test_what_is_reported(finding: NonFiniteFinding | None, words: str) -> None:
    assert describe_finding(finding, UNITS, 7).startswith(words)


def test_the_earliest_units_count_and_all_devices_that_name_them() -> None:
    later = NonFiniteFinding(("a",), 0, 0, range(2, 3), True, tiled=True)
    some = [NonFiniteFinding((name,), 0, 0, range(2), name == "c", tiled=True) for name in "bc"]
    assert earliest([later, *some]) == NonFiniteFinding(
        ("b", "c"), 0, 0, range(2), True, tiled=True
    )
    inputs = NonFiniteFinding(("d",), 0, 0, range(0), False, tiled=True)
    assert earliest([later, *some, inputs]) == inputs


def test_a_finding_survives_as_plain_data() -> None:
    assert FindingFields.of(None).fields() == {"found": False}
    for found, units in (
        (NonFiniteUnit(None, False), range(0)),
        (NonFiniteUnit(2, True, 1), range(1, 3)),
        (NonFiniteUnit(3, False, 3), range(3, 4)),
    ):
        back = FindingFields.read(FindingFields.of(found).fields())
        assert back.parameters is found.parameters
        assert back.range(len(UNITS)) == units
    for wrong in ([], [1], [2, 1], [0, 4], [-1, 2], "ab", 3):
        with pytest.raises(ProtocolError):
            FindingFields.read({"found": True, "units": wrong}).range(len(UNITS))
