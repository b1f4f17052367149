"""argparse's parser; what is wrong on the command line reaches programs too."""

from __future__ import annotations

import argparse
from typing import NoReturn

from p2ptrain.cli.usage import WRONG_USAGE


class Misused(SystemExit):
    """The command line makes no sense, which stderr says already.

    Attributes:
        message: what is wrong, in one line.
    """

    def __init__(self, message: str) -> None:
        super().__init__(WRONG_USAGE)
        self.message = message


class Parser(argparse.ArgumentParser):
    """Ends with `Misused`; so do the parsers of its commands."""

    def error(self, message: str) -> NoReturn:
        """Say on stderr what is wrong.

        Raises:
            Misused: always.
        """
        try:
            super().error(message)
        except SystemExit:
            raise Misused(" ".join(message.split())) from None
