"""What a device has of a job, as it tells a coordinator that takes stock."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from p2ptrain.errors import ProtocolError
from p2ptrain.net import cbor
from p2ptrain.training.protocol import BLOB_LIMIT_BYTES, integer, number, text
from p2ptrain.training.recovery.version import Version

HOLDINGS_LIMIT = 1024
"""Most holdings of one device: kinds x kept versions x ranges of units, far below."""


class Kind(StrEnum):
    """Why a device has it."""

    LIVE = "live"
    """It trains these units."""
    KEPT = "kept"
    """Its copy of its own stage at a version to go back to."""
    REPLICA = "replica"
    """Another device's copy, whole and acknowledged."""
    FETCHED = "fetched"
    """Fetched for an epoch that has not begun."""
    INITIAL = "initial"
    """The weights that the job began with, in the holder's memory."""
    GLOBAL = "global"
    """All units at one version, at the holder. Nothing makes one yet."""


@dataclass(frozen=True, slots=True)
class Holding:
    """Units [first, end) at one version.

    Attributes:
        ready: LIVE only: the version that applying the gradients gives, which are complete and
            not applied; None = there are none.
        coefficient: LIVE only: what clipping multiplied the last update's gradients with, and its
            dtype; None where the job does not clip. A device that applies later needs it.
    """

    first: int
    end: int
    version: Version
    kind: Kind
    ready: Version | None = None
    coefficient: tuple[float, str] | None = None

    def has(self, unit: int) -> bool:
        """Whether `unit` is one of these."""
        return self.first <= unit < self.end


@dataclass(frozen=True, slots=True)
class Logged:
    """A device still has all that it sent and was told in `epoch`, from step `since` on."""

    epoch: int
    since: int


@dataclass(frozen=True, slots=True)
class Inventory:
    """A device's answer; it has stopped working on the job before it gives it.

    Attributes:
        device: its id.
        epoch: newest that it prepared, ran or was asked about.
        term: highest of a coordinator that commanded it.
        holdings: what it has; nothing torn, nothing half arrived.
        linked: ids of the peers that it has a link to.
        budget_bytes: what it offered the job when it was idle; less where others have taken of it.
        taken_bytes: what the job takes there now.
        speeds: (peer, bytes/s, latency in seconds) as it measured them, sending.
        slowdown: its measured unit times over those profiled; 1.0 where not known.
        measured: its cached profile, None where there is none.
        logged: what of its last epoch could be done again with; None = nothing.
    """

    device: str
    epoch: int = 0
    term: int = 0
    holdings: tuple[Holding, ...] = ()
    linked: frozenset[str] = frozenset()
    budget_bytes: int = 0
    taken_bytes: int = 0
    speeds: tuple[tuple[str, float, float], ...] = ()
    slowdown: float = 1.0
    measured: Mapping[str, Any] | None = field(default=None, hash=False)
    logged: Logged | None = None

    def to_bytes(self) -> bytes:
        """Strict CBOR."""
        return cbor.dumps(
            {
                "device": self.device,
                "epoch": self.epoch,
                "term": self.term,
                "holdings": [_holding_fields(holding) for holding in self.holdings],
                "linked": sorted(self.linked),
                "budget_bytes": self.budget_bytes,
                "taken_bytes": self.taken_bytes,
                "speeds": [list(speed) for speed in self.speeds],
                "slowdown": self.slowdown,
                "measured": None if self.measured is None else dict(self.measured),
                "logged": None if self.logged is None else [self.logged.epoch, self.logged.since],
            }
        )

    @staticmethod
    def from_bytes(data: bytes | memoryview) -> Inventory:
        """Check and read. Raises ProtocolError."""
        fields = cbor.loads(bytes(data), BLOB_LIMIT_BYTES)
        if not isinstance(fields, dict):
            raise ProtocolError("an inventory is a map")
        measured = fields.get("measured")
        if measured is not None and not isinstance(measured, dict):
            raise ProtocolError("a measured profile is a map")
        slowdown = number(fields, "slowdown")
        if not 0.0 < slowdown < float("inf"):
            raise ProtocolError("a slowdown is a factor above 0")
        return Inventory(
            device=text(fields, "device", 64),
            epoch=integer(fields, "epoch"),
            term=integer(fields, "term"),
            holdings=tuple(_read_holding(entry) for entry in _entries(fields, "holdings")),
            linked=frozenset(_read_ids(_entries(fields, "linked"))),
            budget_bytes=integer(fields, "budget_bytes"),
            taken_bytes=integer(fields, "taken_bytes"),
            speeds=tuple(_read_speed(entry) for entry in _entries(fields, "speeds")),
            slowdown=slowdown,
            measured=measured,
            logged=_read_logged(fields.get("logged")),
        )


def version_fields(version: Version) -> list[int]:
    """For CBOR and JSON."""
    return [version.step, version.computed]


def read_version(value: object) -> Version:
    """Check and read. Raises ProtocolError."""
    match value:
        case [int(step), int(computed)] if min(step, computed) >= 0:
            return Version(step, computed)
        case _:
            raise ProtocolError("a version is a step and the epoch that computed it")


def _holding_fields(holding: Holding) -> dict[str, Any]:
    return {
        "units": [holding.first, holding.end],
        "version": version_fields(holding.version),
        "kind": holding.kind.value,
        "ready": None if holding.ready is None else version_fields(holding.ready),
        "coefficient": None if holding.coefficient is None else list(holding.coefficient),
    }


def _read_holding(entry: object) -> Holding:
    match entry:
        case {
            "units": [int(first), int(end)],
            "version": version,
            "kind": str(kind),
            "ready": ready,
            "coefficient": coefficient,
        } if 0 <= first < end and kind in set(Kind):
            return Holding(
                first,
                end,
                read_version(version),
                Kind(kind),
                None if ready is None else read_version(ready),
                None if coefficient is None else read_coefficient(coefficient),
            )
        case _:
            raise ProtocolError("a holding has units, version, kind, ready and coefficient")


def _read_logged(value: object) -> Logged | None:
    match value:
        case None:
            return None
        case [int(epoch), int(since)] if min(epoch, since) >= 0:
            return Logged(epoch, since)
    raise ProtocolError("what was logged is an epoch and a step")


def read_coefficient(value: object) -> tuple[float, str]:
    """Check and read. Raises ProtocolError."""
    match value:
        case [float(coefficient), str(dtype)] if len(dtype) <= 32:
            return coefficient, dtype
        case _:
            raise ProtocolError("a clipping coefficient is a number and its dtype")


def _entries(fields: Mapping[str, Any], key: str) -> list[Any]:
    value = fields.get(key)
    if not isinstance(value, list) or len(value) > HOLDINGS_LIMIT:
        raise ProtocolError(f"field {key!r} is not a list of at most {HOLDINGS_LIMIT}")
    return value


def _read_ids(entries: list[Any]) -> list[str]:
    if not all(isinstance(entry, str) and len(entry) <= 64 for entry in entries):
        raise ProtocolError("linked devices are ids")
    return entries


def _read_speed(entry: object) -> tuple[str, float, float]:
    match entry:
        case [str(peer), float(bytes_per_s), float(seconds)] if len(peer) <= 64:
            if 0.0 < bytes_per_s < float("inf") and 0.0 <= seconds < float("inf"):
                return peer, bytes_per_s, seconds
    raise ProtocolError("a speed is a peer, bytes/s and seconds")
