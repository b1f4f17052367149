"""S12, S13, S17, S23: a small, seeded sample of what `tools/fuzz.py` throws at every decoder."""

from __future__ import annotations

import random

import pytest

from p2ptrain.net.forms import is_shown
from tests.support.thorough import examples_of
from tools.fuzz_targets import OWN_ERRORS, mutated, targets

FEWER = {
    **{"device_pem": 20, "trusted_json": 20, "pairing_answer": 10, "pairing_hello": 20},
    **{"journal": 20, "checkpoint_index": 20},
}
"""Where keys are made, or files are written."""


@pytest.mark.parametrize("name", targets())
def test_examples_are_taken(name: str) -> None:
    target = targets()[name]
    for example in target.examples:
        target.decode(example)


@pytest.mark.parametrize("name", targets())
def test_s12_whatever_is_sent_is_taken_or_refused_with_an_error_of_ours(name: str) -> None:
    """S12, S13, S17, S23: any other exception fails this; no error carries a raw control byte."""
    target, dice, said = targets()[name], random.Random(name), ""
    for _ in range(examples_of(FEWER.get(name, 150))):
        data = mutated(dice.choice(target.examples), dice)
        try:
            target.decode(data)
        except OWN_ERRORS as error:
            said += str(error)
    assert all(map(is_shown, said.replace("\n", "")))
