"""Fixtures that tests of the room `model` ask for."""

from tests.support.prepared_models import prepared

__all__ = ["prepared"]
