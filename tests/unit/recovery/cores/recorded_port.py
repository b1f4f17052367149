"""A port of a recovery core that writes down what it is asked for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

Asked: TypeAlias = tuple[Any, ...]
"""The method's name and its arguments, those by keyword last."""


class RecordedPort:
    """Takes any method; `taken` is what was asked for since it was called last.

    Attributes:
        here: what a worker says that it has.
    """

    def __init__(self, *ignored: str) -> None:
        self._asked: list[Asked] = []
        self._ignored = ignored
        self.here: list[Any] = []

    def entries(self) -> tuple[Any, ...]:
        """As the test says, and without what was dropped."""
        return tuple(self.here)

    def __getattr__(self, name: str) -> Callable[..., None]:
        def ask(*args: Any, **kwargs: Any) -> None:
            if name == "drop_state":
                self.here = [entry for entry in self.here if entry not in args[0]]
            if name not in self._ignored:
                self._asked.append((name, *args, *kwargs.values()))

        return ask

    def taken(self) -> list[Asked]:
        """In order."""
        asked, self._asked = self._asked, []
        return asked
