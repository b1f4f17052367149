"""What a child process measures of another device's model, so that the member survives it.

member:  ProfileRequest ──► box ──► measure(...)   in a fresh process, see `process/box.py`
         ProfileResult  ◄────────────┘             checked field by field, as from any peer
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Annotated, TypeVar

import structlog  # noqa: F401  # the first log would load it: no file may be read then
import torch
import torch.fx.experimental.symbolic_shapes  # torch loads it late: no file may be read then

from p2ptrain.errors import Error
from p2ptrain.model.graph.decoding import decode_model
from p2ptrain.model.stage.failures import OPERATORS_RAISE, failure_text
from p2ptrain.net import cbor
from p2ptrain.net.forms import Length, Text, write_form
from p2ptrain.net.read_form import read_form
from p2ptrain.process.memory_budget import is_out_of_memory
from p2ptrain.process.zygote import Mark
from p2ptrain.profiling.measure_units import UnitMeasurements, measure_units, work_on

MEASURE, WORK = f"{__name__}:measure", f"{__name__}:work"

ANSWER_LIMIT_BYTES = 4 << 20

_ENOUGH_FOR_ALL_THREADS = 1 << 20  # elements; torch divides no fewer than 32,768

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ProfileRequest:
    """What is measured, and how.

    Attributes:
        model: of `ModelDescription.to_bytes`.
        threads: that torch computes with.
    """

    model: Annotated[bytes, Length(1 << 30)]
    batch_sizes: tuple[int, ...]
    memory_bytes: int
    threads: int
    budget_seconds: float = 0.0
    most_seconds: float = 0.0
    enough_seconds: float = 0.0
    largest_second: bool = False

    def to_bytes(self) -> bytes:
        """For the child."""
        return cbor.dumps(write_form(self))

    @classmethod
    def from_bytes(cls, content: bytes) -> ProfileRequest:
        """In the child."""
        return read_form(cls, cbor.loads(content, len(content)), "question")


@dataclass(frozen=True, slots=True)
class ProfileResult:
    """What the child has found, or how the model fails in plain torch or is refused."""

    found: UnitMeasurements | None = None
    fails: Annotated[str, Text(1024, clean=True)] = ""

    def __post_init__(self) -> None:
        if (self.found is None) is (self.fails == ""):
            raise ValueError("no unit was measured")

    @classmethod
    def from_bytes(cls, answer: bytes) -> ProfileResult:
        """Raises ProtocolError: the child says what no measurement can be."""
        content = cbor.loads(answer, ANSWER_LIMIT_BYTES, items_limit=ANSWER_LIMIT_BYTES)
        return read_form(cls, content, "measurement")


def measure(content: bytes, mark: Mark) -> bytes:
    """`ProfileResult`, for a `ProfileRequest`. Raises MemoryError: it takes more than it may."""
    asked = ProfileRequest.from_bytes(content)
    return _as_the_member_computes(asked.threads, lambda: _measured(asked, mark))


def _measured(asked: ProfileRequest, mark: Mark) -> bytes:
    try:
        description = decode_model(asked.model)
        found = ProfileResult(
            measure_units(
                description,
                batch_sizes=asked.batch_sizes,
                memory_bytes=asked.memory_bytes,
                mark=mark,
                budget_seconds=asked.budget_seconds,
                most_seconds=asked.most_seconds,
                enough_seconds=asked.enough_seconds,
                largest_second=asked.largest_second,
            )
        )
    except Error as refused:
        found = ProfileResult(fails=str(refused)[:1024])
    except OPERATORS_RAISE as error:
        if is_out_of_memory(error):
            raise MemoryError from None
        found = ProfileResult(fails=failure_text(error)[:1024])
    return cbor.dumps(write_form(found))


def work(content: bytes, mark: Mark) -> bytes:
    """Run the units of a `ProfileRequest` with its one size, again and again; without an end."""
    asked = ProfileRequest.from_bytes(content)

    def run() -> bytes:
        description = decode_model(asked.model)
        for _ in work_on(description, asked.batch_sizes[0], asked.memory_bytes):
            pass
        return b""

    return _as_the_member_computes(asked.threads, run)


def _as_the_member_computes(threads: int, function: Callable[[], T]) -> T:
    """Run `function` as `ComputeThread` would, whose times are wanted.

    Not in the main thread, and after that has computed: OpenMP's threads then are more than there
    are processors, as in a member, and wait for each other asleep. Else they spin, and on a busy
    machine a unit seems to take several times as long.
    """
    torch.set_num_threads(threads)
    torch.ones(_ENOUGH_FOR_ALL_THREADS).add_(1)
    outcome: Future[T] = Future()

    def run() -> None:
        torch.set_num_threads(threads)
        torch.set_flush_denormal(True)
        try:
            outcome.set_result(function())
        except BaseException as error:  # the main thread raises it
            outcome.set_exception(error)

    threading.Thread(target=run, name="compute").start()
    return outcome.result()
