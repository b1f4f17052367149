"""Groups of options that several commands share, so that they read the same everywhere."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any, NotRequired, TypedDict

from p2ptrain.cli import codes, options
from p2ptrain.mesh.default_folder import STATE_DIR_VARIABLE, default_state_dir


class NodeOptions(TypedDict):
    """The arguments of `p2ptrain.Node` that stand on the command line."""

    name: str | None
    code: str | None
    peers: tuple[str, ...]
    interfaces: tuple[str, ...]
    port: int | None
    state_dir: Path
    memory_bytes: int | None
    threads: int | None
    only_for: NotRequired[tuple[str, ...]]


def add_common(parser: argparse.ArgumentParser) -> None:
    """What every command takes."""
    group = parser.add_argument_group("every command")
    group.add_argument(
        "--state-dir",
        metavar="DIR",
        type=options.state_dir,
        help="folder for this device's name, keys and pairings "
        f"(default: ${STATE_DIR_VARIABLE}, else the system's usual place)",
    )
    group.add_argument(
        "--json", action="store_true", help="print JSON, one object a line; logs go to stderr"
    )
    group.add_argument("--debug", action="store_true", help="show tracebacks and more logs")


def add_node(parser: argparse.ArgumentParser) -> None:
    """How this device stands in the household: `join`'s options."""
    group = parser.add_argument_group("this device in the household")
    group.add_argument(
        "--name",
        metavar="N",
        type=options.name,
        help="this device's name (default: the name of the computer)",
    )
    code = group.add_mutually_exclusive_group()
    code.add_argument(
        codes.OPTION,
        type=options.code,
        help="the pairing code (eight digits), needed once on each device; - asks for it",
    )
    code.add_argument(
        codes.FILE_OPTION,
        metavar="FILE",
        type=options.path,
        help=f"read the code from this file (or set ${codes.VARIABLE})",
    )
    group.add_argument(
        "--peer",
        metavar="HOST[:PORT]",
        action="append",
        default=[],
        type=options.peer,
        help="another device, where devices are not found automatically; may be repeated",
    )
    group.add_argument(
        "--interface",
        metavar="IFACE_OR_IP",
        action="append",
        default=[],
        help="use only this network interface or address; may be repeated",
    )
    group.add_argument("--port", metavar="P", type=options.port, help="TCP port to listen on")
    group.add_argument(
        "--memory",
        metavar="SIZE",
        type=options.size_bytes,
        help="memory p2ptrain may use on this device, such as 2GiB (default: measured)",
    )
    group.add_argument(
        "--threads",
        metavar="T",
        type=options.threads,
        help="CPU threads to compute with (default: as many as torch chooses)",
    )


def find_code(args: argparse.Namespace) -> None:
    """Put the code in its place in `args`, wherever it stands: it may have to be asked for."""
    args.code = codes.chosen(args.code, args.code_file)


def node_options(args: argparse.Namespace) -> NodeOptions:
    """The options of `add_node` and `add_common` as `p2ptrain.Node` takes them."""
    return NodeOptions(
        name=args.name,
        code=args.code,
        peers=tuple(args.peer),
        interfaces=tuple(args.interface),
        port=args.port,
        state_dir=state_dir(args),
        memory_bytes=args.memory,
        threads=args.threads,
    )


def state_dir(args: argparse.Namespace) -> Path:
    """The state folder that `args` mean."""
    chosen: Path | None = args.state_dir
    return chosen if chosen is not None else default_state_dir()


def add_script_options(parser: argparse.ArgumentParser) -> None:
    """SCRIPT and the options of its job."""
    parser.add_argument("script", metavar="SCRIPT", help="Python file that defines job()")
    parser.add_argument(
        "-o",
        dest="job_options",
        metavar="KEY=VALUE",
        action="append",
        default=[],
        type=options.key_value,
        help="an argument of the script's job(); may be repeated",
    )


def add_planning_files(parser: argparse.ArgumentParser) -> None:
    """The files that planning starts from."""
    parser.add_argument(
        "--profile",
        metavar="P.json",
        required=True,
        type=options.path,
        help="the model's profile, as `p2ptrain profile` writes it",
    )
    parser.add_argument(
        "--cluster",
        metavar="C.json",
        required=True,
        type=options.path,
        help="the devices and links (p2ptrain.cluster/1)",
    )


def command(
    commands: Any, name: str, *, summary: str, description: str, example: str
) -> argparse.ArgumentParser:
    """A subparser whose `--help` explains the command and ends with an example."""
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        help=summary,
        description=description,
        epilog=f"example:\n{example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    return parser
