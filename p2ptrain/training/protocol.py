"""The messages of a training job: kinds, who sends them to whom, and their checked fields.

    holder                coordinator             devices of the plan
      |-- epoch.change --->|                          |
      |                    |-- epoch.inventory ------>|   (stops, says what it has)
      |                    |-- profile.measure ------>|   (asks the holder for model.fetch)
      |                    |-- links.measure -------->|
      |                    |-- plan.search ---------->|   (the fastest, where that pays)
      |                    |-- epoch.prepare -------->|   (fetches its weights: state.read)
      |<---- the plan -----|<------- ready -----------|
      |-- epoch.begin ------------------------------->|   to all members: others have no part
      |
      |-- train.round ------------------------------->|   what comes next, to every stage; or that
      |                                               |   nothing does (asynchronous training)
      |-- train.values (inputs, targets) ------------>|   to the first and the last stage
      |        train.values: activations p -> p+1, gradients p+1 -> p, sums of tied gradients
      |<- train.started ------------------------------|   credit: one more piece may come
      |<- train.values (outputs) / train.norms -------|   norms where the job clips by global norm
      |<- train.done ---------------------------------|   gradients complete, or all evaluated
      |-- train.commit ------------------------------>|   all are done: the update counts, apply it
      |<- train.failed -- train.diagnose ------------>|
      |-- job.alive --------------------------------->|   where nothing has come for long
      |-- job.find ---------------------------------->|   to all members: what do you keep for me?
      |        replica.offer: a stage's device -> the one that keeps its copies (reads: state.read)
      |<- replica.kept -------------------------------|   whole there, or why it is not
      |-- replica.keeper ---------------------------->|   offer it to another device instead
      |-- versions.keep ----------------------------->|   to all: what is older may go
      |-- job.end ----------------------------------->|

Every frame carries (job, epoch): an epoch is one plan in force. Frames of another job or epoch are
dropped and counted, whoever sent them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from p2ptrain.errors import ProtocolError
from p2ptrain.mesh.text import printable
from p2ptrain.model.wire_format import WireFormat
from p2ptrain.training.recovery.version import Version
from p2ptrain.training.rounds import Mode, Round

CHANGE = "epoch.change"
INVENTORY = "epoch.inventory"
SURVEY_LINKS = "plan.survey"
SEARCH_PLAN = "plan.search"
SEARCH_END = "plan.search.end"
MEASURE_PROFILE = "profile.measure"
MEASURED = "profile.measured"
MEASURE_LINKS = "links.measure"
FETCH_MODEL = "model.fetch"
PREPARE = "epoch.prepare"
BEGIN = "epoch.begin"
STATE_MANIFEST = "state.manifest"
STATE_READ = "state.read"
ROUND = "train.round"
VALUES = "train.values"
STARTED = "train.started"
NORMS = "train.norms"
DONE = "train.done"
COMMIT = "train.commit"
SETTLED = "train.settled"
FAILED = "train.failed"
DIAGNOSE = "train.diagnose"
REPLICA_OFFER = "replica.offer"
REPLICA_KEPT = "replica.kept"
REPLICA_KEEPER = "replica.keeper"
VERSIONS_KEEP = "versions.keep"
FIND = "job.find"
OVER = "job.over"
ALIVE = "job.alive"
CONSIDER = "job.consider"
CONSIDER_END = "job.consider.end"
FACTS = "job.facts"
LEAVING = "job.leaving"
LOG_SEND = "log.send"
FEED_SEND = "feed.send"
END = "job.end"

MODEL_LIMIT_BYTES = 64 << 20
"""Most bytes a model's description may take; a 12-layer GPT-2 takes about 100 kB."""
BLOB_LIMIT_BYTES = 16 << 20
"""Most bytes of a plan, a profile or a manifest."""
VERSIONS_LIMIT = 8
"""Most versions named at once: those to go back to, and those that a checkpoint is written of."""
DEVICES_LIMIT = 4096
"""Most entries of a list of devices or ranges, far above any household's."""
REASON_LIMIT = 1024
"""Most characters of why something was not done."""


def integer(fields: Mapping[str, Any], key: str, least: int = 0, most: int = 2**53) -> int:
    """A whole number in [least, most], or ProtocolError."""
    value = fields.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise ProtocolError(f"field {key!r} is not a whole number from {least} to {most}")
    return value


def text(fields: Mapping[str, Any], key: str, limit: int = 256) -> str:
    """A string of at most `limit` characters, or ProtocolError. For people: `wording`."""
    value = fields.get(key)
    if not isinstance(value, str) or len(value) > limit:
        raise ProtocolError(f"field {key!r} is not a text of at most {limit} characters")
    return value


def wording(fields: Mapping[str, Any], key: str, limit: int) -> str:
    """The same for people to read, as `shown` makes it."""
    return shown(text(fields, key, limit))


