"""The captured models of the unit tests' room."""

from tests.unit.model.conftest import prepared

__all__ = ["prepared"]
