"""How it is told where values stopped being finite."""

from __future__ import annotations

import pytest

from p2ptrain.errors import ProtocolError
from p2ptrain.model.diagnosis import NonFinite
from p2ptrain.net.message import Message
from p2ptrain.training.finding import Finding, earliest, finding_fields, read_units, told
from p2ptrain.training.protocol import DIAGNOSE

UNITS = ["one", "two", "three", "four"]


@pytest.mark.parametrize(
    ("finding", "words"),
    [
        (None, "; lower the learning rate, "),
        (
            Finding(("a",), 0, 0, range(0), False, tiled=True),
            "; the input data of its micro-batch 7 is not finite already where a gives it to unit "
            "one; look at the samples",
        ),
        (
            Finding(("b",), 1, 2, range(0), False),
            "; what the stage in front has made is not finite already where b gives it to unit "
            "three; lower the learning rate",
        ),
        (
            Finding(("b",), 1, 2, range(3, 4), False),
            "; values first stopped being finite in unit four on b; lower the learning rate",
        ),
        (
            Finding(("a", "b"), 0, 0, range(1, 3), False, tiled=True),
            "; values first stopped being finite in tiled units two to three on a, b; lower the "
            "learning rate, clip the gradients, or look at those units' input",
        ),
        (
            Finding(("a", "b"), 0, 0, range(1), True, tiled=True),
            "; the weights of tiled unit one on a, b had stopped being finite by an earlier update",
        ),
    ],
)
def test_what_is_told(finding: Finding | None, words: str) -> None:
    assert told(finding, UNITS, 7).startswith(words)


def test_the_earliest_units_count_and_all_devices_that_name_them() -> None:
    later = Finding(("a",), 0, 0, range(2, 3), True, tiled=True)
    some = [Finding((name,), 0, 0, range(2), name == "c", tiled=True) for name in "bc"]
    assert earliest([later, *some]) == Finding(("b", "c"), 0, 0, range(2), True, tiled=True)
    inputs = Finding(("d",), 0, 0, range(0), False, tiled=True)
    assert earliest([later, *some, inputs]) == inputs


def test_a_finding_survives_as_plain_data() -> None:
    assert finding_fields(None) == {"found": False}
    for found, units in (
        (NonFinite(None, False), range(0)),
        (NonFinite(2, True, 1), range(1, 3)),
        (NonFinite(3, False, 3), range(3, 4)),
    ):
        fields = finding_fields(found)
        assert fields["parameters"] is found.parameters
        assert read_units(Message(DIAGNOSE, fields), len(UNITS)) == units
    for wrong in ([], [1], [2, 1], [0, 4], [-1, 2], "ab", 3):
        with pytest.raises(ProtocolError):
            read_units(Message(DIAGNOSE, {"units": wrong}), len(UNITS))
