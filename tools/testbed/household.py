"""A household as a TOML file: which devices, how fast, how large, on which cables.

    rate = "100mbit"          # of every cable, in each direction; the default of the devices below

    [[device]]
    name = "laptop"
    cores = 0.5               # share of one core, above 0 and at most 1
    memory = "2GiB"           # left out: no limit

    [[device]]
    name = "pi"               # with a count: pi-1, pi-2, pi-3
    count = 3
    cores = 0.31
    rate = "10mbit"           # this device's own

Pure but for the reading of the file.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from tools.testbed import quantities
from tools.testbed.errors import HouseholdError

FOLDER = Path(__file__).parent / "households"
MAX_DEVICES = 64
LEAST_CORES = 0.001
"""The kernel's shortest quota, 1 ms, in its longest period, 1 s."""
LEAST_MBIT, MOST_MBIT = 0.001, 100_000
"""`tc` counts whole bits a second, and a bucket's bytes in 32 bits."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,31}")
_DEFAULTS = {"rate", "memory"}
_FIELDS = {"name", "count", "cores", *_DEFAULTS}
_Value = TypeVar("_Value")


@dataclass(frozen=True, slots=True)
class DeviceDescription:
    """One device.

    Attributes:
        cores: its share of one core, above 0 and at most 1.
        memory_bytes: what its processes may use together; None: no limit.
        rate_mbit: of its cable, in each direction at once; None: no limit.
    """

    name: str
    cores: float
    memory_bytes: int | None = None
    rate_mbit: float | None = None

    def __post_init__(self) -> None:
        check_name(self.name)
        check_cores(self.cores)
        check_rate(self.rate_mbit)


@dataclass(frozen=True, slots=True)
class Household:
    """Devices on one switch, in the file's order.

    Raises:
        HouseholdError: no device, too many, or two of one name.
    """

    name: str
    devices: tuple[DeviceDescription, ...]

    def __post_init__(self) -> None:
        names = [device.name for device in self.devices]
        if not 0 < len(names) <= MAX_DEVICES:
            raise HouseholdError(f"a household has 1 to {MAX_DEVICES} devices, not {len(names)}")
        twice = {name for name in names if names.count(name) > 1}
        if twice:
            raise HouseholdError(f"several devices are called {', '.join(sorted(twice))}")

    @classmethod
    def load(cls, name_or_path: str | Path) -> Household:
        """A household that comes with this package (`B`), or one in a file of yours.

        Raises:
            HouseholdError: no such household, or its file is wrong.
        """
        file = _file(name_or_path)
        try:
            return cls.parse(file.stem, file.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, HouseholdError) as error:
            raise HouseholdError(f"{file}: {error}") from error

    @classmethod
    def parse(cls, name: str, text: str) -> Household:
        """The household that `text`, TOML, describes. Raises HouseholdError naming the field."""
        try:
            content = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise HouseholdError(f"no TOML: {error}") from error
        tables = content.pop("device", [])
        if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
            raise HouseholdError("device: begin each device with a line [[device]]")
        _only(content, _DEFAULTS)
        devices: list[DeviceDescription] = []
        for number, table in enumerate(tables, 1):
            try:
                devices += _devices(content, table)
            except HouseholdError as error:
                raise HouseholdError(f"device {number}: {error}") from error
        return cls(name, tuple(devices))

    @classmethod
    def of_shares(cls, shares: Sequence[float], rate: str | None = None) -> Household:
        """Devices `device0`, `device1` ... with these shares of a core, for measurements."""
        rate_mbit = None if rate is None else quantities.mbit(rate)
        devices = (
            DeviceDescription(f"device{number}", cores, None, rate_mbit)
            for number, cores in enumerate(shares)
        )
        return cls("shares", tuple(devices))

    def at_rate(self, rate: str) -> Household:
        """The same devices on cables of that rate. Raises HouseholdError: it is none."""
        try:
            rate_mbit = quantities.mbit(rate)
        except ValueError as error:
            raise HouseholdError(f"rate: {error}") from error
        return replace(self, devices=tuple(replace(d, rate_mbit=rate_mbit) for d in self.devices))


def names() -> list[str]:
    """The households that come with this package."""
    return sorted(file.stem for file in FOLDER.glob("*.toml"))


def check_name(name: str) -> None:
    """Raises HouseholdError where a device cannot be called so."""
    if not _NAME.fullmatch(name):
        raise HouseholdError(f"name: {name!r} is not 1 to 32 letters, digits, - and _")


def check_cores(cores: float) -> None:
    """Raises HouseholdError where a device cannot have this share of a core."""
    if not LEAST_CORES <= cores <= 1:
        raise HouseholdError(f"cores: {cores} is not a share of one core, {LEAST_CORES} to 1")


def check_rate(mbit: float | None) -> None:
    """Raises HouseholdError where a cable cannot have this rate; None is no limit."""
    if mbit is not None and not LEAST_MBIT <= mbit <= MOST_MBIT:
        raise HouseholdError(f"rate: {mbit:g}mbit is not a rate of 1kbit to 100gbit")


def _file(name_or_path: str | Path) -> Path:
    own = FOLDER / f"{name_or_path}.toml"
    if str(name_or_path) in names():
        return own
    path = Path(name_or_path)
    if not path.is_file():
        raise HouseholdError(
            f"{name_or_path!s}: no such file, and no household of that name; "
            f"there are {', '.join(names())}"
        )
    return path


def _devices(
    defaults: Mapping[str, object], table: Mapping[str, object]
) -> list[DeviceDescription]:
    """The devices of one `[[device]]`. Raises HouseholdError naming the field."""
    _only(table, _FIELDS)
    fields = {**defaults, **table}
    name, count = _text(fields, "name"), _count(fields)
    names = [name] if count is None else [f"{name}-{index + 1}" for index in range(count)]
    cores = _cores(fields)
    memory_bytes = _quantity(fields, "memory", quantities.size_bytes)
    rate_mbit = _quantity(fields, "rate", quantities.mbit)
    return [DeviceDescription(own, cores, memory_bytes, rate_mbit) for own in names]


def _only(table: Mapping[str, object], known: set[str]) -> None:
    for field in table:
        if field not in known:
            raise HouseholdError(
                f"{field}: no such field here; there are {', '.join(sorted(known))}"
            )


def _text(fields: Mapping[str, object], field: str) -> str:
    value = fields.get(field)
    if not isinstance(value, str):
        raise HouseholdError(f"{field}: text in quotes is needed, not {_said(value)}")
    return value


def _count(fields: Mapping[str, object]) -> int | None:
    value = fields.get("count")
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or not 0 < value <= MAX_DEVICES:
        raise HouseholdError(f"count: 1 to {MAX_DEVICES} is needed, not {_said(value)}")
    return value


def _cores(fields: Mapping[str, object]) -> float:
    value = fields.get("cores")
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise HouseholdError(f"cores: a share of one core is needed, not {_said(value)}")
    return float(value)


def _quantity(
    fields: Mapping[str, object], field: str, read: Callable[[str], _Value]
) -> _Value | None:
    if field not in fields:
        return None
    text = _text(fields, field)
    try:
        return read(text)
    except ValueError as error:
        raise HouseholdError(f"{field}: {error}") from error


def _said(value: object) -> str:
    return "nothing" if value is None else repr(value)
