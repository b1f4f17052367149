"""-o KEY=VALUE becomes the arguments of job(), typed as job() says."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import pytest

from p2ptrain.cli.job_options import job_arguments
from p2ptrain.cli.usage import UsageError


def job(  # type: ignore[no-untyped-def]
    hidden: int = 64,
    lr: float = 0.1,
    deep: bool = False,
    kind: Literal["cnn", "mlp"] = "cnn",
    folder: Path | None = None,
    limit: int | None = None,
    size=3,  # scripts need no annotations
    label=None,
) -> None:
    """A job with every kind of argument."""


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        (("hidden", "128"), 128),
        (("lr", "1e-3"), 1e-3),
        (("deep", "yes"), True),
        (("deep", "False"), False),
        (("kind", "mlp"), "mlp"),
        (("folder", "data"), Path("data")),
        (("folder", "none"), None),
        (("limit", "7"), 7),
        (("size", "5"), 5),
        (("label", "7"), "7"),
    ],
)
def test_values_get_the_argument_s_type(setting: tuple[str, str], value: Any) -> None:
    assert job_arguments(job, [setting]) == {setting[0]: value}


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        (("hidden", "1.5"), "'hidden' must be a whole number"),
        (("lr", "fast"), "'lr' must be a number"),
        (("deep", "perhaps"), "'deep' must be true or false"),
        (("kind", "rnn"), "'kind' must be 'cnn' or 'mlp'"),
        (("limit", "x"), "'limit' must be a whole number or none"),
        (("size", "big"), "'size' must be a whole number"),
    ],
)
def test_a_value_of_another_type_is_wrong_usage(setting: tuple[str, str], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        job_arguments(job, [setting])


def test_an_unknown_key_lists_the_known_ones() -> None:
    with pytest.raises(UsageError, match=r"no 'hiden'; it takes hidden, lr, deep"):
        job_arguments(job, [("hiden", "1")])


def test_a_job_without_arguments_says_so() -> None:
    with pytest.raises(UsageError, match="it takes no options"):
        job_arguments(lambda: None, [("hidden", "1")])


def test_a_missing_argument_is_named() -> None:
    def needs(folder: str) -> None: ...

    with pytest.raises(UsageError, match="add -o folder=VALUE"):
        job_arguments(needs, [])


def test_the_last_of_a_repeated_key_wins() -> None:
    assert job_arguments(job, [("hidden", "1"), ("hidden", "2")]) == {"hidden": 2}


def test_keyword_collectors_take_any_key_as_text() -> None:
    def collects(**settings: str) -> None: ...

    assert job_arguments(collects, [("anything", "1")]) == {"anything": "1"}


def test_an_annotation_nobody_can_read_falls_back_to_the_default() -> None:
    def odd(size: "Unknown" = 3) -> None: ...  # type: ignore[name-defined]  # noqa: F821, UP037

    assert job_arguments(odd, [("size", "4")]) == {"size": 4}
