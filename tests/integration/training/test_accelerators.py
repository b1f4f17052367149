"""Devices that compute on accelerators, beside others that do on processors.

The accelerators are twins that compute the processor's bits, so the curve must be plain torch's;
and they find copies that are missing, late or torn, and memory that is not given back.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from p2ptrain import failpoints
from p2ptrain.aio.tasks import run_in_background
from p2ptrain.devices.check import CheckLimits, check_device
from p2ptrain.devices.probes import Accelerator, FamilyProbe
from p2ptrain.devices.processor import HOST
from p2ptrain.devices.request import DeviceRequest
from p2ptrain.devices.selection import DeviceChooser
from p2ptrain.errors import AcceleratorFailed, PlanError
from p2ptrain.events import Eval, Plan, Recovered, Warning
from p2ptrain.job.asynchrony import AsyncOptions
from p2ptrain.job.job import Job
from p2ptrain.job.train_options import TrainOptions
from p2ptrain.model.stage.optimizer_spec import SGD, AdamW
from p2ptrain.plan.types.memory_budgets import MemoryBudgets, MemoryShortage
from p2ptrain.plan.types.weight_versions import Weights
from p2ptrain.process.compute_thread import ComputeThread
from p2ptrain.process.memory_budget import PROCESS_BYTES
from p2ptrain.profiling.profile_cache import ProfileCache
from p2ptrain.recovery.recovery_settings import HOME, RecoverySettings
from p2ptrain.worker.hosted_stages import HostedStages
from p2ptrain.worker.job_memory import JobMemory
from tests.integration.training.delayed import by_formula, cut_of, delayed_job, options
from tests.integration.training.group_plans import Stage, dealt, device_count, divided, force
from tests.integration.training.household import OFTEN_COPIED, Devices, devices
from tests.integration.training.jobs import (
    STEPS,
    assert_undisturbed,
    make_job,
    momentum_job,
    on_step,
    one_stage_each,
    undisturbed,
)
from tests.integration.training.made_up import make_up_profiles
from tests.integration.training.replicas import check_replicas, engaged
from tests.integration.training.test_asynchronous_groups import force as force_turns
from tests.integration.training.test_groups import TOLERANCE
from tests.support import model_idioms, zoo
from tests.support.curves import Case, difference, job_of, outcome_of, plain_torch
from tests.support.memory_household import memory_id
from tests.support.reference import Outcome
from tests.support.twin_device import TwinDevice


@asynccontextmanager
async def accelerated(
    count: int, twins: str, settings: RecoverySettings = HOME
) -> AsyncIterator[tuple[Devices, Mapping[str, TwinDevice]]]:
    """A household where those named by a letter of `twins` have one; nothing is left in them."""
    compute = {name: TwinDevice(seed=ord(name)) for name in twins}
    async with devices(count, settings=settings, compute=compute) as household:
        yield household, compute
        for name in household.names:
            if household.mesh.running(household.mesh[name].self_id) is not None:
                await household.until_idle(name)
    for twin in compute.values():
        twin.assert_empty()


def _reasons(household: Devices) -> list[str]:
    """Of its plans: one that fails is planned around, and the curve does not show it."""
    return [event.reason for event in household.events if isinstance(event, Plan)]


async def _curve(case: Case, twins: str, chosen: TrainOptions) -> Outcome:
    made = zoo.make(case.model, dtype=case.dtype)
    async with accelerated(case.devices, twins) as (household, compute):
        await household.holder_run(job_of(case, made), chosen).run()
        assert all(twin.call_names for twin in compute.values())
        assert _reasons(household) == ["start"]
        assert not household.warned, "an accelerator was given up"
    return outcome_of(household.losses, made)


@pytest.mark.parametrize(
    ("twins", "case"),
    [
        ("b", Case("cnn", devices=3, optimizer=AdamW(lr=0.01), clip_grad_norm=0.5, steps=5)),
        ("ac", Case("gpt", devices=3, optimizer=AdamW(lr=0.01), clip_grad_norm=0.5, steps=5)),
        ("ac", Case("unet", devices=3, steps=4)),
        ("abc", Case("frozen", devices=3, steps=4)),
        ("ab", Case("named_inputs", devices=2, micro_batch=5, steps=4)),
    ],
    ids=str,
)
async def test_a_pipeline_trains_as_plain_torch(twins: str, case: Case) -> None:
    ours = await _curve(case, twins, TrainOptions(wait_for=case.devices, planner="pp", steps=5))
    reference = plain_torch(replace(case, steps=5))
    assert ours.losses == reference.losses
    assert difference(ours, reference).state == 0.0


@pytest.mark.parametrize(("count", "whose"), [(1, "a"), (2, "b")])
async def test_an_update_is_given_to_it_before_its_gradients_are_looked_at(
    count: int, whose: str
) -> None:
    """After the first one, no step has the host wait for a number."""
    job, wanted = momentum_job(), undisturbed(momentum_job())
    waits: list[int] = []
    async with accelerated(count, whose) as (household, compute):
        twin = compute[whose]

        def note() -> None:
            waits.append(len(twin.host_waits))

        await household.holder_run(job, one_stage_each(count), on_step(household, 2, note)).run()
        assert_undisturbed(household, job, wanted)
        assert waits == [len(twin.host_waits)]


async def test_fast_math_is_for_that_job_and_said() -> None:
    plans = []
    for fast_math in (True, False):
        job = replace(momentum_job(), fast_math=fast_math)
        async with accelerated(2, "b") as (household, compute):
            await household.holder_run(job, one_stage_each(2)).run()
            assert_undisturbed(household, job, undisturbed(momentum_job()))
            await household.until_idle("b")
            assert compute["b"].fast_math == ([True, False] if fast_math else [False])
            plans.append(household.plan)
    said = [[text for text in plan.changes_results if "fast_math" in text] for plan in plans]
    assert [len(texts) for texts in said] == [1, 0]
    assert "the accelerator of b may round" in said[0][0]


async def test_masks_are_the_same_on_every_kind_of_device() -> None:
    """Beside an accelerator: processors alone draw plain torch's."""
    case, chosen = Case("dropout", devices=2, steps=4), TrainOptions(2, planner="pp", steps=4)
    one, other, both = [(await _curve(case, twins, chosen)).losses for twins in ("a", "b", "ab")]
    assert one == other == both
    assert one != (await _curve(case, "", chosen)).losses


