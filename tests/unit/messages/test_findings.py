"""How it is reported where values stopped being finite."""

from __future__ import annotations

import pytest

from p2ptrain.errors import ProtocolError
from p2ptrain.messages.findings import (
    FindingFields,
    NonFiniteFinding,
    describe_finding,
)
from p2ptrain.model.stage.failures import NonFiniteUnit

UNITS = ["one", "two", "three", "four"]


@pytest.mark.parametrize(
    ("finding", "words"),
    [
        (None, ". Try a smaller learning rate"),
        (
            NonFiniteFinding(("a",), 0, 0, None, False, tiled=True),
            ". The data contain NaN or infinity (in micro-batch 7 of this step). Look at the",
        ),
        (
            NonFiniteFinding(("b",), 1, 2, None, False),
            '. The first NaN or infinity came into layer "three" on b from the layer before. Try',
        ),
        (
            NonFiniteFinding(("b",), 1, 2, None, False, tiled=True),
            '. The first NaN or infinity came from the data or from layers "one" to "two" (in t',
        ),
        (
            NonFiniteFinding(("b",), 1, 1, None, False, tiled=True),
            '. The first NaN or infinity came from the data or from layer "one" (in tiles). Try',
        ),
        (
            NonFiniteFinding(("b",), 1, 2, 3, False),
            '. The first NaN or infinity came from layer "four" on b. Try a smaller learning rate',
        ),
        (
            NonFiniteFinding(("a", "b"), 0, 0, 1, False, tiled=True),
            '. The first NaN or infinity came from layer "two" (in tiles) on a, b. Try',
        ),
        (
            NonFiniteFinding(("a", "b"), 0, 0, 0, True, tiled=True),
            '. An earlier update made weights of layer "one" (in tiles) on a, b NaN or infinite.',
        ),
    ],
)
def test_what_is_reported(finding: NonFiniteFinding | None, words: str) -> None:
    assert describe_finding(finding, UNITS, 7).startswith(words)


def test_asynchronous_training_is_not_advised_to_clip_which_it_refuses() -> None:
    finding = NonFiniteFinding(("b",), 1, 2, 3, False)
    assert describe_finding(finding, UNITS, 7).endswith(" or clip_grad_norm=1.0")
    for found in (finding, None):
        text = describe_finding(found, UNITS, 7, asynchronous=True)
        assert text.endswith(". Try a smaller learning rate, or --mode sync")


def test_a_finding_survives_as_plain_data() -> None:
    assert FindingFields.of(None).fields() == {"found": False}
    for found in (NonFiniteUnit(None, False), NonFiniteUnit(2, True), NonFiniteUnit(3, False)):
        back = FindingFields.read(FindingFields.of(found).fields())
        back.check(len(UNITS))
        assert (back.unit, back.parameters) == (found.unit, found.parameters)
    for wrong in ([], [1], -1, 4, "ab"):
        with pytest.raises(ProtocolError):
            FindingFields.read({"found": True, "unit": wrong}).check(len(UNITS))
