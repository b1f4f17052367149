"""Units in front of the first trained weight: no gradient comes back to them."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch

from p2ptrain.events import Eval
from p2ptrain.job.asynchrony import AsyncOptions
from p2ptrain.job.train_options import TrainOptions
from p2ptrain.messages.tensors import StreamId
from p2ptrain.recovery.state_report import StateKind
from p2ptrain.runtime.io.tensor_router import GRADIENTS, TensorRouter
from p2ptrain.state.snapshot_store import SnapshotStore
from p2ptrain.state.transfer_client import TransferClient
from tests.integration.training.delayed import by_formula, cut_of, delayed_job, options
from tests.integration.training.group_plans import Stage, dealt, device_count, divided, force
from tests.integration.training.household import OFTEN_COPIED, devices
from tests.integration.training.jobs import (
    assert_undisturbed,
    momentum_job,
    on_step,
    one_stage_each,
    undisturbed,
)
from tests.support import zoo
from tests.support.curves import Case, difference, job_of, outcome_of, plain_torch

FRONT = "frozen_layers"
"""Six frozen layers, then three that are trained."""
ONE = divided(4)
STEPS = 5

Sent = Counter[tuple[int, str]]


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> Sent:
    """How many pieces went to which stage, by what they are."""
    counts: Sent = Counter()
    send = TensorRouter.send_values

    async def counted(
        router: TensorRouter, peer: str, line: StreamId, *args: Any, **more: Any
    ) -> None:
        counts[line.stage, line.flow] += 1
        await send(router, peer, line, *args, **more)

    monkeypatch.setattr(TensorRouter, "send_values", counted)
    return counts


async def test_no_gradient_is_sent_there_and_losses_are_plain_torchs(
    sent: Sent, monkeypatch: pytest.MonkeyPatch
) -> None:
    force(monkeypatch, [ONE] * 6)
    case, made = Case(FRONT, devices=6, steps=STEPS), zoo.make(FRONT)
    frozen = {name for name, p in made.model.named_parameters() if not p.requires_grad}
    async with devices(6) as household:
        job = replace(job_of(case, made), eval_data=made.data)
        await household.holder_run(job, TrainOptions(wait_for=6, steps=STEPS)).run()
    assert any(isinstance(event, Eval) for event in household.events)
    only_frozen = [frozen.issuperset(stage.parameters) for stage in household.plan.stages]
    assert only_frozen == [True] * 4 + [False] * 2
    assert [sent[stage, GRADIENTS] for stage in range(6)] == [0] * 4 + [STEPS * 4, 0]
    ours, reference = outcome_of(household.losses, made), plain_torch(case)
    assert ours.losses == reference.losses
    assert difference(ours, reference).state == 0.0


SHARING = [
    [divided(2, 2), divided(4)],
    [divided(4), divided(3, 1)],
    [divided(1, 3), divided(2, 2)],
    [dealt(2, 2), divided(4)],
    [divided(4), dealt(1, 3)],
    [dealt(3, 1), dealt(2, 2)],
    [Stage((4,), slack=1), Stage((4,), slack=1)],
]


@pytest.mark.parametrize(
    ("name", "plan"),
    [
        *((FRONT, plan) for plan in SHARING),
        ("frozen", [dealt(3, 1), dealt(2, 2)]),  # its BatchNorm still counts
    ],
    ids=str,
)
async def test_whatever_shares_the_front_and_what_follows_it(
    monkeypatch: pytest.MonkeyPatch, name: str, plan: Sequence[Stage]
) -> None:
    force(monkeypatch, plan)
    count = device_count(plan)
    case = Case(name, devices=count, steps=STEPS, dtype=torch.float64)
    made = zoo.make(name, dtype=torch.float64)
    async with devices(count) as household:
        await household.holder_run(
            job_of(case, made), TrainOptions(wait_for=count, steps=STEPS)
        ).run()
    found = difference(outcome_of(household.losses, made), plain_torch(case))
    assert found.loss < 1e-8
    assert found.state < 1e-8


async def test_the_front_runs_no_further_ahead_than_what_follows_has_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Sixteen micro-batches, of which the second stage has room for a few at a time."""
    force(monkeypatch, [Stage((1,)), Stage((1,))])
    case = Case(FRONT, devices=2, steps=STEPS, micro_batch=1)
    made = zoo.make(FRONT)
    async with devices(2) as household:
        await household.holder_run(job_of(case, made), TrainOptions(wait_for=2, steps=STEPS)).run()
    assert household.losses == plain_torch(case).losses


async def test_the_trained_weights_come_home_without_what_is_there_already(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The holder's own module has it."""
    force(monkeypatch, [ONE] * 4)
    read: list[str] = []
    arrived = TransferClient._arrived

    def noted(client: TransferClient, entry: Any, *of: Any) -> None:
        if client._mesh.name == "a":
            read.append(entry.name)
        arrived(client, entry, *of)

    job = momentum_job(epochs=20, name=FRONT)
    frozen = {name for name, p in job.model.named_parameters() if not p.requires_grad}
    with patch.object(TransferClient, "_arrived", noted):
        async with devices(4) as household:
            await household.holder_run(job, TrainOptions(wait_for=4, steps=STEPS)).run()
            assert_undisturbed(household, job, undisturbed(momentum_job(20, FRONT), STEPS))
            away = {name for stage in household.plan.stages[1:] for name in stage.parameters}
    assert away & frozen, "some of it was sent to others"
    assert read
    assert not frozen.intersection(name.removeprefix("model:") for name in read)


async def test_without_a_barrier_too(sent: Sent) -> None:
    job, how, steps = delayed_job(FRONT), AsyncOptions(), 12
    frozen = {name for name, p in job.model.named_parameters() if not p.requires_grad}
    async with devices(3) as household:
        await household.holder_run(job, options(3, how, steps)).run()
    names = cut_of(household)
    for stage in range(2):
        assert bool(sent[stage, GRADIENTS]) is not frozen.issuperset(names[stage])
    assert_undisturbed(household, job, by_formula(delayed_job(FRONT), names, how, steps))


@pytest.mark.parametrize("victim", ["b", "c", "d"])
async def test_a_device_dies_and_not_one_bit_is_lost(
    victim: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copies share what is frozen: those of a stage, those at its neighbour, those at rest."""
    copied: list[bool] = []
    keep = SnapshotStore.put

    def noted(store: SnapshotStore, kind: StateKind, *of: Any) -> None:
        earlier = [store.of(entry) for entry in store.entries() if entry.kind is kind]
        keep(store, kind, *of)
        tensors = of[3]
        if kind in (StateKind.KEPT, StateKind.REPLICA):
            copied.extend(
                was.tensors[name].data_ptr() != tensors[name].data_ptr()
                for was in earlier
                if was is not None and was.tensors.keys() == tensors.keys()
                for name in store.unchanging & tensors.keys()
            )

    monkeypatch.setattr(SnapshotStore, "put", noted)
    job = momentum_job(epochs=20, name=FRONT)
    killing: list[asyncio.Task[None]] = []
    async with devices(4, settings=OFTEN_COPIED) as household:
        kill = partial(household.mesh.kill, victim)
        listen = on_step(household, 14, lambda: killing.append(asyncio.create_task(kill())))
        await household.holder_run(job, one_stage_each(4, 24), listen).run()
        await asyncio.gather(*killing)
        assert_undisturbed(household, job, undisturbed(momentum_job(20, FRONT), 24))
    assert copied
    assert not any(copied)
