"""What apps say of how a job is to be run; they write texts where the command line has paths."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy
import pytest

from p2ptrain.errors import OptionError
from p2ptrain.model.wire_format import WireFormat
from p2ptrain.training.options import Recovery, TrainOptions


def test_texts_are_taken_for_what_they_name() -> None:
    given: dict[str, Any] = {"out": "w.safetensors", "checkpoint": "c", "resume": "r"}
    options = TrainOptions(**given, wire="bf16", recovery="heavy", steps=numpy.int64(3))  # type: ignore[arg-type]
    assert options.out == Path("w.safetensors")
    assert (options.checkpoint, options.resume) == (Path("c"), Path("r"))
    assert options.wire is WireFormat.BF16
    assert options.recovery is Recovery.HEAVY
    assert type(options.steps) is int


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"out": 3}, "out must be a path, not 3"),
        ({"wire": "fp4"}, "wire must be one of exact, bf16, int8, not 'fp4'"),
        ({"recovery": "no"}, "recovery must be one of light, heavy, respipe, not 'no'"),
        ({"steps": 1.5}, "steps must be a whole number, not 1.5"),
        ({"asynchrony": True}, "asynchrony must be a p2ptrain.Asynchrony"),
        ({"wait_for": "2"}, "wait_for must be a whole number, not '2'"),
    ],
)
def test_what_cannot_be_taken_is_named(given: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        TrainOptions(**given)