def shown(value: str) -> str:
    """A peer's text as one line, without what would move a terminal's cursor or hide the rest."""
    return value if value.isprintable() else printable(" ".join(value.split()), len(value)) or "?"


def ids(fields: Mapping[str, Any], key: str) -> frozenset[str]:
    """A list of at most DEVICES_LIMIT devices' ids, or ProtocolError."""
    value = fields.get(key)
    if not isinstance(value, list) or len(value) > DEVICES_LIMIT:
        raise ProtocolError(f"field {key!r} is not a list of at most {DEVICES_LIMIT} ids")
    return frozenset(text({"id": device}, "id", 64) for device in value)


def wire_format(fields: Mapping[str, Any]) -> WireFormat:
    """The field "wire", or ProtocolError."""
    value = fields.get("wire")
    if value not in set(WireFormat):
        raise ProtocolError(f"unknown wire format {value!r}: use the same p2ptrain version")
    return WireFormat(value)


def number(fields: Mapping[str, Any], key: str) -> float:
    """A float (infinities and NaN included), or ProtocolError."""
    value = fields.get(key)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ProtocolError(f"field {key!r} is not a number")
    return float(value)


@dataclass(frozen=True, slots=True)
class EpochKey:
    """One plan in force for one job; `epoch` only ever rises."""

    job: str
    epoch: int

    def fields(self) -> dict[str, Any]:
        """The two fields every training frame carries."""
        return {"job": self.job, "epoch": self.epoch}

    @staticmethod
    def read(fields: Mapping[str, Any]) -> EpochKey:
        """Check and read them."""
        return EpochKey(text(fields, "job", 64), integer(fields, "epoch"))


@dataclass(frozen=True, slots=True)
class PieceKey:
    """One micro-batch of one round."""

    round: int
    micro_batch: int

    def fields(self) -> dict[str, Any]:
        """As frame fields."""
        return {"round": self.round, "micro_batch": self.micro_batch}

    @staticmethod
    def read(fields: Mapping[str, Any]) -> PieceKey:
        """Check and read them."""
        return PieceKey(integer(fields, "round"), integer(fields, "micro_batch"))


Coefficient: TypeAlias = tuple[float, str]
"""What gradients are multiplied with so that their norm is clipped, and the name of its dtype."""


@dataclass(frozen=True, slots=True)
class Commit:
    """An update counts, because every device was ready for it.

    Attributes:
        round: index of the round.
        step: updates applied before this one.
        coefficient: where the job clips; else None.
    """

    round: int
    step: int
    coefficient: Coefficient | None = None

    def fields(self) -> dict[str, Any]:
        """As frame fields."""
        value, dtype = self.coefficient or (None, "")
        return {"round": self.round, "step": self.step, "coefficient": value, "dtype": dtype}

    @staticmethod
    def read(fields: Mapping[str, Any]) -> Commit:
        """Check and read them."""
        coefficient = None
        if fields.get("coefficient") is not None:
            dtype = text(fields, "dtype", 16)
            if dtype not in ("float16", "bfloat16", "float32", "float64"):
                raise ProtocolError("a clipping coefficient is a floating-point number")
            coefficient = (number(fields, "coefficient"), dtype)
        return Commit(integer(fields, "round"), integer(fields, "step"), coefficient)


@dataclass(frozen=True, slots=True)
class RoundOrder:
    """What the holder tells every stage before a round.

    Attributes:
        round: the round's shape.
        lr_factor: what the schedule gives for this update; 1.0 without one.
        keep: keep a copy of the state after this round's update.
        offer: with it: other devices shall have a copy too; not while they still read an older one.
        stay: with it, the versions that stay; older ones that are not named go before it is made.
        outputs: eval only: send the model's outputs to the holder (metrics need them).
    """

    round: Round
    lr_factor: float = 1.0
    keep: bool = False
    outputs: bool = False
    stay: tuple[Version, ...] = ()
    offer: bool = True

    def fields(self) -> dict[str, Any]:
        """As frame fields."""
        return {
            "round": self.round.index,
            "mode": self.round.mode.value,
            "step": self.round.step,
            "samples": self.round.samples,
            "size": self.round.micro_batch,
            "number": self.round.first,
            "lr_factor": self.lr_factor,
            "keep": self.keep,
            "outputs": self.outputs,
            "stay": _version_list(self.stay),
            "offer": self.offer,
        }

    @staticmethod
    def read(fields: Mapping[str, Any]) -> RoundOrder:
        """Check and read them."""
        mode = text(fields, "mode")
        if mode not in set(Mode):
            raise ProtocolError(f"unknown kind of round {mode!r}")
        shape = Round(
            integer(fields, "round"),
            Mode(mode),
            integer(fields, "step"),
            integer(fields, "samples", 1),
            integer(fields, "size", 1),
            integer(fields, "number"),
        )
        return RoundOrder(
            shape,
            number(fields, "lr_factor"),
            bool(fields.get("keep")),
            bool(fields.get("outputs")),
            _read_versions(fields, "stay"),
            bool(fields.get("offer")),
        )