@pytest.mark.parametrize(
    ("model", "twins", "plan"),
    [
        ("cnn", "ab", [divided(3, 1)]),
        ("gpt", "cd", [dealt(2, 2), divided(1, 3)]),
        ("cnn", "b", [divided(3, 1)]),
        ("gpt", "bc", [dealt(2, 2), divided(1, 3)]),
    ],
)
async def test_a_group_computes_what_processors_do(
    monkeypatch: pytest.MonkeyPatch, twins: str, plan: list[Stage], model: str
) -> None:
    force(monkeypatch, plan)
    case = Case(model, devices=device_count(plan), clip_grad_norm=0.5, steps=4)
    chosen = TrainOptions(wait_for=case.devices, steps=4)
    ours, theirs = await _curve(case, twins, chosen), await _curve(case, "", chosen)
    assert ours.losses == theirs.losses
    assert difference(ours, theirs).state == 0.0


@pytest.mark.parametrize(
    "how",
    [
        AsyncOptions(),
        AsyncOptions(Weights.VERTICAL, 2),
        AsyncOptions(Weights.UNSTASHED),
    ],
)
async def test_without_a_barrier_it_is_what_the_formula_says(how: AsyncOptions) -> None:
    job, steps = delayed_job("cnn"), 12
    async with accelerated(3, "bc") as (household, _):
        await household.holder_run(job, options(3, how, steps)).run()
        names = cut_of(household)
        wanted = by_formula(delayed_job("cnn"), names, how, steps)
        assert_undisturbed(household, job, wanted)
        assert _reasons(household) == ["start"]


async def test_a_group_takes_turns_without_a_barrier(monkeypatch: pytest.MonkeyPatch) -> None:
    force_turns(monkeypatch, [(8,), (4, 4)])
    job, how, steps = delayed_job(), AsyncOptions(), 20
    async with accelerated(3, "bc") as (household, _):
        await household.holder_run(job, options(3, how, steps, planner="auto")).run()
        names = cut_of(household)
        assert _reasons(household) == ["start"]
    wanted = by_formula(delayed_job(), names, how, steps, devices={0: [1, 2]})
    assert_undisturbed(household, job, wanted)


