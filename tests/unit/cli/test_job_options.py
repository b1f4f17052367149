"""-o KEY=VALUE becomes the arguments of job(), typed as job() says."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import pytest

from p2ptrain.cli.script import job_arguments
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


def sequences(  # type: ignore[no-untyped-def]
    layers: list[int] = [64],  # noqa: B006
    pair: tuple[int, str] = (1, "a"),
    rates: tuple[float, ...] | None = None,
    shape=(2, 3),
    anything=[],  # noqa: B006
    table={},  # noqa: B006
) -> None:
    """A job with arguments that hold several values."""


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        (("layers", "32, -16"), [32, -16]),
        (("layers", "8"), [8]),
        (("layers", ""), []),
        (("pair", "3,b"), (3, "b")),
        (("rates", "0.1,1e-3"), (0.1, 1e-3)),
        (("rates", "none"), None),
        (("shape", "4,5,6"), (4, 5, 6)),
        (("anything", "a,b"), ["a", "b"]),
    ],
)
def test_several_values_have_commas_between_them(setting: tuple[str, str], value: Any) -> None:
    """As a text they would be taken for a sequence of characters."""
    assert job_arguments(sequences, [setting]) == {setting[0]: value}


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        (("layers", "[8]"), "'layers' must be a whole number, or several with commas between them"),
        (("pair", "3"), "'pair' must be 2 values with commas between them"),
        (("table", "a"), "'table' is a dict, which no text gives"),
    ],
)
def test_what_no_text_gives_is_wrong_usage(setting: tuple[str, str], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        job_arguments(sequences, [setting])


def test_one_unreadable_annotation_leaves_the_others() -> None:
    """As of a job that returns a class imported for type checkers alone."""

    def odd(size: "int", other: "pytest.Nothing" = 2) -> "p2ptrain.Job": ...  # type: ignore[name-defined]  # noqa: F821, UP037

    settings = [("size", "4"), ("other", "5")]
    assert job_arguments(odd, settings) == {"size": 4, "other": 5}


def test_an_unreadable_annotation_falls_back_to_the_default() -> None:
    def odd(size: "Unknown" = 3) -> None: ...  # type: ignore[name-defined]  # noqa: F821, UP037

    assert job_arguments(odd, [("size", "4")]) == {"size": 4}
