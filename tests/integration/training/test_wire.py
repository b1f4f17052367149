"""Rounded values between devices: announced, a little different, the same bits on all replicas."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from p2ptrain.console import describe
from p2ptrain.errors import ProtocolError
from p2ptrain.events import Event, Step
from p2ptrain.job.train_options import TrainOptions
from p2ptrain.messages.assignment import Assignment, StageAssignment
from p2ptrain.messages.round_orders import GenerationKey
from p2ptrain.model.stage.optimizer_spec import SGD
from p2ptrain.model.wire.tensor_layout import WireFormat
from p2ptrain.recovery.version import Version
from p2ptrain.runtime.allreduce_buckets import BucketReduction, RingPlace
from p2ptrain.worker.hosted_stages import HostedStages
from tests.integration.training.group_plans import Stage, dealt, device_count, divided, force
from tests.integration.training.household import Devices, devices
from tests.integration.training.replicas import check_replicas, engaged
from tests.support import zoo
from tests.support.curves import Case, difference, job_of, outcome_of, plain_torch
from tests.support.reference import Outcome

BF16, INT8 = WireFormat.BF16, WireFormat.INT8
ROUNDED = pytest.mark.parametrize("wire", [BF16, INT8])


def assignment(wire: WireFormat) -> Assignment:
    place = StageAssignment(0, 3, devices=("a",), shares=(4,), warmup=1)
    return Assignment(
        GenerationKey("job", 1),
        "a",
        "digest",
        (place,),
        4,
        4,
        SGD(),
        0,
        False,
        Version(0, 0),
        wire=wire,
    )


@pytest.mark.parametrize("wire", WireFormat)
def test_the_choice_travels_with_the_assignment(wire: WireFormat) -> None:
    assert Assignment.from_bytes(assignment(wire).to_bytes()) == assignment(wire)


def test_an_unknown_format_is_refused() -> None:
    data = assignment(BF16).to_bytes().replace(b"dwiredbf16", b"dwiredbf17")
    with pytest.raises(ProtocolError, match="bf17"):
        Assignment.from_bytes(data)


async def trained(
    monkeypatch: pytest.MonkeyPatch,
    plan: Sequence[Stage],
    wire: WireFormat,
    model: str = "mlp",
) -> tuple[Outcome, Outcome, Devices]:
    """What training by `plan` gives, and plain torch."""
    force(monkeypatch, plan)
    case = Case(model, devices=device_count(plan), steps=3)
    made, here = zoo.make(case.model), list[HostedStages]()
    async with devices(case.devices) as household:

        def listen(event: Event) -> None:
            household.events.append(event)
            if isinstance(event, Step) and event.step == case.steps:
                here.extend(engaged(household))

        options = TrainOptions(wait_for=case.devices, steps=case.steps, wire=wire)
        await household.holder_run(job_of(case, made), options, listen).run()
    check_replicas(here, case.steps)
    return outcome_of(household.losses, made), plain_torch(case), household


@ROUNDED
@pytest.mark.parametrize("model", ["mlp", "cnn", "residual"])
async def test_replicas_stay_equal_and_results_change_a_little(
    monkeypatch: pytest.MonkeyPatch, model: str, wire: WireFormat
) -> None:
    plan = [divided(4), dealt(1, 2, 1)] if model == "cnn" else [dealt(2, 2)]
    outcome, exact, household = await trained(monkeypatch, plan, wire, model)
    found = difference(outcome, exact)
    assert 1e-6 < found.state < 0.05  # float32 alone would be off by some 1e-7
    assert household.plan.wire == wire.value
    assert f"--wire {wire.value}" in describe(household.plan)


async def test_exact_is_not_worth_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    _, _, household = await trained(monkeypatch, [divided(4), divided(4)], WireFormat.EXACT)
    assert household.plan.wire == "exact"
    assert "--wire" not in describe(replace(household.plan))


@ROUNDED
@pytest.mark.parametrize("size", [2, 3, 5])
def test_a_rounded_ring_ends_with_equal_bits_near_the_sum(size: int, wire: WireFormat) -> None:
    generator = torch.Generator().manual_seed(size)
    parts = [torch.randn(300 * size, generator=generator) for _ in range(size)]
    sums = [
        BucketReduction(RingPlace(k, size), part.clone(), 1, wire) for k, part in enumerate(parts)
    ]
    due, draw = [(place, 0) for place in range(size)], random.Random(0)
    while due:
        place, step = due.pop(draw.randrange(len(due)))
        bits, chunk = sums[place].outgoing(step)
        values = chunk.clone()
        sums[place].sent(step)
        after = (place + 1) % size
        following = sums[after].receive(step, bits, values)
        due += [] if following is None else [(after, following)]
    for total in sums:
        assert torch.equal(total.flat, sums[0].flat)
    error = (sums[0].flat - sum(parts)).abs().max()
    assert 0 < error < 0.1
