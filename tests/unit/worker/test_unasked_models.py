"""A model of others that ends its process is an answer, said to its sender and to this person."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest

from p2ptrain.errors import ProtocolError, TrainingError
from p2ptrain.net import cbor
from p2ptrain.net.forms import write_form
from p2ptrain.plan.types.profile import Unit
from p2ptrain.plan.types.unit_times import TimeTable, UnitTimes
from p2ptrain.process.box import Box, BoxTask, Child, Ended, How
from p2ptrain.process.compute_thread import ComputeThread
from p2ptrain.profiling.boxed_measure import ProfileResult
from p2ptrain.profiling.measure_units import UnitMeasurements
from p2ptrain.profiling.profile_cache import ProfileCache
from p2ptrain.profiling.unit_chain import WHOLE
from p2ptrain.worker.unasked_models import FetchedModel, UnaskedConfig, UnaskedWork

MIB = 1 << 20
MEASUREMENTS = UnitMeasurements(
    input_bytes=32,
    target_bytes=8,
    units=(Unit("layers.0", 12, 16, 20, 100), Unit("layers.1", 8, 0, 4, 50)),
    times=TimeTable(
        (1, 4),
        (
            UnitTimes((0.1, 0.2), (0.3, 0.4), (0.0, 0.1)),
            UnitTimes((0.2, 0.3), (0.4, 0.5), (0.1, 0.1)),
        ),
    ),
    wall_by_cpu=1.5,
    cold=(4,),
    faster=(1,),
)
ANSWER = cbor.dumps(write_form(ProfileResult(MEASUREMENTS)))


class NoNursery:
    pid = None

    async def child(self) -> Child:
        raise NotImplementedError

    def close(self) -> None:
        """Nothing is there."""


@dataclass
class Scripted(Box):
    """Answers as it was asked to; the clock goes on by `seconds` with each question."""

    answers: list[bytes | Ended]
    seconds: float = 1.0
    asked: list[BoxTask] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__(NoNursery())
        self.now = 0.0

    async def ask(self, question: BoxTask) -> bytes:
        self.asked.append(question)
        self.now += self.seconds
        answer = self.answers.pop(0)
        if isinstance(answer, Ended):
            raise answer
        return answer


@asynccontextmanager
async def work(
    box: Scripted, warn: Callable[[str, str], None] = lambda _source, _why: None
) -> AsyncIterator[UnaskedWork]:
    compute = ComputeThread()
    yield UnaskedWork(box, compute, ProfileCache(None), warn, UnaskedConfig(), now=lambda: box.now)
    await compute.close()


def model(digest: str = "d1", source: str = "evil") -> FetchedModel:
    return FetchedModel(digest, b"a model", source)


async def measure(unasked: UnaskedWork, asked: FetchedModel) -> object:
    return await unasked.measure(asked, [1, 4], 300 * MIB, largest_second=False)


def test_measurements_pass_the_box_unchanged() -> None:
    assert ProfileResult.from_bytes(ANSWER).found == MEASUREMENTS


@pytest.mark.parametrize(
    "change",
    [
        {"units": ()},
        {"times": ()},
        {"wall_by_cpu": float("nan")},
        {"cold": (8,)},
        {"faster": (2,)},
        {"input_bytes": -1},
        {"faster": "1"},
    ],
)
def test_what_no_measurement_can_be_is_refused(change: dict[str, object]) -> None:
    content = cbor.loads(ANSWER, len(ANSWER))
    content["found"] |= change
    with pytest.raises(ProtocolError):
        ProfileResult.from_bytes(cbor.dumps(content))


async def test_a_profile_from_the_box_has_what_this_device_spends_beside() -> None:
    async with work(Scripted([ANSWER])) as unasked:
        measured = await measure(unasked, model())
    assert isinstance(measured, dict)
    assert measured["times"]["4"]["forward"] == [0.2, 0.3]
    assert measured["overheads"]["message_seconds"] > 0


@pytest.mark.parametrize(
    ("ended", "text"),
    [
        (Ended(How.CRASH, 7, "SIGSEGV"), "ends the process that runs it in layer 7 (SIGSEGV)"),
        (Ended(How.MEMORY, 2, ""), "takes more than 315 MB of memory in layer 2"),
        (Ended(How.TIME, WHOLE, ""), "computes for more than 35 s in all its layers together"),
        (Ended(How.CRASH, None, "SIGABRT"), "before its first layer (SIGABRT)"),
    ],
)
async def test_how_it_ended_is_said_to_both(ended: Ended, text: str) -> None:
    said: list[tuple[str, str]] = []
    async with work(Scripted([ended]), lambda *words: said.append(words)) as unasked:
        with pytest.raises(TrainingError) as raised:
            await measure(unasked, model())
    ((source, why),) = said
    assert source == "evil"
    assert text in why
    assert text in str(raised.value)


async def test_a_model_that_crashed_is_not_run_again_whichever_device_asks() -> None:
    box = Scripted([Ended(How.CRASH, 7, "SIGSEGV"), ANSWER])
    async with work(box) as unasked:
        with pytest.raises(TrainingError):
            await measure(unasked, model())
        for source in ("evil", "other"):
            with pytest.raises(TrainingError, match="in layer 7"):
                await measure(unasked, model(source=source))
        assert len(box.asked) == 1
        await measure(unasked, model("d2"))


async def test_one_that_lacked_memory_is_tried_again_after_a_while() -> None:
    box = Scripted([Ended(How.MEMORY, 7, ""), ANSWER])
    async with work(box) as unasked:
        with pytest.raises(TrainingError):
            await measure(unasked, model())
        with pytest.raises(TrainingError, match="315 MB"):
            await measure(unasked, model())
        box.now += UnaskedConfig().short_seconds
        await measure(unasked, model())


async def test_a_model_that_fails_as_in_plain_torch_is_no_crash() -> None:
    said: list[tuple[str, str]] = []
    fails = cbor.dumps(write_form(ProfileResult(fails="the model fails in unit 0: odd shapes")))
    box = Scripted([fails, ANSWER])
    async with work(box, lambda *words: said.append(words)) as unasked:
        with pytest.raises(TrainingError, match="odd shapes"):
            await measure(unasked, model())
        await measure(unasked, model())
    assert not said
