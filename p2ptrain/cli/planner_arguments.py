"""The planners' names on the command line.

They stand here, and not in the planning room, because otherwise the start of every command would
load all planners; a test compares them with the planning room's own list.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping

from p2ptrain.cli.usage import Options, UsageError

PLANNERS: Mapping[str, str] = {
    "auto": "fastest plan, may leave devices out",
    "hybrid": "as in the paper Asteroid: parts of one or several devices, devices sorted by memory",
    "pipedream": "as in the paper PipeDream: as if all devices and links were equal",
    "ftpipehd": "as in the paper FTPipeHD: one device for each part, sized by speed",
    "pp": "a pipeline: one device for each part, all parts take the same time",
    "tiles": "the first layers of an image model in tiles of the image, the rest on one device",
    "dp": "data parallel: each device has the whole model and a share of the samples",
    "single": "the fastest device alone",
}


def any_planner(text: str) -> str:
    """A planner of `p2ptrain plan` and `p2ptrain train`."""
    if text not in PLANNERS:
        known = ", ".join(PLANNERS)
        raise argparse.ArgumentTypeError(f"unknown planner {text!r}: choose from {known}")
    return text


def grid(text: str) -> tuple[int, int]:
    """`2x3`: rows and columns of tiles."""
    match = re.fullmatch(r"([1-9]\d{0,3})x([1-9]\d{0,3})", text)
    if match is None:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a grid: give rows x columns, such as 2x3"
        )
    return int(match[1]), int(match[2])


def unit_groups(text: str) -> tuple[int, ...]:
    """`0-3,4-9`: the borders of groups of units, both ends included."""
    borders = [0]
    for part in text.split(","):
        match = re.fullmatch(r"(\d{1,4})(?:-(\d{1,4}))?", part.strip())
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (-1, -1)
        if first != borders[-1] or last < first:
            raise argparse.ArgumentTypeError(
                f"{text!r} is not a list of layers from 0 on without gaps, such as 0-3,4-9"
            )
        borders.append(last + 1)
    return tuple(borders)


def add_tiling(group: Options) -> None:
    """The options of planner `tiles`."""
    group.value(
        "--grid RxC", grid, "planner tiles: rows x columns of tiles (default: the planner chooses)"
    )
    group.value(
        "--groups 0-3,4-9",
        unit_groups,
        "planner tiles: numbers of the layers computed in tiles, in groups; devices exchange "
        "the tiles' borders between groups (default: the planner chooses)",
        default=(),
    )


def check_tiling(args: argparse.Namespace) -> None:
    """UsageError where what `add_tiling` adds is given to another planner."""
    if (args.grid or args.groups) and args.planner != "tiles":
        raise UsageError(f"--grid and --groups are for --planner tiles, not for {args.planner}")
