"""Fixtures that tests of the room `holder` ask for."""

from tests.support.shared_captures import equal_models_are_captured_once

__all__ = ["equal_models_are_captured_once"]