@pytest.mark.parametrize("ema", [None, 0.9])
@pytest.mark.parametrize(
    ("twins", "plan"), [("ab", [divided(4), divided(4)]), ("b", [dealt(2, 2)])], ids=str
)
async def test_an_evaluation_sees_the_weights_of_its_update(
    monkeypatch: pytest.MonkeyPatch, twins: str, plan: list[Stage], ema: float | None
) -> None:
    """Or their averages."""
    force(monkeypatch, plan)

    async def evaluations(twins: str) -> list[Mapping[str, float]]:
        job = make_job("cnn", ema=ema)
        metrics: Any = {"largest": lambda output, _: output.max()}
        job = replace(job, eval_data=job.data, metrics=metrics)
        async with accelerated(2, twins) as (household, _):
            await household.holder_run(job, TrainOptions(2, steps=6)).run()
        assert _reasons(household) == ["start"]
        return [event.metrics for event in household.events if isinstance(event, Eval)]

    assert await evaluations(twins) == await evaluations("")


@pytest.mark.parametrize(("twins", "dies"), [("b", "b"), ("ac", "b"), ("bc", "c")])
async def test_a_device_dies_and_nothing_shows_it(twins: str, dies: str) -> None:
    job, wanted = momentum_job(), undisturbed(momentum_job())
    killing: list[asyncio.Task[None]] = []
    async with accelerated(3, twins, OFTEN_COPIED) as (household, _):

        def kill() -> None:
            killing.append(asyncio.create_task(household.mesh.kill(dies)))

        await household.holder_run(job, one_stage_each(3), on_step(household, 5, kill)).run()
        await asyncio.gather(*killing)
        assert_undisturbed(household, job, wanted)
        assert _reasons(household) == ["start", "failure"]
        await household.members[dies].close()


@pytest.mark.parametrize("dies", [True, False])
async def test_a_card_that_has_the_whole_model_is_lost(
    monkeypatch: pytest.MonkeyPatch, dies: bool
) -> None:
    """With its device, as the holder has a copy; or alone, as its own host has one."""

    force(monkeypatch, [divided(4)], "ba")
    job, wanted = momentum_job(), undisturbed(momentum_job())
    killing: list[asyncio.Task[None]] = []
    async with accelerated(2, "b", OFTEN_COPIED) as (household, compute):

        def lose() -> None:
            if dies:
                killing.append(asyncio.create_task(household.mesh.kill("b")))
            else:
                compute["b"].fail_now()

        chosen = TrainOptions(2, steps=STEPS)
        await household.holder_run(job, chosen, on_step(household, 8, lose)).run()
        await asyncio.gather(*killing)
        assert household.losses == wanted.losses
        assert _reasons(household) == ["start", "failure"]
        (recovered,) = [event for event in household.events if isinstance(event, Recovered)]
        assert recovered.replayed_steps < 8
        await household.members["b"].close()


async def test_a_checkpoint_of_it_is_gone_on_from(tmp_path: Path) -> None:
    job, wanted = momentum_job(), undisturbed(momentum_job(), 8)
    for steps, twins in ((4, "b"), (8, "a")):
        chosen = replace(one_stage_each(2, steps), checkpoint=tmp_path, checkpoint_every=2)
        if steps > 4:
            chosen = replace(chosen, resume=tmp_path)
        async with accelerated(2, twins) as (household, _):
            await household.holder_run(job, chosen).run()
        assert _reasons(household) == ["start"]
    assert household.losses == wanted.losses[4:]


