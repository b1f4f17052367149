"""Options for comparisons and experiments: `--help` hides them, `--help-all` shows them."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any, NoReturn


class Experimental:
    """A command's group "experimental"."""

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
