"""Where a device's identity lives unless somebody says otherwise."""

from __future__ import annotations

import os
from pathlib import Path

STATE_DIR_VARIABLE = "P2PTRAIN_STATE_DIR"


def default_state_dir() -> Path:
    """The folder that the environment names, else the system's place for such data."""
    chosen = os.environ.get(STATE_DIR_VARIABLE)
    if chosen:
        return Path(chosen).expanduser().absolute()
    import platformdirs  # here, so that --help need not load it

    return Path(platformdirs.user_data_dir("p2ptrain", appauthor=False))
