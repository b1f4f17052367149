"""The planners' names on the command line.

They stand here, and not in the planning room, because every command's start would otherwise load
all planners; a test holds them against the planning room's own list.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping

from p2ptrain.cli.usage import UsageError

PLANNERS: Mapping[str, str] = {
    "auto": "the best plan found; the only one that leaves devices out",
    "hybrid": "Asteroid's: stages of one device or several, devices sorted by memory",
    "pipedream": "PipeDream's: as for equal devices and links, every share equal",
    "ftpipehd": "FTPipeHD's: one device a stage by capacity, the holder first, then by name",
    "pp": "one device a stage, equal shares of time",
    "tiles": "the first units in tiles of their maps, the rest on the fastest that holds it",
    "dp": "every device the whole model, shares by speed and memory",
    "single": "the fastest device alone",
}


def any_planner(text: str) -> str:
    """A planner of `p2ptrain plan` and `p2ptrain train`."""
    if text not in PLANNERS:
        raise argparse.ArgumentTypeError(_unknown(text))
    return text


def grid(text: str) -> tuple[int, int]:
    """`2x3`: rows and columns of tiles."""
    match = re.fullmatch(r"([1-9]\d{0,3})x([1-9]\d{0,3})", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no grid: give rows x columns, such as 2x3")
    return int(match[1]), int(match[2])


def unit_groups(text: str) -> tuple[int, ...]:
    """`0-3,4-9`: the borders of groups of units, both ends included."""
    borders = [0]
    for part in text.split(","):
        match = re.fullmatch(r"(\d{1,4})(?:-(\d{1,4}))?", part.strip())
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (-1, -1)
        if first != borders[-1] or last < first:
            raise argparse.ArgumentTypeError(
                f"{text!r}: groups of units follow each other from unit 0 on, such as 0-3,4-9"
            )
        borders.append(last + 1)
    return tuple(borders)


def add_tiling(group: argparse._ArgumentGroup) -> None:
    """The options of planner `tiles`."""
    group.add_argument(
        "--grid",
        metavar="RxC",
        type=grid,
        help="planner tiles: rows x columns of tiles (default: the planner chooses)",
    )
    group.add_argument(
        "--groups",
        metavar="0-3,4-9",
        type=unit_groups,
        default=(),
        help="planner tiles: units between whose groups halos are exchanged; the last one ends the "
        "tiled part (default: the planner chooses)",
    )


def check_tiling(args: argparse.Namespace) -> None:
    """UsageError where what `add_tiling` adds is given to another planner."""
    if (args.grid or args.groups) and args.planner != "tiles":
        raise UsageError(f"--grid and --groups are for --planner tiles, not for {args.planner}")


def _unknown(text: str) -> str:
    return f"there is no planner {text!r} here: choose from {', '.join(PLANNERS)}"
