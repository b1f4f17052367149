"""The three cases of FTPipeHD's timer, and what several deaths at once cost.

What the paper's timer and probe tell apart, membership, links and the watch for standstills do:
whatever the case, all go on from one version of all stages, to the bit that of the formula.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from p2ptrain import events, failpoints
from p2ptrain.events import Event, Failure, Recovered, Step
from p2ptrain.failpoints import Reached
from p2ptrain.holder.snapshots import full_snapshots
from p2ptrain.holder.snapshots.full_snapshots import FullSnapshots
from p2ptrain.job.asynchrony import AsyncOptions, FtpipehdOptions
from p2ptrain.recovery.version import Version
from tests.integration.training.delayed import Generations, delayed_job
from tests.integration.training.ftpipehd import Speeds, as_published, reasons, units
from tests.integration.training.household import NO_FIRST_WEIGHTS, Devices, devices, hold_rounds
from tests.support.memory_household import memory_id

INTERVALS = FtpipehdOptions(first_repartition=10, repartition=1000, chain=4, whole=8)
STEPS = 70
HAPPENS = 30
"""After the first cut by capacities, and several copies."""
LOST = (1, 3)
"""Units of b, the middle one of three."""
STASHED = AsyncOptions()

SETTINGS = replace(
    NO_FIRST_WEIGHTS,
    repartition_judged_share=0.0,
    replay_limit_seconds=1e9,  # steps seem to take long
    newcomer_settle_seconds=0.0,
)

Happening = Callable[[], Coroutine[Any, Any, None]]


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


async def course(
    household: Devices,
    count: int,
    happens: Happening | None,
    until: Callable[[], bool] = lambda: True,
) -> Generations:
    """A whole job with a device that is slow; something happens; held against the formula.

    Nothing happens before the model was cut by capacities, nor does it end before `until`.
    """
    job, generations, tasks = delayed_job(), Generations(household), []

    def listen(event: Event) -> None:
        household.events.append(event)
        if happens is not None and isinstance(event, Step) and event.step == HAPPENS:
            tasks.append(asyncio.create_task(happens()))

    with (
        pytest.MonkeyPatch.context() as patched,
        Speeds({"c": 3.0}).in_place(),
        generations.watched(),
    ):
        hold_rounds(patched, HAPPENS, lambda: "drift" in reasons(household))
        hold_rounds(patched, STEPS - 10, until)
        options = as_published(count, STEPS, INTERVALS)
        await household.holder_run(job, options, listen).run()
    await asyncio.gather(*tasks)
    generations.assert_by_formula(job, delayed_job, STASHED, STEPS)
    return generations


def failed(household: Devices) -> list[str]:
    return [event.name for event in household.events if isinstance(event, Failure)]


async def test_all_answer_and_a_stage_hangs() -> None:
    """Case 1: nobody is gone; nothing moves; the same plan goes on from a version of all."""
    # all share one process here
    settings = replace(SETTINGS, quiet_seconds=0.3, quiet_cpu_seconds=1e9)

    def hang(_: Reached) -> asyncio.Future[None]:
        return asyncio.get_running_loop().create_future()

    async with devices(3, settings=settings) as household:
        failpoints.arm("forward.compute.after", hang, device=memory_id("b"), step=HAPPENS)
        try:
            await course(household, 3, None)
        finally:
            failpoints.disarm()
    assert failed(household) == []
    assert reasons(household) == ["start", "drift", "failure"]
    *_, before, after = units(household)
    assert before == after
    told = [event.message for event in household.events if isinstance(event, events.Warning)]
    assert any("nothing moves any more" in message for message in told)


async def test_all_answer_and_a_link_was_cut() -> None:
    """Case 1 again: what was on its way is lost, and done again."""
    async with devices(3, settings=SETTINGS) as household:

        async def cut() -> None:
            household.mesh.cut_link("b", "c")
            household.mesh.heal_link("b", "c")

        await course(household, 3, cut)
    assert failed(household) == []
    *_, before, after = units(household)
    assert reasons(household)[-1] == "failure"
    assert before == after


async def test_all_answer_and_one_has_come_back_empty() -> None:
    """Case 2: it gets its units again from its neighbour, or the others get them first."""
    async with devices(3, settings=SETTINGS) as household:

        async def restart() -> None:
            await household.members["b"].close()
            await household.mesh.restart("b")
            household.start("b")

        begun = len(("start", "drift"))
        await course(
            household,
            3,
            restart,
            lambda: len(units(household)) > begun and "b" in units(household)[-1],
        )
    assert failed(household) == ["b"]
    assert reasons(household)[:3] == ["start", "drift", "failure"]
    assert set(units(household)[-1]) == {"a", "b", "c"}


@pytest.mark.parametrize("name", ["b", "c"])
async def test_one_is_silent(name: str) -> None:
    """Case 3: the others are cut again, by the capacities that are known."""
    async with devices(3, settings=SETTINGS) as household:

        async def kill() -> None:
            await household.mesh.kill(name)

        await course(household, 3, kill)
        for survivor in {"a", "b", "c"} - {name}:
            await household.until_idle(survivor)
    assert failed(household) == [name]
    assert reasons(household) == ["start", "drift", "failure"]
    last = units(household)[-1]
    assert name not in last
    if name == "b":
        assert last["a"] > 2 * last["c"]


async def test_neighbours_are_silent_and_the_whole_copy_is_gone_back_to() -> None:
    """Case 3 with two: each had the other's copies, so that only the third has all."""
    held: list[Version] = []
    take = FullSnapshots._take

    async def noted(copies: FullSnapshots, version: Version) -> None:
        await take(copies, version)
        held.extend([copies.held] if copies.held else [])

    async with devices(3, settings=SETTINGS) as household:

        async def kill() -> None:
            while not held:  # noqa: ASYNC110 - copies are made in milliseconds
                await asyncio.sleep(0.001)
            for name in ("b", "c"):
                household.mesh.freeze(name)
            await asyncio.gather(*(household.mesh.kill(name) for name in ("b", "c")))

        with patch.object(FullSnapshots, "_take", noted):
            generations = await course(household, 3, kill)
    assert sorted(failed(household)) == ["b", "c"]
    assert set(units(household)[-1]) == {"a"}
    recovered = [event for event in household.events if isinstance(event, Recovered)][-1]
    assert recovered.version in {version.step for version in held}, "one that was held whole"
    assert generations.begun[-1][0] == recovered.version


async def test_without_memory_for_it_there_is_no_whole_copy_and_people_hear_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(full_snapshots, "usable_memory_bytes", lambda: 100)
    async with devices(3, settings=SETTINGS) as household:
        await course(household, 3, None)
    told = [event.message for event in household.events if isinstance(event, events.Warning)]
    assert sum("copy of the whole model" in message for message in told) == 1
