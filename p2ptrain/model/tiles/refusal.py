"""Why an operator cannot be tiled."""

from __future__ import annotations

from p2ptrain.errors import PlanError


class NotTiled(PlanError):
    """A node ends the tiled part; the message says what it does that no tile can do alone."""
