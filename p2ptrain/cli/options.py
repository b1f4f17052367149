"""Values on the command line, parsed strictly: what is not exactly understood is wrong usage."""

from __future__ import annotations

import argparse
import math
import re
from pathlib import Path

from p2ptrain.cli.codes import PROMPT
from p2ptrain.errors import OptionError
from p2ptrain.mesh.text import checked_name
from p2ptrain.mesh.window import normalised_code
from p2ptrain.training.option_values import MOST_THREADS

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
_MOST_DIGITS = 18
_WHOLE = re.compile(r"[0-9]{1,18}", re.ASCII)


def size_bytes(text: str) -> int:
    """A size such as 2GiB, 500MB or 1048576, in bytes."""
    match = _SIZE.fullmatch(text.strip())
    if match is None or match[2].upper() not in _UNITS_BYTES:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size: write it like 2GiB or 500MB")
    number, unit = match[1], _UNITS_BYTES[match[2].upper()]
    if len(number) > _MOST_DIGITS:
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
    if _WHOLE.fullmatch(text) is None or not 1 <= int(text) <= MOST_THREADS:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1 to {MOST_THREADS}")
    return int(text)


def two_counts(text: str) -> tuple[int, int]:
    """Two whole numbers of at least 1 with a comma between."""
    first, comma, second = text.partition(",")
    if not comma:
        raise argparse.ArgumentTypeError(f"{text!r} is not two numbers such as 10,100")
    return positive(first), positive(second)


def seconds(text: str) -> float:
    """A time in seconds, more than none."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (value > 0 and math.isfinite(value)):
        raise argparse.ArgumentTypeError(f"{text!r} is not a time in seconds above 0")
    return value


def port(text: str) -> int:
    """A TCP port; 0 lets the system choose."""
    if _WHOLE.fullmatch(text) is None or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port from 0 to 65535")
    return int(text)


def code(text: str) -> str:
    """A pairing code: eight digits, without the spaces and dashes people write, or "-" alone."""
    if text == PROMPT:
        return text
    try:
        return normalised_code(text)
    except OptionError as error:
        raise argparse.ArgumentTypeError(f"{text!r}: {error}") from error


def name(text: str) -> str:
    """A device's name."""
    try:
        return checked_name(text)
    except OptionError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def peer(text: str) -> str:
    """HOST or HOST:PORT; an IPv6 address with a port stands in brackets."""
    from p2ptrain.mesh.config import parse_peer  # here: it loads the mesh, which --help need not

    try:
        parse_peer(text)
    except OptionError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
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
    try:
        value = float(part)
    except ValueError:
        value = math.nan
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
