"""Warnings for people, each once: what repeats every few seconds would hide the rest."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from p2ptrain.observe.events import Event, Warned

REMEMBERED_LIMIT = 256
"""Any device on the network can make up addresses and with them new texts."""


class Notices:
    """Emits each text once; of more than REMEMBERED_LIMIT the oldest are forgotten."""

    def __init__(self, emit: Callable[[Event], None]) -> None:
        self._emit = emit
        self._said: OrderedDict[str, None] = OrderedDict()

    def warn(self, text: str) -> None:
        """Tell people, unless they were told."""
        if text in self._said:
            return
        self._said[text] = None
        if len(self._said) > REMEMBERED_LIMIT:
            self._said.popitem(last=False)
        self._emit(Warned(text))