@pytest.mark.parametrize(
    ("place", "step"),
    [
        ("prepare.receive.before", None),
        ("forward.receive.before", 1),
        ("backward.receive.before", 1),
        ("update.begin.before", 1),
        ("forward.receive.before", 6),
        ("update.begin.before", 6),
    ],
)
async def test_a_card_that_others_fill_leaves_the_job_to_its_processor(
    monkeypatch: pytest.MonkeyPatch, place: str, step: int | None
) -> None:
    """At load, at the first step, in the middle: of that device, and nothing of the curve."""
    make_up_profiles(monkeypatch)
    job, wanted = momentum_job(), undisturbed(momentum_job())
    where = {} if step is None else {"step": step}
    left: list[int] = []
    async with accelerated(3, "b", OFTEN_COPIED) as (household, compute):
        twin = compute["b"]

        def fill(_device: str) -> None:
            twin.others_bytes = twin.memory().free_bytes

        def look() -> None:
            twin.wait()  # for copies that nothing waits for any more
            left.append(twin.memory().taken_bytes)

        failpoints.arm(place, fill, device=memory_id("b"), **where)
        listen = on_step(household, STEPS - 1, look)
        await household.holder_run(job, one_stage_each(3), listen).run()
        assert left == [0], "what was there is given back"
        assert_undisturbed(household, job, wanted)
        assert household.members["b"].compute.device is HOST
        assert _layers_of(household, "b")
    ((who, text),) = household.warned
    assert who == "b"
    assert re.search("the CPU does: .* of its memory are left", text)


async def test_what_jobs_take_of_a_card_is_shown() -> None:
    job = momentum_job()
    async with accelerated(3, "b") as (household, compute):

        def look() -> None:
            taken_bytes = -1
            while taken_bytes != compute["b"].memory().taken_bytes:  # the card computes meanwhile
                taken_bytes = compute["b"].memory().taken_bytes
                card, without = (household.members[n].memory_in_use() for n in "bc")
            assert card.card_used_bytes == taken_bytes > 0
            assert (without.card_used_bytes, without.used_bytes is None) == (None, False)

        await household.holder_run(job, one_stage_each(3, 6), on_step(household, 5, look)).run()


@pytest.mark.parametrize("is_known", [False, True])
async def test_a_card_without_memory_from_the_start_leaves_the_job_to_its_processor(
    is_known: bool,
) -> None:
    """Be its times of that model kept or not."""
    job, wanted = momentum_job(), undisturbed(momentum_job())
    twin, profiles = TwinDevice(total_bytes=1 << 30), ProfileCache(None)
    if is_known:
        async with devices(2, compute={"b": twin}, profiles=profiles) as household:
            await household.holder_run(momentum_job(), one_stage_each(2)).run()
            assert household.members["b"].compute.device is twin
    twin.others_bytes = (1 << 30) - 1000
    async with devices(2, compute={"b": twin}, profiles=profiles) as household:
        await household.holder_run(job, one_stage_each(2)).run()
        assert_undisturbed(household, job, wanted)
        assert _reasons(household) == ["start"]
        assert household.members["b"].compute.device is HOST
    ((who, text),) = household.warned
    assert who == "b"
    assert re.search(r"the CPU does: [0-9.]+ (bytes|kB) of its memory are left", text)
    twin.assert_empty()


class _SmallMemories(JobMemory):
    """Of a member whose host, or whose card, has few bytes.

    Attributes:
        card_bytes: that jobs may take of the card's.
        host_bytes: that they may take of the host's.
        left_bytes: as many from the moment a part is made ready.
    """

    card_bytes = host_bytes = 1 << 40
    left_bytes: int | None = None

    def short_of(self, needed: MemoryBudgets, *, engaged: bool) -> MemoryShortage | None:
        self.host_bytes = self.host_bytes if self.left_bytes is None else self.left_bytes
        return super().short_of(needed, engaged=engaged)

    def _budgets(self, free_bytes: int, share: float) -> MemoryBudgets:
        found = super()._budgets(min(free_bytes, self.host_bytes), share)
        return replace(found, compute_bytes=min(found.compute_bytes, self.card_bytes))


def _memory_of(household: Devices, name: str) -> _SmallMemories:
    """In place of what the member has."""
    member = household.members[name]
    member.service.measures.memory = small = _SmallMemories(member.compute, None, None)
    return small


def _wide_job() -> Job:
    """Six layers of a MiB each, with as much momentum; the two devices would have half each."""
    torch.manual_seed(0)
    layers = [nn.Linear(512, 512, bias=False) for _ in range(6)]
    data = [(torch.randn(512), torch.tensor(number % 5)) for number in range(32)]
    sgd = SGD(lr=0.05, momentum=0.9)
    model = nn.Sequential(*layers)
    return Job(model, data, cross_entropy, optimizer=sgd, batch_size=8, micro_batch=8)


