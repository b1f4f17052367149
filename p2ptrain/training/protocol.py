"""The messages of a training job: kinds, who sends them to whom, and their checked fields.

    holder                coordinator             devices of the plan
      |-- epoch.inventory --------------------------->|   (stops, says what it has)
      |-- links.measure, profile.measure ------------>|   (asks the holder for model.fetch)
      |-- plan.ask ------->|-- plan.search ---------->|   (the fastest, where that pays)
      |-- plan.works ----->|                          |   (a sign of work? none: passed over)
      |<---- the plan -----|                          |
      |-- epoch.prepare ----------------------------->|   (fetches its weights: state.read)
      |<----------------------------------- ready ----|
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
      |-- train.arrived ----------------------------->|   what has come in a round that failed?
      |-- train.standing ---------------------------->|   nothing moves: what do you wait for?
      |-- job.alive --------------------------------->|   how far are you? (each second of a call)
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

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Self, TypeAlias

from p2ptrain.errors import ProtocolError
from p2ptrain.net.forms import By, Count, Flat, Id, Key, Length, Range, Text
from p2ptrain.net.read_form import one_line, read_form
from p2ptrain.net.write_form import write_form
from p2ptrain.training.recovery.version import Version, VersionRow
from p2ptrain.training.rounds import Round

INVENTORY = "epoch.inventory"
PLAN = "plan.ask"
PLAN_END = "plan.ask.end"
WORKS = "plan.works"
PASSED_OVER = "coordinator.passed_over"
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
ARRIVED = "train.arrived"
REPLICA_OFFER = "replica.offer"
REPLICA_KEPT = "replica.kept"
REPLICA_KEEPER = "replica.keeper"
VERSIONS_KEEP = "versions.keep"
FIND = "job.find"
OVER = "job.over"
ALIVE = "job.alive"
STANDING = "train.standing"
CONSIDER = "job.consider"
CONSIDER_END = "job.consider.end"
FACTS = "job.facts"
LEAVING = "job.leaving"
LOG_SEND = "log.send"
FEED_SEND = "feed.send"
END = "job.end"

MODEL_LIMIT_BYTES = 64 << 20
"""Most bytes a model's description may take; a 12-layer GPT-2 takes about 100 kB."""
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


def optional(fields: Mapping[str, Any], key: str) -> int | None:
    """The same, or None where there is none."""
    return None if fields.get(key) is None else integer(fields, key)


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
    return one_line(value) or "?"


def ids(fields: Mapping[str, Any], key: str) -> frozenset[str]:
    """A list of at most DEVICES_LIMIT devices' ids, or ProtocolError."""
    value = fields.get(key)
    if not isinstance(value, list) or len(value) > DEVICES_LIMIT:
        raise ProtocolError(f"field {key!r} is not a list of at most {DEVICES_LIMIT} ids")
    return frozenset(text({"id": device}, "id", 64) for device in value)


def number(fields: Mapping[str, Any], key: str) -> float:
    """A float (infinities and NaN included), or ProtocolError."""
    value = fields.get(key)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ProtocolError(f"field {key!r} is not a number")
    return float(value)


class FrameFields:
    """A form whose fields stand in a frame's header, beside those of others."""

    __slots__ = ()

    def fields(self) -> dict[str, Any]:
        """As frame fields."""
        return write_form(self)

    @classmethod
    def read(cls, fields: Mapping[str, Any]) -> Self:
        """Check and read them. Raises ProtocolError."""
        return read_form(cls, fields, cls.__name__, extra=True)


@dataclass(frozen=True, slots=True)
class EpochKey(FrameFields):
    """One plan in force for one job; `epoch` only ever rises. Every training frame carries it."""

    job: Id
    epoch: Count


@dataclass(frozen=True, slots=True)
class PieceKey(FrameFields):
    """One micro-batch of one round."""

    round: Count
    micro_batch: Count


LEFT_OUT = (0.0, "left out")
"""Coefficient of an update that counts and changes nothing."""
AS_IT_IS = (1.0, "as it is")
"""Of one that is made of the gradients as they are, where some are left out."""


