"""`python -m p2ptrain` is the command `p2ptrain`."""

from __future__ import annotations

import sys

from p2ptrain.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