@dataclass(frozen=True, slots=True)
class NoMoreRounds:
    """So many rounds are ordered in this epoch, and none after them; a `train.round` too.

    Without a barrier a stage cannot know whether another forward will come before a backward. Of
    the same kind as orders, so that none of them overtakes it.
    """

    rounds: int

    def fields(self) -> dict[str, Any]:
        """As frame fields, beside the epoch's."""
        return {"end": self.rounds}

    @staticmethod
    def read(fields: Mapping[str, Any]) -> NoMoreRounds | None:
        """Check and read them; None where a round is ordered."""
        return NoMoreRounds(integer(fields, "end")) if "end" in fields else None


@dataclass(frozen=True, slots=True)
class ReplicaOffer:
    """A device's copy of units [first, end), which the receiver is to keep too.

    Attributes:
        nbytes: of all tensors.
    """

    version: Version
    first: int
    end: int
    nbytes: int

    def fields(self) -> dict[str, Any]:
        """As frame fields, beside the epoch's."""
        return {**_copy_fields(self.version, self.first, self.end), "bytes": self.nbytes}

    @staticmethod
    def read(fields: Mapping[str, Any]) -> ReplicaOffer:
        """Check and read them."""
        return ReplicaOffer(*_read_copy(fields), integer(fields, "bytes"))


@dataclass(frozen=True, slots=True)
class ReplicaKept:
    """What has become of an offer.

    Attributes:
        failed: why the copy is not kept; None = it is, whole.
    """

    version: Version
    first: int
    end: int
    failed: str | None = None

    def fields(self) -> dict[str, Any]:
        """As frame fields, beside the epoch's."""
        fields = _copy_fields(self.version, self.first, self.end)
        return fields if self.failed is None else {**fields, "failed": self.failed[:REASON_LIMIT]}

    @staticmethod
    def read(fields: Mapping[str, Any]) -> ReplicaKept:
        """Check and read them."""
        failed = text(fields, "failed", REASON_LIMIT) if "failed" in fields else None
        return ReplicaKept(*_read_copy(fields), failed)


@dataclass(frozen=True, slots=True)
class ReplicaKeeper:
    """Copies of units [first, end), from `version` on, go to `keeper`, an id."""

    version: Version
    first: int
    end: int
    keeper: str

    def fields(self) -> dict[str, Any]:
        """As frame fields, beside the epoch's."""
        return {**_copy_fields(self.version, self.first, self.end), "keeper": self.keeper}

    @staticmethod
    def read(fields: Mapping[str, Any]) -> ReplicaKeeper:
        """Check and read them."""
        return ReplicaKeeper(*_read_copy(fields), text(fields, "keeper", 64))


@dataclass(frozen=True, slots=True)
class VersionsKeep:
    """Which versions of a job are kept, the stable one first; older ones go.

    What a stage is made anew from is needed from the first one on.
    """

    job: str
    versions: tuple[Version, ...]

    def fields(self) -> dict[str, Any]:
        """As frame fields."""
        return {"job": self.job, "versions": _version_list(self.versions)}

    @staticmethod
    def read(fields: Mapping[str, Any]) -> VersionsKeep:
        """Check and read them."""
        return VersionsKeep(text(fields, "job", 64), _read_versions(fields, "versions"))


def _copy_fields(version: Version, first: int, end: int) -> dict[str, Any]:
    return {"step": version.step, "computed": version.computed, "first": first, "end": end}


def _read_copy(fields: Mapping[str, Any]) -> tuple[Version, int, int]:
    version = Version(integer(fields, "step"), integer(fields, "computed"))
    first = integer(fields, "first")
    return version, first, integer(fields, "end", first + 1)


def _version_list(versions: Collection[Version]) -> list[list[int]]:
    return [[version.step, version.computed] for version in versions]


def _read_versions(fields: Mapping[str, Any], key: str) -> tuple[Version, ...]:
    named = fields.get(key)
    if not isinstance(named, list) or len(named) > VERSIONS_LIMIT:
        raise ProtocolError(f"field {key!r} is not a list of at most {VERSIONS_LIMIT}")
    return tuple(_read_version(one) for one in named)


def _read_version(value: object) -> Version:
    if not isinstance(value, list) or len(value) != 2:
        raise ProtocolError("a version is a step and the epoch that computed it")
    named = dict(zip(("step", "computed"), value, strict=True))
    return Version(integer(named, "step"), integer(named, "computed"))
