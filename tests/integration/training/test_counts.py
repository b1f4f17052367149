"""Micro-batches are weighed by what they count: the curve is the whole mini-batch's, cut anyhow."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from p2ptrain.events import Warned
from p2ptrain.job.asynchrony import AsyncOptions
from p2ptrain.job.job import Job, MicroBatch
from p2ptrain.job.train_options import TrainOptions
from p2ptrain.model.stage.optimizer_spec import SGD, AdamW
from tests.integration.training.group_plans import DEALT, Stage, dealt, device_count, divided, force
from tests.integration.training.household import Devices, devices

WORDS, LENGTH, SAMPLES, BATCH, STEPS = 11, 6, 36, 12, 4
IGNORED = -100
Loss = Callable[[Tensor, Tensor], Tensor]


def _model(dtype: torch.dtype = torch.float32) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        layers = [nn.Embedding(WORDS, 8), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh()]
        return nn.Sequential(*layers, nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, WORDS)).to(
            dtype
        )


def _data(empty: Callable[[int], bool] = lambda _: False) -> list[tuple[Tensor, Tensor]]:
    """Padded samples; `empty` ones have no valid token at all."""
    generator = torch.Generator().manual_seed(3)
    made = []
    for index in range(SAMPLES):
        words = torch.randint(0, WORDS, (LENGTH,), generator=generator)
        length = int(torch.randint(2, LENGTH + 1, (), generator=generator))
        valid = (torch.arange(LENGTH) < length) & (not empty(index))
        made.append((words, torch.where(valid, words, IGNORED)))
    return made


def next_word(logits: Tensor, labels: Tensor) -> Tensor:
    """The mean over valid next words."""
    return cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def words_counted(_inputs: Tensor, labels: Tensor) -> int:
    return int((labels[:, 1:] != IGNORED).sum())


def _job(data: Any, dtype: torch.dtype, micro_batch: MicroBatch, **more: Any) -> Job:
    settings = {
        "loss": next_word,
        "optimizer": SGD(lr=0.1, momentum=0.9, weight_decay=0.01),
        **more,
    }
    return Job(_model(dtype), data, batch_size=BATCH, micro_batch=micro_batch, epochs=9, **settings)


def by_plain_torch(
    job: Job,
    count: Callable[[Tensor, Tensor], float] = words_counted,
    micro_batch: int = BATCH,
    steps: int = STEPS,
) -> list[float]:
    """The contract's loop."""
    optimizer, losses = job.optimizer.build(list(job.model.parameters())), []
    assert job.loss is not None
    for step in range(steps):
        epoch, place = divmod(step, SAMPLES // BATCH)
        order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(job.seed + epoch))
        batch = order[place * BATCH : (place + 1) * BATCH]
        x, y = (torch.stack([job.data[i][k] for i in batch.tolist()]) for k in (0, 1))
        total, every = 0.0, count(x, y)
        for first in range(0, BATCH, micro_batch):
            inputs, targets = x[first : first + micro_batch], y[first : first + micro_batch]
            if not (counted := count(inputs, targets)):
                continue
            weight = counted / every
            loss = job.loss(job.model(inputs), targets)
            (loss * weight).backward()
            total += loss.item() * weight
        if job.clip_grad_norm is not None:
            torch.nn.utils.clip_grad_norm_(job.model.parameters(), job.clip_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses


async def trained(job: Job, count: int, planner: str = "pp", **more: Any) -> Devices:
    async with devices(count) as household:
        options = TrainOptions(wait_for=count, planner=planner, steps=STEPS, **more)
        await household.holder_run(job, options).run()
    return household


def _same_weights(one: Job, other: Job) -> bool:
    pairs = zip(one.model.parameters(), other.model.parameters(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


def _some(index: int) -> bool:
    return index % 3 == 0


def _most(index: int) -> bool:
    """So that a mini-batch counts nothing."""
    return index not in (3, 17)


@pytest.mark.parametrize("empty", [lambda _: False, _some, _most], ids=["none", "some", "most"])
@pytest.mark.parametrize(("micro_batch", "count"), [(2, 3), (5, 2), (12, 1)])
async def test_a_pipeline_trains_bit_for_bit_by_the_contract_s_loop(
    micro_batch: int, count: int, empty: Callable[[int], bool]
) -> None:
    job, plain = (_job(_data(empty), torch.float32, micro_batch) for _ in range(2))
    household = await trained(job, count)
    assert household.losses == by_plain_torch(plain, micro_batch=micro_batch)
    assert _same_weights(job, plain)
    assert not household.plan.changes_results
    told = [event.message for event in household.events if isinstance(event, Warned)]
    assert any("counts nothing" in message for message in told) is (empty is _most)


PLANS: Sequence[tuple[Sequence[Stage], MicroBatch]] = [
    ([divided(3, 2)], 5),
    ([dealt(2, 1)], 4),
    ([divided(1, 1), divided(1, 1)], 2),
    ([Stage((1,), slack=1), Stage((1,), slack=1), Stage((1,), slack=1)], 1),
    ([dealt(2, 2), divided(2, 1)], 3),
    ([divided(2, 1), Stage((2, 2), DEALT, slack=1)], 3),
]


@pytest.mark.parametrize("empty", [_some, _most], ids=["some", "most"])
@pytest.mark.parametrize(("plan", "micro_batch"), PLANS)
async def test_any_plan_trains_the_whole_mini_batch_s_mean(
    plan: Sequence[Stage],
    micro_batch: MicroBatch,
    empty: Callable[[int], bool],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    force(monkeypatch, plan)
    sgd = {"clip_grad_norm": 0.5} if len(plan) == 2 else {}
    job, plain = (_job(_data(empty), torch.float64, micro_batch, **sgd) for _ in range(2))
    household = await trained(job, device_count(plan), "auto")
    assert household.losses == pytest.approx(by_plain_torch(plain), abs=1e-12)
    for name, value in plain.model.state_dict().items():
        assert torch.allclose(job.model.state_dict()[name], value, rtol=0, atol=1e-10), name


async def test_an_omitted_micro_batch_is_the_planner_s() -> None:
    job, plain = (_job(_data(_some), torch.float64, None) for _ in range(2))
    household = await trained(job, 3, "dp")
    assert household.losses == pytest.approx(by_plain_torch(plain), abs=1e-12)
    assert not household.plan.changes_results


@pytest.mark.parametrize("mode", [{}, {"planner": "dp"}])
async def test_without_a_barrier_the_first_losses_are_plain_torch_s(mode: dict[str, str]) -> None:
    job, plain = (_job(_data(_some), torch.float64, None) for _ in range(2))
    household = await trained(job, 2, mode.get("planner", "pp"), asynchrony=AsyncOptions())
    assert household.losses[0] == pytest.approx(by_plain_torch(plain, steps=1)[0], abs=1e-12)
    assert len(household.losses) == STEPS


async def test_without_a_barrier_a_mini_batch_that_counts_nothing_changes_nothing() -> None:
    job = _job(_data(lambda _: True), torch.float32, None, optimizer=AdamW(lr=0.1))
    before = {name: value.clone() for name, value in job.model.state_dict().items()}
    household = await trained(job, 2, asynchrony=AsyncOptions())
    assert household.losses == [0.0] * STEPS
    assert all(torch.equal(before[name], v) for name, v in job.model.state_dict().items())
