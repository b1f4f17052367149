"""Strict parsers of command line values, and the options that several commands share.

A value that is not exactly understood is wrong usage. Shared options read the same everywhere.
"""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import NotRequired, TypedDict, TypeVar

from p2ptrain.cli import pairing_code
from p2ptrain.cli.pairing_code import PROMPT
from p2ptrain.cli.usage import Options
from p2ptrain.devices.request import AUTO, CHOICES, SEVERAL, read_request, read_requests
from p2ptrain.errors import OptionError
from p2ptrain.job.train_options import MAX_THREADS
from p2ptrain.manners.settings import Manners, QuietHours
from p2ptrain.mesh.identity.state_folder import STATE_DIR_VARIABLE, default_state_dir
from p2ptrain.mesh.trust.pairing_window import normalised_code
from p2ptrain.net.fields import checked_name

T = TypeVar("T")

_UNITS_BYTES = {
    "": 1,
    "B": 1,
    "KB": 1000,
    "MB": 1000**2,
    "GB": 1000**3,
    "TB": 1000**4,
    "KIB": 1024,
    "MIB": 1024**2,
    "GIB": 1024**3,
    "TIB": 1024**4,
}

_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)", re.ASCII)

_MAX_DIGITS = 18

_WHOLE = re.compile(r"[0-9]{1,18}", re.ASCII)


def size_bytes(text: str) -> int:
    """A size such as 2GiB, 500MB or 1048576, in bytes."""
    match = _SIZE.fullmatch(text.strip())
    if match is None or match[2].upper() not in _UNITS_BYTES:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size: write it like 2GiB or 500MB")
    number, unit = match[1], _UNITS_BYTES[match[2].upper()]
    if len(number) > _MAX_DIGITS:
        raise argparse.ArgumentTypeError(f"{text!r} is more than any device has")
    size = int(number) * unit if number.isdigit() else round(float(number) * unit)
    if size < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is less than one byte")
    return size


def positive(text: str) -> int:
    """A whole number of at least 1."""
    if _WHOLE.fullmatch(text) is None or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def positive_or_auto(text: str) -> int | str:
    """A whole number of at least 1, or "auto"."""
    return text if text == "auto" else positive(text)


def threads(text: str) -> int:
    """A number of threads to compute with."""
    if _WHOLE.fullmatch(text) is None or not 1 <= int(text) <= MAX_THREADS:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1 to {MAX_THREADS}")
    return int(text)


def _parser(read: Callable[[str], T]) -> Callable[[str], T]:
    """`read`, whose refusal is wrong usage."""

    def parse(text: str) -> T:
        try:
            return read(text)
        except OptionError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return parse


one_device = _parser(lambda text: str(read_request(text)))
"""What to compute on, alone."""

devices = _parser(lambda text: tuple(map(str, read_requests(text))))
"""What to compute on; more than one: each by a member of its own."""


def two_counts(text: str) -> tuple[int, int]:
    """Two whole numbers of at least 1 with a comma between."""
    first, comma, second = text.partition(",")
    if not comma:
        raise argparse.ArgumentTypeError(f"{text!r} is not two numbers such as 10,100")
    return positive(first), positive(second)


def _number(text: str) -> float:
    """NaN where it is none."""
    try:
        return float(text)
    except ValueError:
        return math.nan


def seconds(text: str) -> float:
    """A time in seconds, more than none."""
    value = _number(text)
    if not (value > 0 and math.isfinite(value)):
        raise argparse.ArgumentTypeError(f"{text!r} is not a time in seconds above 0")
    return value


def percent(text: str) -> float:
    """A part such as 50% (or 50), above 0% and at most 100%, as 0.5."""
    value = _number(text.strip().removesuffix("%"))
    if not 0 < value <= 100:
        raise argparse.ArgumentTypeError(f"{text!r} is not a part above 0% and at most 100%")
    return value / 100


def degrees(text: str) -> float:
    """A temperature in degrees Celsius at which a device may be."""
    try:
        value = float(text)
        Manners(max_temperature=value)
    except (ValueError, OptionError):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a temperature from 30 to 120 degrees Celsius"
        ) from None
    return value


quiet_hours = _parser(QuietHours.parse)
"""Two times of day."""


def port(text: str) -> int:
    """A TCP port; 0 lets the system choose."""
    if _WHOLE.fullmatch(text) is None or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port from 0 to 65535")
    return int(text)


def code(text: str) -> str:
    """A pairing code: eight digits, without the spaces and dashes users write, or "-" alone."""
    try:
        return text if text == PROMPT else normalised_code(text)
    except OptionError as error:
        raise argparse.ArgumentTypeError(f"{text!r}: {error}") from error


name = _parser(checked_name)
"""A device's name."""


