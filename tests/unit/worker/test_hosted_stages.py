"""Stages of one device, made of what one stage had there."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from p2ptrain.aio.tasks import TaskOwner
from p2ptrain.devices.processor import HOST
from p2ptrain.mesh.interface import Mesh
from p2ptrain.messages.assignment import Assignment, StageAssignment
from p2ptrain.messages.kinds import STATE_MANIFEST
from p2ptrain.messages.round_orders import GenerationKey
from p2ptrain.messages.snapshots import StateKey
from p2ptrain.model.capture.capture import capture
from p2ptrain.model.capture.captured import Captured
from p2ptrain.model.graph.description import ModelDescription
from p2ptrain.model.stage.optimizer_spec import SGD
from p2ptrain.net.message import Message
from p2ptrain.plan.types.memory_budgets import NO_MEMORY
from p2ptrain.process.energy import EnergyMeter
from p2ptrain.recovery.compute_kind import PROCESSOR
from p2ptrain.recovery.state_report import StateKind
from p2ptrain.recovery.version import Version
from p2ptrain.runtime.device import KnownModel, LocalDevice
from p2ptrain.runtime.io.tensor_router import TensorRouter
from p2ptrain.state.served_state import ServedState
from p2ptrain.state.snapshot_store import tensors_of_units
from p2ptrain.state.transfer_server import TransferServer, version_source
from p2ptrain.worker.generation_builder import GenerationBuild
from p2ptrain.worker.hosted_stages import HostedStages, UnsharedTensors
from p2ptrain.worker.job_memory import JobMemory
from p2ptrain.worker.job_store import JobStore
from tests.support.memory_household import MemoryHousehold
from tests.unit.runtime.test_live_stage import MICRO_BATCH, compute_round, make_live, make_order

VERSION = Version(1, 1)


@pytest.fixture
def captured() -> Captured:
    """The last unit has the first one's parameters, and there is one between them."""
    tied = nn.Linear(6, 6)
    model = nn.Sequential(tied, nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), tied)
    batch = torch.randn(MICRO_BATCH, 6), torch.zeros(MICRO_BATCH, dtype=torch.long)
    return capture(model, cross_entropy, batch, evaluation=False)


def trained(captured: Captured) -> Mapping[str, Tensor]:
    """What one stage of all units is after an update: momentum is there."""
    live = make_live(captured)
    compute_round(live)
    live.get_ready(make_order())
    live.apply(None)
    return live.named()


class Here:
    """Does at once what a compute thread does."""

    device = HOST

    async def run(self, _: tuple[int, ...], work: Callable[[], Any]) -> Any:
        """As `ComputeThread.run`."""
        return work()


def around(captured: Captured, holder: str) -> Assignment:
    """The first and the last unit at the holder, as in a private job."""
    last = len(captured.description.units) - 1
    ends = [(0, 1, holder), (1, last, "other"), (last, last + 1, holder)]
    places = tuple(
        StageAssignment(first, end, warmup=1, devices=(device,), shares=(4,))
        for first, end, device in ends
    )
    key = GenerationKey("job", 2)
    return Assignment(key, holder, "digest", places, 4, 4, SGD(), 0, False, VERSION)


def device_of(mesh: Mesh) -> LocalDevice:
    """With a thread that does everything at once."""
    return LocalDevice(
        *(mesh, TensorRouter(mesh), cast(Any, Here()), TransferServer(mesh), KnownModel()),
        *(lambda: NO_MEMORY, EnergyMeter()),
    )


async def test_stages_that_are_given_up_give_their_memory_back(captured: Captured) -> None:
    """The session knows what was asked for last until something else is."""

    async def model(_digest: str, _holder: str) -> ModelDescription:
        return captured.description

    async with MemoryHousehold(["a"]) as household:
        mesh = household["a"]
        shell, assignment = device_of(mesh), around(captured, mesh.self_id)
        store = JobStore(assignment.key.job, shell.states, lambda _version: None)
        units = len(captured.description.units)
        state = {n: t for n, t in trained(captured).items() if n.startswith("model:")}
        versions = store.versions(captured.description)
        versions.put(StateKind.KEPT, 0, units, VERSION, state, {})
        ready = asyncio.Event()
        core = SimpleNamespace(built=lambda _generation: ready.set())
        memory = JobMemory(shell.compute, None, None)
        measures = SimpleNamespace(model=model, memory=memory, kind=PROCESSOR)
        context = SimpleNamespace(shell=shell, measures=measures)
        tasks = TaskOwner()
        build = GenerationBuild(
            *(assignment, cast(Any, context), store, tasks, cast(Any, core)),
            *(lambda _version: None, NO_MEMORY),
            gathers=False,
        )
        build.begin(())
        await tasks.done()
        assert ready.is_set()
        stages = [one for one in gc.get_objects() if isinstance(one, HostedStages)]
        refs = [weakref.ref(one) for one in stages if one.assignment is assignment]
        del stages
        assert [one() is not None for one in refs] == [True]
        build.give_up("is made ready for another plan")
        gc.collect()
        assert [one() for one in refs] == [None]


async def test_copies_that_are_being_read_go_with_their_job(captured: Captured) -> None:
    """A device that only keeps another's copies has no stage with whose end they would go."""
    async with MemoryHousehold(["a"]) as household:
        states = TransferServer(household["a"])
        store = JobStore("job", states, lambda _version: None)
        units = len(captured.description.units)
        state = {n: t for n, t in trained(captured).items() if n.startswith("model:")}
        store.versions(captured.description).put(StateKind.REPLICA, 0, units, VERSION, state, {})
        key = StateKey(GenerationKey("job", 0), version_source(VERSION), 0, units)
        others = weakref.WeakSet(o for o in gc.get_objects() if isinstance(o, ServedState))
        await states.answer_manifest("b", Message(STATE_MANIFEST, key.fields()))
        served = weakref.WeakSet(o for o in gc.get_objects() if isinstance(o, ServedState))
        served -= others
        assert len(served) == 1
        store.release()
        gc.collect()
        assert len(served) == 0


async def test_tied_stages_made_of_one_are_each_their_own_memory(captured: Captured) -> None:
    """Else the update of a tied weight, and of its momentum, would be made twice."""
    state = trained(captured)

    async def parts(place: StageAssignment) -> Mapping[str, Tensor]:
        return tensors_of_units(captured.description, state, place.first, place.end)

    async with MemoryHousehold(["a"]) as household:
        mesh = household["a"]
        shell = device_of(mesh)
        hosted = HostedStages(around(captured, mesh.self_id), captured.description, shell)
        await hosted.prepare(parts, SGD(lr=0.1, momentum=0.9))
    first, last = (executor.live.named() for executor in hosted.executors.values())
    tied = first.keys() & last.keys()
    assert {name.partition(":")[0] for name in tied} == {"model", "optimizer"}
    for name in tied:
        assert first[name].data_ptr() != last[name].data_ptr()
        assert torch.equal(first[name], last[name])


def test_what_only_one_stage_has_is_taken_over_as_it_is() -> None:
    memory = UnsharedTensors()
    shared, one, other = (torch.ones(3) for _ in range(3))
    first = memory.of({"shared": shared, "one": one})
    second = memory.of({"shared": shared, "other": other})
    third = memory.of({"shared": second["shared"]})
    assert first["shared"] is shared
    assert first["one"] is one
    assert second["other"] is other
    places = {state["shared"].data_ptr() for state in (first, second, third)}
    assert len(places) == 3, "a copy is not given twice either"
