"""Exit codes, the error for wrong usage, and argparse as our commands use it.

Its errors reach programs too, and options for experiments are shown by `--help-all` only.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from p2ptrain.errors import OptionError

if TYPE_CHECKING:
    from p2ptrain.cli.output import Output

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

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As argparse's; what a command does not know is that command's error."""
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return found, unknown

    def error(self, message: str) -> NoReturn:
        """Say on stderr what is wrong, and where the options are listed.

        Raises:
            UsageExit: always.
        """
        message = " ".join(message.split())
        self._print_message(f"{self.prog}: error: {message} ({self.prog} --help)\n", sys.stderr)
        raise UsageExit(message)


class Options:
    """Declares options of a command, or of a group of its options."""

    def __init__(self, container: argparse._ActionsContainer) -> None:
        self._container = container

    def value(self, form: str, read: Callable[[str], Any], text: str, **settings: Any) -> None:
        """An option with a value; `form`: as in the help, such as `--steps S`."""
        option, _, metavar = form.partition(" ")
        named = {"metavar": metavar} if metavar else {}
        self._add(option, text, type=read, **named, **settings)

    def values(self, form: str, read: Callable[[str], Any], text: str, **settings: Any) -> None:
        """The same, of one that may be repeated."""
        self.value(form, read, text, action="append", default=[], **settings)

    def word(self, name: str, text: str) -> None:
        """What stands without an option's name, such as SCRIPT."""
        self._add(name, text, metavar=name.upper())

    def choice(self, option: str, choices: Sequence[object], text: str, **settings: Any) -> None:
        """One of some words."""
        self._add(option, text, choices=choices, **settings)

    def flag(self, option: str, text: str) -> None:
        """An option without a value."""
        self._add(option, text, action="store_true")

    def group(self, title: str) -> Options:
        """For options under a title of their own in the help."""
        return Options(self._container.add_argument_group(title))

    def one_of(self) -> Options:
        """For options of which one may be given."""
        return Options(self._container.add_mutually_exclusive_group())

    def _add(self, option: str, text: str, **settings: Any) -> argparse.Action:
        return self._container.add_argument(option, help=text, **settings)


class Experimental(Options):
    """A command's group of options for comparisons: `--help` hides them, `--help-all` does not."""

    def __init__(self, parser: argparse.ArgumentParser) -> None:
        super().__init__(parser.add_argument_group("experimental"))
        self._texts: dict[argparse.Action, str] = {}
        parser.add_argument(
            "--help-all",
            "-hh",
            action=_HelpAll,
            texts=self._texts,
            help="show this help with the experimental options too",
        )

    def _add(self, option: str, text: str, **settings: Any) -> argparse.Action:
        action = super()._add(option, argparse.SUPPRESS, **settings)
        self._texts[action] = text
        return action


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


@dataclass(frozen=True, slots=True)
class Command:
    """A command, which `--help` explains with an example.

    Attributes:
        run: what it does; returns the exit code. None: others stand below it.
        options: adds its own options; those of every command come after them.
        experimental: adds those that `--help` does not show.
        defaults: further attributes of what is parsed.
    """

    name: str
    run: Callable[[argparse.Namespace, Output], int] | None
    summary: str
    description: str
    example: str
    options: Callable[[Options], None] | None = None
    experimental: Callable[[Options], None] | None = None
    defaults: Mapping[str, object] = field(default_factory=dict)

    def add(self, commands: Any, add_common: Callable[[Options], None]) -> argparse.ArgumentParser:
        """To argparse's subparsers; `add_common` adds what every command takes."""
        parser: argparse.ArgumentParser = commands.add_parser(
            self.name,
            help=self.summary,
            description=self.description,
            epilog=f"example:\n{self.example}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        if self.options is not None:
            self.options(Options(parser))
        if self.run is not None:
            add_common(Options(parser))
            parser.set_defaults(run=self.run, usual=parser.get_default, **self.defaults)
        if self.experimental is not None:
            self.experimental(Experimental(parser))
        return parser


def check_folders(*files: Path | None) -> None:
    """Raises UsageError: a file that is to be written has no folder."""
    for file in files:
        if file is not None and not file.absolute().parent.is_dir():
            raise UsageError(f"the folder of {file} does not exist")
