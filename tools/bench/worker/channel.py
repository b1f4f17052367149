"""A worker's conversation with the benchmark: JSON lines on stdin and stdout."""

from __future__ import annotations

import json
import os
import select
import sys
from typing import Any


class Channel:
    """Keeps stdout for itself: what libraries print goes to stderr from now on."""

    def __init__(self) -> None:
        self._out = os.fdopen(os.dup(1), "w", buffering=1)
        os.dup2(2, 1)

    def say(self, event: str, **fields: object) -> None:
        """One line."""
        self._out.write(json.dumps({"event": event, **fields}) + "\n")
        self._out.flush()

    def wait(self) -> dict[str, Any]:
        """The next line of the other side. Raises EOFError where it is gone."""
        line = sys.stdin.readline()
        if not line:
            raise EOFError("the benchmark has gone")
        message: dict[str, Any] = json.loads(line)
        return message

    def ready(self) -> dict[str, Any]:
        """Say that everything is loaded, and wait for what to do."""
        self.say("ready")
        return self.wait()

    @staticmethod
    def has_news() -> bool:
        """Whether `wait` would return at once."""
        return bool(select.select([sys.stdin], [], [], 0)[0])