def _layers_of(household: Devices, name: str) -> int:
    stages = [s for s in household.plan.stages if name in {d.name for d in s.devices}]
    return sum(stage.units[1] - stage.units[0] for stage in stages)


@pytest.mark.parametrize("small", ["card", "host", "host when it is made ready"])
async def test_the_memory_that_is_small_decides_how_much_a_device_gets(small: str) -> None:
    """Beside a card with much memory as beside a host with much."""
    job, wanted = _wide_job(), undisturbed(_wide_job(), 4)
    async with accelerated(2, "b") as (household, _):
        household.members["a"].compute.share = 0.1  # so that b would get most layers
        memory = _memory_of(household, "b")
        if small == "card":
            memory.card_bytes = 6 << 20
        few_bytes = PROCESS_BYTES + (5 << 19)  # of a layer's state, and no other one's
        if small == "host":
            memory.host_bytes = few_bytes
        elif small != "card":
            memory.left_bytes = few_bytes
        await household.holder_run(job, replace(one_stage_each(2), steps=4)).run()
        assert household.losses == wanted.losses
        assert _layers_of(household, "b") == 1
        assert _reasons(household) == ["start"]
        assert (household.plan.epoch > 1) == (small == "host when it is made ready")
        assert household.plan.predicted_host_bytes.keys() == {"b"}
        warned = [e.message for e in household.events if isinstance(e, Warning)]
        why = "planned again with less: the plan needs .* in the host's memory of b, .* missing"
        found = [text for text in warned if re.search(why, text)]
        assert len(found) == (small == "host when it is made ready")


async def test_a_host_that_is_too_small_for_any_part_is_named() -> None:
    async with accelerated(2, "b") as (household, _):
        _memory_of(household, "b").host_bytes = 1 << 20
        why = r"in the host's memory of b, beside its accelerator, which has 1.05 MB: .* missing"
        with pytest.raises(PlanError, match=why):
            await household.holder_run(_wide_job(), one_stage_each(2)).run()
        chosen = TrainOptions(wait_for=2, planner="auto", steps=3)
        await household.holder_run(_wide_job(), chosen).run()
        assert _layers_of(household, "a") == 6


@pytest.mark.parametrize("whose", ["a", "c"])
async def test_a_card_fails_and_its_device_computes_on_its_processor(whose: str) -> None:
    """The holder's or another's: nothing of the card's memory is used any more."""
    job, wanted = momentum_job(), undisturbed(momentum_job())
    async with accelerated(3, whose, OFTEN_COPIED) as (household, compute):
        listen = on_step(household, 5, compute[whose].fail_now)
        await household.holder_run(job, one_stage_each(3), listen).run()
        assert_undisturbed(household, job, wanted)
        assert household.members[whose].compute.device is HOST
        used = [device.name for stage in household.plan.stages for device in stage.devices]
        assert whose in used
        assert _reasons(household) == ["start", "failure"]
    ((who, text),) = household.warned
    assert who == whose
    assert "the card has fallen off the bus; this device computes on its CPU from now on" in text


async def _check(twin: TwinDevice) -> str:
    """As before it is used; what is said of it."""
    probe = FamilyProbe((Accelerator("cuda:0", twin.title),))
    limits = CheckLimits(repeats=1, race_elements=8)
    chooser = DeviceChooser(
        lambda device, _: check_device(device, limits=limits),
        {"cuda": lambda: probe},
        lambda _: twin,
    )
    chosen = await run_in_background(partial(chooser.choose, DeviceRequest("cuda")))
    assert chosen.device is twin
    return chosen.reason


