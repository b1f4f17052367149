"""What goes wrong with an emulated household.

ValueError
└── HouseholdError    what was asked for makes no sense; names the file and the field
RuntimeError
└── TestbedError      this machine did not do it; says what to do
"""

from __future__ import annotations


class HouseholdError(ValueError):
    """A household's file or a value in it is wrong."""


class TestbedError(RuntimeError):
    """The machine cannot emulate the household, or not any more."""

    __test__ = False  # for pytest: no test, for all its name
