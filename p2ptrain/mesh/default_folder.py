"""Where a device's identity lives unless somebody says otherwise."""

from __future__ import annotations

import os
from pathlib import Path

from p2ptrain.errors import OptionError

STATE_DIR_VARIABLE = "P2PTRAIN_STATE_DIR"


def default_state_dir() -> Path:
    """The folder that the environment names, else the system's place for such data.

    Raises:
        OptionError: the environment's begins with the `~` of a user who is not here.
    """
    chosen = os.environ.get(STATE_DIR_VARIABLE)
    if chosen:
        try:
            return Path(chosen).expanduser().absolute()
        except RuntimeError as error:
            raise OptionError(f"${STATE_DIR_VARIABLE} is {chosen!r}: {error}") from error
    import platformdirs  # here, so that --help need not load it

    return Path(platformdirs.user_data_dir("p2ptrain", appauthor=False))
