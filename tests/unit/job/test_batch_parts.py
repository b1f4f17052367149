"""A batch in two: what the model is given, and what its loss is given."""

from __future__ import annotations

from collections import OrderedDict, UserDict
from typing import Any, NamedTuple

import pytest

from p2ptrain.errors import ScriptError
from p2ptrain.job.batch_parts import split_batch


class Images(NamedTuple):
    left: Any
    right: Any


@pytest.mark.parametrize("pair", [(1, 2), [1, 2]], ids=["tuple", "list"])
def test_a_pair_is_input_and_target(pair: Any) -> None:
    assert split_batch(pair, own_loss=False) == (1, 2)


def test_a_dict_is_the_input_and_its_own_target() -> None:
    batch = {"x": 1, "labels": 2}
    assert split_batch(batch, own_loss=False) == (batch, batch)


def test_a_model_with_its_own_loss_has_no_target() -> None:
    assert split_batch({"x": 1, "labels": 2}, own_loss=True) == ({"x": 1, "labels": 2}, None)


@pytest.mark.parametrize("kind", [UserDict, OrderedDict])
def test_mappings_of_any_class_become_dicts(kind: Any) -> None:
    given, _ = split_batch(kind(x=1, more=kind(y=2)), own_loss=True)
    assert type(given) is dict
    assert type(given["more"]) is dict
    of_pair, _ = split_batch((kind(x=1), 2), own_loss=False)
    assert type(of_pair) is dict


def test_named_tuples_keep_their_type() -> None:
    given, _ = split_batch((Images(UserDict(x=1), [2]), 3), own_loss=False)
    assert given == Images({"x": 1}, [2])
    assert type(given) is Images


def test_a_pair_needs_a_loss() -> None:
    with pytest.raises(ScriptError, match=r"is a pair .*loss=None.*Give such dicts.*or a loss"):
        split_batch((1, 2), own_loss=True, name="batch 0")


@pytest.mark.parametrize(
    ("batch", "words"),
    [
        ("text", "not a str"),
        ((1, 2, 3), r"not a tuple of 3\. Put the inputs together, \(\(x, z\), y\)"),
        ([1, 2, 3], r"not a list of 3\. .* StackDataset\(StackDataset\(x, z\), y\) of torch"),
        ((1,), "not a tuple of 1$"),
        (None, "not a NoneType"),
        ({1: 2}, "keys are no strings"),
    ],
)
def test_anything_else_is_named(batch: Any, words: str) -> None:
    with pytest.raises(ScriptError, match=f"^batch 0 .*{words}"):
        split_batch(batch, own_loss=False, name="batch 0")
