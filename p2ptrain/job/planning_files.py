"""Reads and writes planning files; an error is one line that begins with the file's name.

Users write these files by hand and get them from others, so nothing in them is trusted: size,
encoding, nesting and duplicate keys are checked here, fields and numbers where they are parsed.
"""

from __future__ import annotations

import json
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from p2ptrain import files
from p2ptrain.errors import OptionError
from p2ptrain.files import where_links_lead

if TYPE_CHECKING:
    from p2ptrain.plan.types.cluster import Cluster
    from p2ptrain.plan.types.plan import Plan
    from p2ptrain.plan.types.profile import Profile

LARGEST_BYTES = 256 * 2**20
"""A thousand devices with every link listed are some 80 MB; this is memory, not a file of ours."""

_NOTHING_PREDICTED = {
    "predicted": {"round_seconds": 0.0, "samples_per_s": 0.0, "peak_bytes": {}},
    "left_out": [],
}

Parsed = TypeVar("Parsed")


def read_profile(path: Path) -> Profile:
    """The profile in that file. Raises OptionError."""
    from p2ptrain.plan.types.profile import Profile

    return _parsed(path, Profile.from_json)


def read_cluster(path: Path) -> Cluster:
    """The cluster in that file, or of the household in a `.toml`. Raises OptionError."""
    from p2ptrain.plan.types.cluster import Cluster
    from p2ptrain.plan.types.household_file import cluster_of_household

    if path.suffix.lower() == ".toml":
        with naming(path):
            return cluster_of_household(_toml(_content(path)))
    return _parsed(path, Cluster.from_json)


def read_plan(path: Path, batch_size: int | None) -> Plan:
    """The plan in that file, of `batch_size` samples where the caller knows. Raises OptionError.

    One that is written by hand need not predict anything, nor say who is left out.
    """
    from p2ptrain.plan.types.plan import Plan

    def parse(value: object) -> Plan:
        by_hand = _NOTHING_PREDICTED | value if isinstance(value, dict) else value
        return Plan.from_json(by_hand, batch_size=batch_size)

    return _parsed(path, parse)


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Begin the message of an OptionError with the file it is about."""
    try:
        yield
    except OptionError as error:
        raise OptionError(f"{path}: {_printable(str(error))}") from error


def _printable(message: str) -> str:
    """`message`, which may quote the file, without what would confuse a terminal or an encoder."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in message)


def read_json(path: Path) -> object:
    """The JSON value in that file.

    Raises:
        OptionError: it cannot be read, is too large, not UTF-8, not JSON, nested too deeply, or an
            object in it has a key twice.
    """
    with naming(path):
        return _decoded(_content(path))


def write_whole(path: Path, text: str) -> None:
    """Write the file as a whole or not at all. Raises OptionError.

    A link is followed, and what is no file (`/dev/null`, a pipe) is written to, never replaced.
    """
    try:
        if path.exists() and not path.is_file():  # `open` refuses folders
            with open(path, "w", encoding="utf-8") as stream:
                stream.write(text + "\n")
        else:
            files.write_whole(where_links_lead(path), [text, "\n"])
    except OSError as error:
        raise OptionError(f"{path}: cannot be written: {error.strerror or error}") from error


def _parsed(path: Path, parse: Callable[[object], Parsed]) -> Parsed:
    value = read_json(path)
    with naming(path):
        return parse(value)


def _content(path: Path) -> bytes:
    try:
        with open(path, "rb") as file:
            content = file.read(LARGEST_BYTES + 1)
    except OSError as error:
        raise OptionError(f"cannot be read: {error.strerror or error}") from error
    if len(content) > LARGEST_BYTES:
        raise OptionError(f"larger than {LARGEST_BYTES // 2**20} MiB: this is no planning file")
    if not content.strip():
        raise OptionError("the file is empty")
    return content


def _decoded(content: bytes) -> object:
    try:
        text = content.decode("utf-8-sig")
        return json.loads(text, object_pairs_hook=_object, parse_float=_number)
    except UnicodeDecodeError as error:
        raise OptionError(f"not UTF-8 text (byte {error.start})") from error
    except json.JSONDecodeError as error:
        where = f"line {error.lineno} column {error.colno}"
        raise OptionError(f"not JSON: {error.msg} ({where})") from error
    except ValueError as error:  # Python reads no whole number of more than 4300 digits
        raise OptionError(f"not JSON that can be read here: {error}") from error
    except RecursionError as error:
        raise OptionError("nested too deeply: this is no planning file") from error


def _toml(content: bytes) -> object:
    try:
        return tomllib.loads(content.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise OptionError(f"not UTF-8 text (byte {error.start})") from error
    except (tomllib.TOMLDecodeError, RecursionError, ValueError) as error:
        raise OptionError(f"not TOML: {error}") from error


def _number(text: str) -> int | float:
    """4e9 and 1.0 count as whole: where a fraction may stand, a whole number may too."""
    value = float(text)
    return int(value) if value.is_integer() and abs(value) < 2**63 else value


def _object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    value = dict(pairs)
    if len(value) != len(pairs):
        found = Counter(key for key, _ in pairs)
        twice = next(key for key, count in found.items() if count > 1)
        raise OptionError(f'the field "{twice}" is given twice in one object')
    return value
