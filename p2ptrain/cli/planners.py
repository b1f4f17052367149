"""The planners' names on the command line.

They stand here, and not in the planning room, because every command's start would otherwise load
all planners; a test holds them against the planning room's own list.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping

PLANNERS: Mapping[str, str] = {
    "auto": "the best plan found; the only one that leaves devices out",
    "hybrid": "Asteroid's: stages of one device or several, devices sorted by memory",
    "pipedream": "PipeDream's: as for equal devices and links, every share equal",
    "ftpipehd": "FTPipeHD's: one device a stage by capacity, the holder first, then by name",
    "pp": "one device a stage, equal shares of time",
    "dp": "every device the whole model, shares by speed and memory",
    "single": "the fastest device alone",
}


def any_planner(text: str) -> str:
    """A planner of `p2ptrain plan` and `p2ptrain train`."""
    if text == "tiles":
        raise argparse.ArgumentTypeError("the planner tiles is not built yet")
    if text not in PLANNERS:
        raise argparse.ArgumentTypeError(_unknown(text))
    return text


def _unknown(text: str) -> str:
    return f"there is no planner {text!r} here: choose from {', '.join(PLANNERS)}"
