"""The command `p2ptrain`, also as `python -m p2ptrain`."""

from __future__ import annotations

import sys

from p2ptrain.cli import early


def main() -> int:
    """Run the command line; returns the exit code."""
    early.keep()
    from p2ptrain.cli.main import main as run  # after `keep`: it loads for a second

    return run()


if __name__ == "__main__":
    sys.exit(main())