@pytest.mark.parametrize(
    ("model", "operator", "backward", "wrong", "right"),
    [
        ("cnn", "aten.convolution.default", False, "conv2d (NaN), depthwise conv2d", "addmm"),
        ("cnn", "aten.max_pool2d_with_indices_backward.default", True, "pooling", "convolution"),
        ("gpt", "aten._softmax_backward_data.default", True, "attention (NaN), softmax", "addmm"),
    ],
)
async def test_what_a_card_computes_wrong_its_host_computes(
    monkeypatch: pytest.MonkeyPatch,
    model: str,
    operator: str,
    backward: bool,
    wrong: str,
    right: str,
) -> None:
    """Everything else is the card's; after a recovery too."""
    make_up_profiles(monkeypatch)
    job = momentum_job(name=model)
    wanted = undisturbed(momentum_job(name=model))
    killing: list[asyncio.Task[None]] = []
    async with accelerated(3, "bc", OFTEN_COPIED) as (household, compute):
        for twin in compute.values():
            twin.compute_wrong(operator, backward=backward)
            assert f"the CPU computes what it computes wrong: {wrong}" in await _check(twin)
            twin.call_names.clear()

        def kill() -> None:
            killing.append(asyncio.create_task(household.mesh.kill("c")))

        await household.holder_run(job, one_stage_each(3), on_step(household, 5, kill)).run()
        await asyncio.gather(*killing)
        assert_undisturbed(household, job, wanted)
        assert _reasons(household) == ["start", "failure"]
        assert not household.warned, "an accelerator was given up"
        for twin in compute.values():
            assert operator not in twin.call_names
            assert f"aten.{right}.default" in twin.call_names
        await household.members["c"].close()


async def test_what_a_card_leaves_to_its_host_may_make_it_useless_for_a_model() -> None:
    """A twin is slower than the processor in everything."""
    job, wanted = momentum_job(), undisturbed(momentum_job())
    async with devices(2, compute={"b": TwinDevice()}, profiles=ProfileCache(None)) as household:
        twin = household.members["b"].compute.device
        twin.wrong = {"gelu": False}
        await household.holder_run(job, one_stage_each(2)).run()
        assert household.members["b"].compute.device is twin, "this model has none of it"
        twin.wrong = {"relu": False}
        await household.holder_run(make_job("custom_loss"), one_stage_each(2)).run()
        assert household.members["b"].compute.device is HOST
    assert household.losses[: len(wanted.losses)] == wanted.losses
    ((who, text),) = household.warned
    assert who == "b"
    assert "the CPU does: it is slower than the CPU, to which it leaves what it computes" in text


class _NoRoomBesideTheCard(JobMemory):
    """Of a host whose processor can compute no model."""

    def budgets(self) -> MemoryBudgets:
        found = super().budgets()
        return found if found.has_two else MemoryBudgets(1)


async def test_a_card_computes_what_its_processor_has_no_room_for() -> None:
    """Though it leaves something to its host and is slower: the times that are kept say so."""
    job, wanted = make_job("custom_loss"), undisturbed(make_job("custom_loss"))
    twin = TwinDevice()
    twin.wrong = {"relu": False}
    async with devices(2, compute={"b": twin}, profiles=ProfileCache(None)) as household:
        member = household.members["b"]
        member.service.measures.memory = _NoRoomBesideTheCard(member.compute, None, None)
        await household.holder_run(job, one_stage_each(2)).run()
        assert household.losses == wanted.losses
        assert member.compute.device is twin
    assert not household.warned


async def test_a_model_that_a_card_computes_wrong_is_its_processors() -> None:
    """It is found before the job begins; the next job may have the card again."""
    job, wanted = momentum_job(), undisturbed(momentum_job())
    async with accelerated(2, "b") as (household, compute):
        compute["b"].compute_wrong("aten.addmm.default")
        await household.holder_run(job, one_stage_each(2)).run()
        assert_undisturbed(household, job, wanted)
        ((who, text),) = household.warned
        assert who == "b"
        assert "does not compute this model, the CPU does" in text
        assert household.members["b"].compute.device is HOST
        compute["b"].compute_wrong("aten.addmm.default", how=lambda tensor: tensor)
        await household.holder_run(make_job("custom_loss"), one_stage_each(2)).run()
        assert household.members["b"].compute.device is compute["b"]


