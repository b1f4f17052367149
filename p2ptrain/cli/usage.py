"""Exit codes, and the error that means: these words on the command line make no sense."""

from __future__ import annotations

from p2ptrain.errors import OptionError

DONE = 0
FAILED = 1
WRONG_USAGE = 2
INTERRUPTED = 130


class Interrupted(KeyboardInterrupt):
    """Ctrl-C, with what a person should know about what was interrupted."""


class UsageError(OptionError):
    """Wrong usage that only shows after argparse is through: exit code 2."""
