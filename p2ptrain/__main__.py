"""The command `p2ptrain`, also as `python -m p2ptrain`."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
from typing import NoReturn

from p2ptrain.cli import pairing_code, startup


def main() -> int:
    """Run the command line; returns the exit code."""
    pairing_code.take_out_of_sight(sys.argv[1:])
    startup.let_threads_sleep(sys.argv[1:])
    startup.ensure_merging_heap(sys.argv[1:])
    startup.keep_signals()
    startup.complete_standard_streams()
    if "P2PTRAIN_FAILPOINT" in os.environ and not _arm_failpoints():
        return 2
    from p2ptrain.cli.main import main as run  # after `keep`: it loads for a second

    exit_code = run(for_good=True)
    if "torch" in sys.modules:
        _leave(exit_code)
    return exit_code


def _arm_failpoints() -> bool:
    """What developers have happen to this process, see `failpoints`; whether it can be read."""
    from p2ptrain import failpoints
    from p2ptrain.errors import OptionError

    try:
        failpoints.arm_from(os.environ)
    except OptionError as error:
        sys.stderr.write(f"p2ptrain: error: {error}\n")
        return False
    return True


def _leave(exit_code: int) -> NoReturn:
    """End without tearing down torch: that takes a second, and what still computes may crash in it.

    All that has to be written or said has been: the commands clean up after themselves. What the
    script has registered for the end is its own: a logger's last records, temporary folders.
    """
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # closed, or no reader is left
            stream.flush()
    os._exit(exit_code)


if __name__ == "__main__":
    sys.exit(main())