async def test_a_model_that_a_card_cannot_compute_is_its_processors() -> None:
    """Lengths of packed sequences are on the host; made-up ones do not show that."""
    made = model_idioms.make("packed_gru", 32)
    case = Case("packed_gru", devices=2, batch_size=8, steps=3)
    async with accelerated(2, "ab") as (household, _):
        await household.holder_run(job_of(case, made), one_stage_each(2, 3)).run()
        assert _reasons(household) == ["start"]
        assert [household.members[name].compute.device for name in "ab"] == [HOST, HOST]
    assert sorted(who for who, _ in household.warned) == ["a", "b"]
    assert all("does not compute this model, the CPU does" in text for _, text in household.warned)


@pytest.mark.parametrize("twins", ["ab", "b"])
async def test_statistics_of_a_group_whose_weights_are_frozen(
    monkeypatch: pytest.MonkeyPatch, twins: str
) -> None:
    """There is no gradient that they could go out with."""
    force(monkeypatch, [dealt(2, 2), divided(4)])

    def frozen() -> Job:
        torch.manual_seed(0)
        layers = [nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 6), nn.Linear(6, 5)]
        for layer in layers[:2]:
            layer.requires_grad_(False)
        data = [(torch.randn(6), torch.tensor(number % 5)) for number in range(48)]
        ways = {"optimizer": SGD(lr=0.05), "batch_size": 16, "micro_batch": 4}
        return Job(nn.Sequential(*layers), data, cross_entropy, **ways)  # type: ignore[arg-type]

    states = []
    for chosen in (twins, ""):
        job = frozen()
        async with accelerated(3, chosen) as (household, _):
            await household.holder_run(job, TrainOptions(3, steps=3)).run()
            assert _reasons(household) == ["start"]
        states.append(job.model.state_dict())
    for name, tensor in states[1].items():
        assert torch.equal(tensor, states[0][name]), name


ROUNDED = (
    *("aten.addmm.default", "aten.mm.default", "aten.convolution.default"),
    *("aten.add_.Tensor", "aten.mul_.Tensor", "aten.mul_.Scalar", "aten.lerp_.Scalar"),
    *("aten.addcmul_.default", "aten.addcdiv_.default", "aten.sqrt.default", "aten.div.Tensor"),
)
"""Of forwards, backwards, updates, and of what is put together of running statistics."""


def _round_otherwise(twin: TwinDevice) -> None:
    """As another kind of device does: in the last bits."""
    for operator in ROUNDED:
        twin.compute_wrong(operator, how=lambda result: result.mul_(1 + 2**-48))


@pytest.mark.parametrize(
    ("twins", "plan", "case"),
    [
        ("b", [divided(2, 2)], Case("mlp", 2)),
        ("a", [dealt(3, 1)], Case("cnn", 2, optimizer=AdamW(lr=0.01), clip_grad_norm=0.5)),
        ("b", [dealt(2, 2)], Case("frozen", 2)),
        ("abde", [divided(1, 3), divided(2, 1, 1)], Case("gpt", 5, optimizer=AdamW(lr=0.01))),
    ],
    ids=str,
)
async def test_a_group_of_several_kinds_has_the_same_weights(
    monkeypatch: pytest.MonkeyPatch, twins: str, plan: list[Stage], case: Case
) -> None:
    """To the bit, whatever each rounds; and with them averages and running statistics."""
    force(monkeypatch, plan)
    case = replace(case, steps=6, dtype=torch.float64)
    made, trained = zoo.make(case.model, dtype=case.dtype), list[HostedStages]()
    async with accelerated(case.devices, twins) as (household, compute):
        for name, twin in compute.items():
            twin.kind = f"twin of {name}"
            _round_otherwise(twin)
        listen = on_step(household, 6, lambda: trained.extend(engaged(household)))
        job = replace(job_of(case, made), ema=0.9)
        await household.holder_run(job, TrainOptions(case.devices, steps=6), listen).run()
        check_replicas(trained, 6)
        trained.clear()
        said = " ".join(household.plan.changes_results)
        assert all(twin.kind in said for twin in compute.values())
        assert _reasons(household) == ["start"]
        assert not household.warned
    found = difference(outcome_of(household.losses, made), plain_torch(case))
    assert 0.0 < found.state < TOLERANCE
    assert found.loss < TOLERANCE


