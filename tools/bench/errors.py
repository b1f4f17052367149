"""Why a figure is missing."""

from __future__ import annotations


class CellError(RuntimeError):
    """A cell could not be measured; the run goes on with the next one.

    Attributes:
        cannot_run: the system says that it cannot train this model, so trying again is no use.
    """

    def __init__(self, message: str, cannot_run: bool = False) -> None:
        super().__init__(message)
        self.cannot_run = cannot_run
