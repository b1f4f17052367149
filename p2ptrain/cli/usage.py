"""Exit codes, the error for wrong usage, and argparse as our commands use it.

Its errors reach programs too, and options for experiments are shown by `--help-all` only.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

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
            UsageExit: always.
        """
        try:
            super().error(message)
        except SystemExit:
            raise UsageExit(" ".join(message.split())) from None


class Experimental:
    """A command's group of options for comparisons: `--help` hides them, `--help-all` does not."""

    def __init__(self, parser: argparse.ArgumentParser) -> None:
        self._group = parser.add_argument_group("experimental")
        self._texts: dict[argparse.Action, str] = {}
        parser.add_argument(
            "--help-all",
            "-hh",
            action=_HelpAll,
            texts=self._texts,
            help="show this help with the experimental options too",
        )

    def add(self, option: str, *, text: str, **settings: Any) -> None:
        """Add an option as `add_argument` does; `text` is its help."""
        action = self._group.add_argument(option, help=argparse.SUPPRESS, **settings)
        self._texts[action] = text


class _HelpAll(argparse.Action):
    def __init__(
        self, option_strings: Sequence[str], dest: str, texts: dict[argparse.Action, str], help: str
    ) -> None:
        super().__init__(option_strings, argparse.SUPPRESS, nargs=0, help=help)
        self._texts = texts

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        for action, text in self._texts.items():
            action.help = text
        parser.print_help()
        parser.exit()


def check_folders(*files: Path | None) -> None:
    """Raises UsageError: a file that is to be written has no folder."""
    for file in files:
        if file is not None and not file.absolute().parent.is_dir():
            raise UsageError(f"the folder of {file} does not exist")
