"""What a device offers a job: less than when it was idle, once others have taken of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from p2ptrain.devices.processor import HOST
from p2ptrain.errors import AcceleratorFailed, InternalError, OptionError, TrainingError
from p2ptrain.mesh.interface import LinkSpeed
from p2ptrain.messages.calls import read_part
from p2ptrain.messages.job_requests import ProfileAnswer, ProfileAsked
from p2ptrain.model.capture.capture import capture
from p2ptrain.net.message import Message
from p2ptrain.plan.types.memory_budgets import MemoryBudgets, MemoryShortage
from p2ptrain.process.box import Box, BoxTask
from p2ptrain.process.compute_thread import ComputeThread
from p2ptrain.process.host_process import MemoryCeiling
from p2ptrain.profiling.boxed_measure import ProfileRequest
from p2ptrain.profiling.boxed_measure import measure as measure_in_box
from p2ptrain.profiling.profile_cache import Measuring, ProfileCache
from p2ptrain.recovery.compute_kind import PROCESSOR, ComputeKind
from p2ptrain.worker import device_profile, job_memory
from p2ptrain.worker.device_profile import DeviceProfiler
from p2ptrain.worker.unasked_models import FetchedModel
from tests.support.memory_household import MemoryHousehold, MemoryMesh
from tests.support.twin_device import TwinDevice

MIB = 1 << 20
MODEL = "model"


class Machine:
    """Bytes that are free, and what this process takes of the rest."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.free, self.own = 2000 * MIB, 100 * MIB
        monkeypatch.setattr(job_memory, "available_memory_bytes", lambda: self.free)
        monkeypatch.setattr(job_memory, "usable_memory_bytes", lambda: self.free * 8 // 10)
        monkeypatch.setattr(job_memory, "anonymous_bytes", lambda: self.own)

    def takes(self, mib: int) -> None:
        """This process does."""
        self.own += mib * MIB
        self.free -= mib * MIB

    def others_take(self, mib: int) -> None:
        """Other processes do."""
        self.free -= mib * MIB


@asynccontextmanager
async def measured(
    memory_bytes: int | None = None,
    before: Callable[[], None] = lambda: None,
    ceiling: MemoryCeiling | None = None,
    compute: ComputeThread | None = None,
) -> AsyncIterator[DeviceProfiler]:
    """A device that has offered what it has for a model; `before` happens when it knows it."""
    async with MemoryHousehold(["a"]) as mesh:
        compute = compute or ComputeThread()
        measures = DeviceProfiler(mesh["a"], compute, ProfileCache(None), memory_bytes, ceiling)
        measures.known.know_own(cast(Any, SimpleNamespace(digest=MODEL)), most_samples=8)
        before()
        asked = {"job": "j", "digest": MODEL, "holder": mesh["a"].self_id, "batch_sizes": []}
        await measures.measure_profile(Message("measure", asked))
        yield measures
        await compute.close()


def short_of(measures: DeviceProfiler, needed_mib: int, *, engaged: bool) -> int | None:
    """MiB that there are, where that is too little."""
    short = measures.memory.short_of(MemoryBudgets(needed_mib * MIB), engaged=engaged)
    return None if short is None else short.has.compute_bytes // MIB


async def test_a_process_whose_default_type_is_another_offers_nothing() -> None:
    torch.set_default_dtype(torch.float64)
    try:
        with pytest.raises(OptionError, match="default type"):
            async with measured():
                pass
    finally:
        torch.set_default_dtype(torch.float32)


async def test_what_the_job_itself_takes_leaves_the_offer_as_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    machine = Machine(monkeypatch)
    async with measured() as measures:
        machine.takes(1500)
        machine.others_take(300)
        assert measures.facts(MODEL).memory.of_host == 1600 * MIB, (
            "a fifth had been left for others"
        )
        assert short_of(measures, 1600, engaged=True) is None
        assert short_of(measures, 1600, engaged=False) == 160


async def test_what_others_take_beyond_that_is_not_offered_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    machine = Machine(monkeypatch)
    async with measured() as measures:
        machine.takes(500)
        machine.others_take(1000)
        assert measures.facts(MODEL).memory.of_host == 800 * MIB
        assert short_of(measures, 1000, engaged=True) is None
        assert short_of(measures, 1001, engaged=True) == 800
        machine.others_take(-1500)
        assert measures.facts(MODEL).memory.of_host == 1600 * MIB, "no more than was offered"


@pytest.mark.parametrize("engaged", [False, True])
async def test_a_part_is_held_against_its_plan_and_what_was_here_without_the_job(
    monkeypatch: pytest.MonkeyPatch, *, engaged: bool
) -> None:
    machine = Machine(monkeypatch)
    planned: list[tuple[int, int]] = []
    ceiling = cast(MemoryCeiling, SimpleNamespace(plan=lambda *expected: planned.append(expected)))
    async with measured(ceiling=ceiling) as measures:
        before = machine.own
        machine.takes(500)
        measures.memory.expect(MemoryBudgets(700 * MIB), engaged=engaged)
        held = 500 * MIB if engaged else 0
        assert planned == [(700 * MIB, before + 500 * MIB - held)]


@pytest.mark.parametrize(("fixed_mib", "offered_mib"), [(600, 600), (1200, 800)])
async def test_memory_that_was_set_stays_an_upper_bound(
    monkeypatch: pytest.MonkeyPatch, fixed_mib: int, offered_mib: int
) -> None:
    machine = Machine(monkeypatch)
    async with measured(fixed_mib * MIB) as measures:
        assert measures.facts(MODEL).memory.of_host == fixed_mib * MIB
        machine.takes(500)
        machine.others_take(1000)
        assert measures.facts(MODEL).memory.of_host == offered_mib * MIB
        assert measures.memory.whole_budgets().of_host == offered_mib * MIB
        machine.others_take(-3000)
        assert measures.memory.whole_budgets().of_host == fixed_mib * MIB


async def test_what_was_taken_before_the_offer_is_no_part_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It stays, whatever the next plan is."""
    machine = Machine(monkeypatch)
    async with measured(before=lambda: machine.takes(400)) as measures:
        assert measures.facts(MODEL).memory.of_host == 1280 * MIB
        machine.takes(600)
        machine.others_take(800)
        facts = measures.facts(MODEL)
        assert (facts.taken_bytes, facts.memory.of_host) == (400 * MIB, 640 * MIB)


@pytest.mark.parametrize(
    ("card_mib", "host_mib", "fixed_mib", "offered"),
    [
        (1000, 2000, None, (850, 1600)),
        (4000, 1000, None, (3400, 800)),
        (4000, 20, 500, (500, 16)),
        (4000, 2000, 500, (500, 500)),
    ],
)
async def test_an_accelerator_offers_both_memories(
    monkeypatch: pytest.MonkeyPatch,
    card_mib: int,
    host_mib: int,
    fixed_mib: int | None,
    offered: tuple[int, int],
) -> None:
    """Of each, less once other programs have taken of it, and never more than what is set."""
    machine = Machine(monkeypatch)
    machine.free = host_mib * MIB
    card = TwinDevice(total_bytes=card_mib * MIB)
    both = MemoryBudgets(*(mib * MIB for mib in offered))
    async with measured(
        fixed_mib and fixed_mib * MIB, compute=ComputeThread(device=card)
    ) as measures:
        memory = measures.memory
        assert measures.facts(MODEL).memory == both
        assert measures.facts(MODEL).compute == ComputeKind(card.kind, card.title)
        taken = card.copy_in(torch.zeros(100 * MIB, dtype=torch.uint8))
        assert memory.whole_budgets() == both, "a job's own memory"
        del taken
        card.others_bytes = (card_mib - 200) * MIB
        left = replace(both, compute_bytes=170 * MIB)
        assert memory.whole_budgets() == measures.facts(MODEL).memory == left
        for host_bytes in (0, left.host_bytes):
            assert memory.short_of(MemoryBudgets(200 * MIB, host_bytes), engaged=True) is None
            more = MemoryBudgets(201 * MIB, host_bytes)
            assert memory.short_of(more, engaged=True) == MemoryShortage(left)
        more = MemoryBudgets(0, min(machine.free, (fixed_mib or host_mib) * MIB) + 1)
        assert memory.short_of(more, engaged=True) == MemoryShortage(left, in_host=True)
        machine.others_take(host_mib * 9 // 10)
        left = replace(left, host_bytes=machine.free * 8 // 10)
        assert measures.facts(MODEL).memory == left


async def test_an_accelerator_that_takes_of_the_host_s_memory_offers_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    Machine(monkeypatch)
    for card_mib, offered_mib in ((1000, 850), (4000, 1600)):
        card = TwinDevice(total_bytes=card_mib * MIB)
        card.is_in_host_memory = True
        async with measured(compute=ComputeThread(device=card)) as measures:
            assert measures.facts(MODEL).memory == MemoryBudgets(offered_mib * MIB)


async def test_memory_runs_out_where_the_error_says(monkeypatch: pytest.MonkeyPatch) -> None:
    Machine(monkeypatch)
    pinned = RuntimeError("CUDA error: out of memory")  # the driver could pin none
    errors = {
        torch.OutOfMemoryError("CUDA out of memory"): False,
        MemoryError(): True,
        pinned: True,
    }
    async with measured(compute=ComputeThread(device=TwinDevice())) as measures:
        has = measures.memory.whole_budgets()
        for error, in_host in errors.items():
            assert measures.memory.ran_out(error) == MemoryShortage(has, in_host)
    async with measured() as measures:
        assert not measures.memory.ran_out(MemoryError()).in_host, "it has one memory"


async def test_a_card_is_given_up_for_a_job_once_others_have_most_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Before, the job gets a plan for what is left."""
    Machine(monkeypatch)
    card = TwinDevice(total_bytes=1000 * MIB)
    compute = ComputeThread(device=card)
    async with measured(compute=compute) as measures:
        card.others_bytes = 400 * MIB
        assert measures.given_up(MODEL) is None
        assert compute.device is card
        card.others_bytes = 600 * MIB
        for _ in range(2):
            assert "is full: 357 MB" in str(measures.given_up(MODEL))
        assert compute.device is HOST


async def test_once_its_accelerator_has_failed_a_device_is_measured_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    Machine(monkeypatch)

    async def measure(*_args: object, **_options: object) -> dict[str, Any]:
        return {"times": {"4": {}}}

    monkeypatch.setattr(device_profile, "measure", measure)
    compute = ComputeThread(device=TwinDevice())
    async with measured(compute=compute) as measures:
        asked = {"job": "j", "digest": MODEL, "holder": "a", "batch_sizes": [4]}
        await measures.measure_profile(Message("measure", asked))
        assert measures.facts(MODEL).measured
        compute.give_up_device(AcceleratorFailed("it is gone"))
        assert (facts := measures.facts(MODEL)).measured is None
        assert facts.compute == PROCESSOR
        assert facts.memory.of_host == 1600 * MIB


@pytest.mark.parametrize("why", [TrainingError("no kernel for Half"), MemoryError()])
async def test_a_card_that_leaves_work_to_its_host_stays_where_the_processor_cannot_do_all(
    monkeypatch: pytest.MonkeyPatch, why: Exception
) -> None:
    Machine(monkeypatch)
    card = TwinDevice()
    card.wrong = {"relu": False}
    compute = ComputeThread(device=card)

    async def measure(*_args: object, **_options: object) -> dict[str, Any]:
        if compute.device.is_host:
            raise why
        return {"times": {"4": {"forward": [1.0], "backward": [1.0]}}}

    monkeypatch.setattr(device_profile, "measure", measure)
    monkeypatch.setattr(device_profile, "names_of_operators", lambda _: {"relu"})
    async with measured(compute=compute) as measures:
        asked = {"job": "j", "digest": MODEL, "holder": "a", "batch_sizes": [4]}
        await measures.measure_profile(Message("measure", asked))
        assert measures.facts(MODEL).measured
        assert compute.device is card


async def test_one_that_rests_between_tasks_says_how_slow_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    Machine(monkeypatch)

    async def measure(*_args: object, **_options: object) -> dict[str, Any]:
        return {"times": {"4": {"forward": [1.0, 2.0]}}, "wall_by_cpu": 1.5}

    monkeypatch.setattr(device_profile, "measure", measure)
    compute = ComputeThread()
    compute.share = 0.5
    async with measured(compute=compute) as measures:
        asked = {"job": "j", "digest": MODEL, "holder": "a", "batch_sizes": [4]}
        await measures.measure_profile(Message("measure", asked))
        half = {"times": {"4": {"forward": [2.0, 4.0]}}, "wall_by_cpu": 3.0}
        assert measures.facts(MODEL).measured == half


async def test_it_works_on_until_all_have_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    Machine(monkeypatch)
    ended, stepped = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()
    sizes: list[int] = []

    async def measure(*_args: object, **_options: object) -> dict[str, Any]:
        return {"times": {"16": {}, "4": {}, "64": {}}}

    def work_on(_model: object, samples: int, *_room: object) -> Iterator[None]:
        sizes.append(samples)
        try:
            while True:
                loop.call_soon_threadsafe(stepped.set)
                yield
        finally:
            loop.call_soon_threadsafe(ended.set)

    monkeypatch.setattr(device_profile, "measure", measure)
    monkeypatch.setattr(device_profile, "work_on", work_on)
    async with measured() as measures:
        asked = {"job": "j", "digest": MODEL, "holder": "a", "batch_sizes": [4]}
        await measures.measure_profile(Message("measure", {**asked, "company": True}))
        await stepped.wait()
        await measures.all_measured("a", Message("measured"))
        await ended.wait()
        await measures.measure_profile(Message("measure", {**asked, "company": False}))
        assert sizes == [16], "only where others measure too"
        await measures.close()


async def test_a_link_whose_other_end_fails_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    async def measure_link(_mesh: MemoryMesh, peer: str, _seconds: float) -> LinkSpeed:
        if peer == "b":
            raise InternalError("b failed to handle 'mesh.ping'; see its log")
        return LinkSpeed(9e6, 0.001)

    Machine(monkeypatch)
    monkeypatch.setattr(MemoryMesh, "measure_link", measure_link)
    async with measured() as measures:
        asked = Message("links.measure", {"peers": ["b", "c"]})
        reply = await measures.measure_links("a", asked)
        assert reply.fields["speeds"] == [["c", 9e6, 0.001]]


@pytest.mark.parametrize(("again", "kept"), [(True, [8e6, 8e6, 9e6]), (False, [8e6, 5e6, 9e6])])
async def test_of_a_link_that_is_measured_again_it_keeps_the_faster_one(
    monkeypatch: pytest.MonkeyPatch, *, again: bool, kept: list[float]
) -> None:
    """As the coordinator does, which hears of it once more with every state report."""
    rates = iter((8e6, 5e6, 9e6))

    async def measure_link(_mesh: MemoryMesh, _peer: str, _seconds: float) -> LinkSpeed:
        return LinkSpeed(next(rates), 0.001)

    Machine(monkeypatch)
    monkeypatch.setattr(MemoryMesh, "measure_link", measure_link)
    async with measured() as measures:
        for seen, rate in enumerate(kept):
            asked = {"peers": ["b"], "again": again and seen > 0}
            await measures.measure_links("c", Message("links.measure", asked))
            assert measures.facts(MODEL).speeds == (("b", rate, 0.001),)


class InThisProcess(Box):
    """Answers as the child would."""

    def __init__(self) -> None:
        self.asked: list[ProfileRequest] = []

    async def ask(self, task: BoxTask) -> bytes:
        self.asked.append(ProfileRequest.from_bytes(task.content))
        return await asyncio.to_thread(measure_in_box, task.content, lambda _place: None)


async def test_a_model_of_others_is_tried_in_the_box_before_the_accelerator_runs_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    Machine(monkeypatch)
    example = torch.randn(4, 3), torch.zeros(4, dtype=torch.int64)
    description = capture(nn.Linear(3, 2), cross_entropy, example, evaluation=False).description
    compute = ComputeThread(device=TwinDevice())
    box, cache = InThisProcess(), ProfileCache(None, Measuring(0.0, 1.0, 1.0, 0.0))
    async with MemoryHousehold(["a"]) as mesh:
        measures = DeviceProfiler(mesh["a"], compute, cache, None, box=box)
        model = FetchedModel(description.digest, description.to_bytes(), "b")

        async def fetch(*_: object) -> FetchedModel:
            return model

        monkeypatch.setattr(measures, "_fetch", fetch)
        asked = ProfileAsked("j", model.digest, "b", (2, 4), most=16)
        reply = await measures.measure_profile(Message("measure", asked.fields()))
        answer = await read_part(ProfileAnswer, reply)
        assert [one.batch_sizes for one in box.asked] == [(2,)]
        assert set(answer.measured["times"]) == {"2", "4", "8", "16"}
        assert answer.compute.kind == answer.measured["processor"] == "twin"
    await compute.close()