@pytest.mark.parametrize(
    ("count", "twins", "lost"),
    [(3, "b", "b"), (3, "b", "c"), (2, "b", "b"), (2, "a", "b"), (3, "bc", "card of c")],
)
async def test_a_group_of_several_kinds_loses_a_member(count: int, twins: str, lost: str) -> None:
    """Its card or itself; who is left is of several kinds, of one, or alone."""
    case = Case("mlp", count, steps=10, dtype=torch.float64)
    made, killing = zoo.make(case.model, dtype=case.dtype), list[asyncio.Task[None]]()
    async with accelerated(count, twins, OFTEN_COPIED) as (household, compute):

        def lose() -> None:
            if lost in compute or len(lost) == 1:
                killing.append(asyncio.create_task(household.mesh.kill(lost)))
            else:
                compute[lost[-1]].fail_now()

        chosen = TrainOptions(count, planner="dp", steps=10)
        run = household.holder_run(job_of(case, made), chosen, on_step(household, 4, lose))
        await run.run()
        await asyncio.gather(*killing)
        assert _reasons(household) == ["start", "failure"]
        left = count - len(killing)
        assert [len(stage.devices) for stage in household.plan.stages] == [left]
        if killing:
            await household.members[lost].close()
    found = difference(outcome_of(household.losses, made), plain_torch(case))
    assert max(found.loss, found.state) < TOLERANCE


class _FailsLate(JobMemory):
    """Of a member whose card fails once its part is planned, and before it is built."""

    compute: ComputeThread

    def short_of(self, needed: MemoryBudgets, *, engaged: bool) -> MemoryShortage | None:
        if not self.compute.device.is_host:
            self.compute.give_up_device(AcceleratorFailed("the card has fallen off the bus"))
        return super().short_of(needed, engaged=engaged)


async def test_a_card_that_fails_before_its_part_is_built_makes_a_group_of_several_kinds() -> None:
    """The others hear of it before any update is made where cards of one kind would make it."""
    case = Case("mlp", 2, steps=4, dtype=torch.float64)
    made, trained = zoo.make(case.model, dtype=case.dtype), list[HostedStages]()
    async with accelerated(2, "ab") as (household, compute):
        for twin in compute.values():
            _round_otherwise(twin)
        member = household.members["b"]
        memory = _FailsLate(member.compute, None, None)
        memory.compute = member.compute
        member.service.measures.memory = memory
        listen = on_step(household, 4, lambda: trained.extend(engaged(household)))
        chosen = TrainOptions(2, planner="dp", steps=4)
        await household.holder_run(job_of(case, made), chosen, listen).run()
        check_replicas(trained, 4)
        trained.clear()
        assert member.compute.device is HOST
        assert _reasons(household) == ["start"]


@pytest.mark.parametrize("planners", [("single", "dp"), ("dp", "single"), ("dp", "pp")])
async def test_a_checkpoint_goes_into_a_group_of_several_kinds_and_out(
    tmp_path: Path, planners: tuple[str, str]
) -> None:
    case = Case("mlp", 2, optimizer=AdamW(lr=0.01), steps=8, dtype=torch.float64)
    losses: list[float] = []
    for steps, planner in zip((4, 8), planners, strict=True):
        made = zoo.make(case.model, dtype=case.dtype)
        chosen = TrainOptions(2, planner=planner, steps=steps, checkpoint=tmp_path)
        chosen = replace(chosen, resume=tmp_path if steps > 4 else None)
        async with accelerated(2, "a") as (household, _):
            await household.holder_run(job_of(case, made), chosen).run()
        losses += household.losses
    found = difference(outcome_of(losses, made), plain_torch(case))
    assert max(found.loss, found.state) < TOLERANCE


async def test_without_rounds_devices_of_different_kinds_are_no_group() -> None:
    async with accelerated(3, "c") as (household, _):
        chosen = replace(options(3, AsyncOptions(), 3), planner="dp")
        with pytest.raises(PlanError, match=r"a: cpu, b: cpu, c: twin\) share layers in whole"):
            await household.holder_run(make_job(), chosen).run()


async def test_a_plan_says_where_kinds_meet() -> None:
    async with accelerated(2, "b") as (household, _):
        await household.holder_run(make_job(), one_stage_each(2, 2)).run()
        (change,) = household.plan.changes_results
    assert "b: twin" in change
    assert "the last bits of a result depend on which device computes what" in change