def _floating(value: object) -> str:
    known = ("float16", "bfloat16", "float32", "float64", LEFT_OUT[1], AS_IT_IS[1])
    if not isinstance(value, str) or value not in known:
        raise ValueError("gradients are clipped by a floating-point number")
    return value


Coefficient: TypeAlias = tuple[
    Annotated[float, Range(-math.inf, math.inf, finite=False)], Annotated[str, By(_floating, str)]
]
"""What gradients are multiplied with so that their norm is clipped, and the name of its dtype.

Of a job that leaves out updates that are not finite also: LEFT_OUT or AS_IT_IS.
"""


@dataclass(frozen=True, slots=True)
class Commit(FrameFields):
    """An update counts, because every device was ready for it.

    Attributes:
        round: index of the round.
        step: updates applied before this one.
        coefficient: where the job clips or leaves out updates; else None.
    """

    round: Count
    step: Count
    coefficient: Coefficient | None = None


@dataclass(frozen=True, slots=True)
class RoundOrder(FrameFields):
    """What the holder tells every stage before a round.

    Attributes:
        round: the round's shape.
        lr_factor: what the schedule gives for this update; 1.0 without one.
        keep: keep a copy of the state after this round's update.
        offer: with it: other devices shall have a copy too; not while they still read an older one.
        stay: with it, the versions that stay; older ones that are not named go before it is made.
        outputs: eval only: send the model's outputs to the holder (metrics need them).
        clip: what the norm of all gradients is clipped to; 0.0 = it is not.
        leaves_out: an update that is not finite is left out, and the job goes on.
    """

    round: Annotated[Round, Flat()]
    lr_factor: float = 1.0
    keep: bool = False
    outputs: bool = False
    stay: Annotated[tuple[VersionRow, ...], Length(VERSIONS_LIMIT)] = ()
    offer: bool = True
    clip: float = 0.0
    leaves_out: bool = False


@dataclass(frozen=True, slots=True)
class NoMoreRounds(FrameFields):
    """So many rounds are ordered in this epoch, and none after them; a `train.round` too.

    Without a barrier a stage cannot know whether another forward will come before a backward. Of
    the same kind as orders, so that none of them overtakes it.
    """

    rounds: Annotated[Count, Key("end")]

    @staticmethod
    def among(fields: Mapping[str, Any]) -> NoMoreRounds | None:
        """Check and read them; None where a round is ordered."""
        return NoMoreRounds.read(fields) if "end" in fields else None


def check_units(first: int, end: int) -> None:
    """ValueError where [first, end) is empty."""
    if not first < end:
        raise ValueError(f"layers {first} to {end} are none")


@dataclass(frozen=True, slots=True)
class ReplicaOffer(FrameFields):
    """A device's copy of units [first, end), which the receiver is to keep too.

    Attributes:
        nbytes: of all tensors.
    """

    version: Annotated[Version, Flat()]
    first: Count
    end: Count
    nbytes: Annotated[Count, Key("bytes")]

    def __post_init__(self) -> None:
        check_units(self.first, self.end)


@dataclass(frozen=True, slots=True)
class ReplicaKept(FrameFields):
    """What has become of an offer.

    Attributes:
        failed: why the copy is not kept; None = it is, whole.
    """

    version: Annotated[Version, Flat()]
    first: Count
    end: Count
    failed: Annotated[str, Text(REASON_LIMIT, clean=True)] | None = None

    def __post_init__(self) -> None:
        check_units(self.first, self.end)


@dataclass(frozen=True, slots=True)
class ReplicaKeeper(FrameFields):
    """Copies of units [first, end), from `version` on, go to `keeper`, an id."""

    version: Annotated[Version, Flat()]
    first: Count
    end: Count
    keeper: Id

    def __post_init__(self) -> None:
        check_units(self.first, self.end)


@dataclass(frozen=True, slots=True)
class VersionsKeep(FrameFields):
    """Which versions of a job are kept, the stable one first; older ones go.

    What a stage is made anew from is needed from the first one on.
    """

    job: Id
    versions: Annotated[tuple[VersionRow, ...], Length(VERSIONS_LIMIT)]