def peer(text: str) -> str:
    """HOST or HOST:PORT; an IPv6 address with a port stands in brackets."""
    from p2ptrain.mesh.config import parse_peer  # here: it loads the mesh, which --help need not

    _parser(parse_peer)(text)
    return text


def whole_numbers(text: str) -> tuple[int, ...]:
    """Whole numbers with commas between them, such as 1,4,16; sorted, each once."""
    return tuple(sorted({positive(part.strip()) for part in text.split(",")}))


def key_value(text: str) -> tuple[str, str]:
    """KEY=VALUE."""
    key, equals, value = text.partition("=")
    if not equals or not key.isidentifier():
        raise argparse.ArgumentTypeError(f"{text!r} is not KEY=VALUE")
    return key, value


def name_and_part(text: str) -> tuple[str, float]:
    """NAME=PART, a device and a part of something, above 0 and at most 1."""
    device, equals, part = text.rpartition("=")
    value = _number(part)
    if not equals or not device or not 0 < value <= 1:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not NAME=PART with a PART above 0 and at most 1"
        )
    return device, value


def path(text: str) -> Path:
    """A path, `~` allowed."""
    if not text:
        raise argparse.ArgumentTypeError("an empty path is no file and no folder")
    try:
        return Path(text).expanduser()
    except RuntimeError as error:
        raise argparse.ArgumentTypeError(f"{text!r}: there is no such user") from error


def state_dir(text: str) -> Path:
    """A folder's path, `~` allowed."""
    return path(text).absolute()


def add_common(own: Options) -> None:
    """What every command takes."""
    group = own.group("every command")
    group.value(
        "--state-dir DIR",
        state_dir,
        "folder for this device's name, keys and pairings "
        f"(default: ${STATE_DIR_VARIABLE}, else the system's usual place)",
    )
    group.flag("--json", "print JSON, one object a line; logs go to stderr")
    group.flag("--debug", "show tracebacks and more logs")


def add_node(own: Options) -> None:
    """How this device stands in the household: `join`'s options."""
    group = own.group("this device in the household")
    group.value("--name N", name, "this device's name (default: the name of the computer)")
    pairing = group.one_of()
    pairing.value(
        pairing_code.OPTION,
        code,
        "the pairing code (eight digits), needed once on each device; - asks for it",
    )
    file_form = f"{pairing_code.FILE_OPTION} FILE"
    pairing.value(
        file_form, path, f"read the code from this file (or set ${pairing_code.VARIABLE})"
    )
    group.values(
        "--peer HOST[:PORT]",
        peer,
        "another device, where devices are not found automatically; may be repeated",
    )
    group.values(
        "--interface IFACE_OR_IP",
        str,
        "use only this network interface or address; may be repeated",
    )
    group.value("--port P", port, "TCP port to listen on")
    group.value(
        "--memory SIZE",
        size_bytes,
        "memory that p2ptrain may use, such as 2GiB: of this device's, and of a graphics "
        "card's own as much again (default: most of what is free)",
    )
    group.value(
        "--threads T", threads, "CPU threads to compute with (default: as many as torch chooses)"
    )
    group.value(
        f"--device {CHOICES}",
        devices,
        "what to compute on (default: auto, the accelerator where there is one that computes "
        f"right and faster than the CPU); {SEVERAL} starts one more member for the second",
        default=(AUTO,),
    )


def find_code(args: argparse.Namespace) -> None:
    """Put the code in its place in `args`, wherever it stands: it may have to be asked for."""
    args.code = pairing_code.chosen(args.code, args.code_file)


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
    device: str
    only_for: NotRequired[tuple[str, ...]]
    manners: NotRequired[Manners]


def node_options(args: argparse.Namespace) -> NodeOptions:
    """The options of `add_node` and of every command as `p2ptrain.Node` takes them."""
    return NodeOptions(
        name=args.name,
        code=args.code,
        peers=tuple(args.peer),
        interfaces=tuple(args.interface),
        port=args.port,
        state_dir=state_dir_of(args),
        memory_bytes=args.memory,
        threads=args.threads,
        device=args.device[0],
    )


def state_dir_of(args: argparse.Namespace) -> Path:
    """The state folder that `args` mean."""
    chosen: Path | None = args.state_dir
    return chosen if chosen is not None else default_state_dir()


def add_script_options(own: Options) -> None:
    """SCRIPT and the options of its job."""
    own.word("script", "Python file that defines job()")
    text = "an argument of the script's job(); may be repeated"
    own.values("-o KEY=VALUE", key_value, text, dest="job_options")


def add_planning_files(own: Options) -> None:
    """The files that planning starts from."""
    own.value(
        "--profile P.json",
        path,
        "the model's profile, as `p2ptrain profile` writes it",
        required=True,
    )
    own.value("--cluster C.json", path, "the devices and links (p2ptrain.cluster/1)", required=True)
