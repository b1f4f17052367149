"""What stays is never looked through for garbage; what comes after is."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from p2ptrain.api.loading import collector_at_rest


class _Knot:
    """Refers to itself: only the garbage collector finds that nobody else does."""

    def __init__(self) -> None:
        self.me = self


@pytest.fixture(autouse=True)
def _thawed() -> Iterator[None]:
    yield
    gc.unfreeze()


def test_no_garbage_is_looked_for_while_loading() -> None:
    with collector_at_rest():
        assert not gc.isenabled()
        knot = weakref.ref(_Knot())
    gc.collect()
    assert gc.isenabled()
    assert knot() is not None


def test_garbage_made_later_is_found() -> None:
    with collector_at_rest():
        pass
    knot = weakref.ref(_Knot())
    gc.collect()
    assert knot() is None


def test_a_script_that_cannot_be_loaded_leaves_the_collector_on() -> None:
    with pytest.raises(ValueError, match="broken"), collector_at_rest():
        raise ValueError("broken")
    assert gc.isenabled()
