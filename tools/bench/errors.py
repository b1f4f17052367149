"""Why a figure is missing."""

from __future__ import annotations

import traceback
from typing import Self


class CellError(RuntimeError):
    """A cell could not be measured; the run goes on with the next one.

    Attributes:
        cannot_run: the system says that it cannot train this model, so trying again is no use.
    """

    def __init__(self, message: str, cannot_run: bool = False) -> None:
        super().__init__(message)
        self.cannot_run = cannot_run


class CannotRunError(Exception):
    """A rival refuses a model, by the exception that it raised."""

    @classmethod
    def because(cls, error: Exception) -> Self:
        """With the kind, the message and the place of `error`."""
        place = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{place.name} in {place.filename.rpartition('site-packages/')[2]}"
        return cls(f"{type(error).__name__}: {error} ({where})")
