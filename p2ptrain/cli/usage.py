"""Exit codes, the error for wrong usage, and a parser that reports errors to programs too."""

from __future__ import annotations

import argparse
from typing import NoReturn

from p2ptrain.errors import OptionError

DONE = 0

FAILED = 1

WRONG_USAGE = 2

INTERRUPTED = 130


class Interrupted(KeyboardInterrupt):
    """Ctrl-C, with what the user should know about what was interrupted."""


class UsageError(OptionError):
    """Wrong usage that only shows after argparse is through: exit code 2."""


class UsageExit(SystemExit):
    """The command line makes no sense, which stderr says already.

    Attributes:
        message: what is wrong, in one line.
    """

    def __init__(self, message: str) -> None:
        super().__init__(WRONG_USAGE)
        self.message = message


class Parser(argparse.ArgumentParser):
    """Ends with `UsageExit`; so do the parsers of its commands."""

    def error(self, message: str) -> NoReturn:
        """Say on stderr what is wrong.

        Raises:
            Misused: always.
        """
        try:
            super().error(message)
        except SystemExit:
            raise UsageExit(" ".join(message.split())) from None
