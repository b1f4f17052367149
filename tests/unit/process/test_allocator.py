"""Where freed memory is kept, and what of it is given back."""

from __future__ import annotations

import ctypes

import pytest

from p2ptrain.process.host_process import (
    LEARNING_ROUNDS,
    MIN_CREEP_BYTES,
    HeapCreep,
    keep_freed_memory,
)

MIB = 1 << 20


def test_other_c_libraries_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda _name: object())
    assert not keep_freed_memory()


def test_windows_has_no_library_of_that_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_name: object) -> None:
        raise TypeError("argument of type 'NoneType' is not iterable")

    monkeypatch.setattr(ctypes, "CDLL", refuse)
    assert not keep_freed_memory()


LEARNT = (0,) * (LEARNING_ROUNDS - 1)
"""The other rounds that are learnt from."""


@pytest.mark.parametrize(
    ("ends", "expected"),
    [
        ((300, *LEARNT, 295, 330, 331, 300, *LEARNT, 330, 400, 250, *LEARNT, 276), [331, 400, 276]),
        ((100, *LEARNT, 112, 113, 100, *LEARNT, 95, 112, 113), [113, 113]),
        ((300, 600, 300, 900, 300, 300, 300, 900, 300, 989, 990, 991), [991]),
    ],
    ids=["a tenth", "no less than 12 MiB", "the most of the first rounds is needed"],
)
def test_what_has_crept_up_is_given_back_and_what_rounds_need_is_not(
    ends: tuple[int, ...], expected: list[int]
) -> None:
    """What has come to stay is given back for once: then it is what rounds end with."""
    used, given = [0], []
    creep = HeapCreep(lambda: used[0], lambda: given.append(used[0] // MIB))
    for now in ends:
        used[0] = now * MIB
        creep.round_ended()
    assert MIN_CREEP_BYTES == 12 * MIB
    assert given == expected
