"""Micro-batches are weighed by what they count: the curve is the whole mini-batch's, cut anyhow."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from p2ptrain import events
from p2ptrain.errors import CaptureError, ScriptError
from p2ptrain.events import Eval, Event, Recovered, Step
from p2ptrain.holder.snapshots.snapshot_manager import SnapshotManager
from p2ptrain.holder.start import loss_count
from p2ptrain.holder.start.prepare import prepare
from p2ptrain.job.job import Job, MicroBatch
from p2ptrain.job.train_options import TrainOptions
from p2ptrain.model.stage.optimizer_spec import SGD, AdamW
from p2ptrain.plan.types.allocation import TileShape
from tests.integration.training.group_plans import DEALT, Stage, dealt, device_count, divided, force
from tests.integration.training.household import NO_FIRST_WEIGHTS, Devices, devices
from tests.integration.training.test_tiles import forced

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


@pytest.mark.parametrize(
    ("micro_batch", "count", "empty"),
    [
        (2, 3, lambda _: False),
        (2, 3, _most),
        (5, 2, _some),
        (12, 1, lambda _: False),
        (12, 1, _most),
    ],
    ids=["2-3-none", "2-3-most", "5-2-some", "12-1-none", "12-1-most"],
)
async def test_a_pipeline_trains_bit_for_bit_by_the_contract_s_loop(
    micro_batch: int, count: int, empty: Callable[[int], bool]
) -> None:
    job, plain = (_job(_data(empty), torch.float32, micro_batch) for _ in range(2))
    household = await trained(job, count)
    assert household.losses == by_plain_torch(plain, micro_batch=micro_batch)
    assert _same_weights(job, plain)
    assert not household.plan.changes_results
    told = [event.message for event in household.events if isinstance(event, events.Warning)]
    assert any("counts nothing" in message for message in told) is (empty is _most)
    steps = [event for event in household.events if isinstance(event, events.Step)]
    assert [e.tokens_per_s for e in steps] == [
        pytest.approx(LENGTH * e.samples_per_s) for e in steps
    ]


async def test_weights_of_classes_are_summed_in_float64() -> None:
    """In float32 the sum, and so the curve, would depend on the order of the samples."""
    generator = torch.Generator().manual_seed(8)
    weight = 0.1 + torch.rand(WORDS, generator=generator)

    def loss(output: Tensor, labels: Tensor) -> Tensor:
        return cross_entropy(output.flatten(0, 1), labels.flatten(), weight)

    def counted(_inputs: Tensor, labels: Tensor) -> float:
        kept = labels[labels != IGNORED]
        return float(weight.double()[kept].sum())

    job, plain = (_job(_data(), torch.float32, 3, loss=loss) for _ in range(2))
    household = await trained(job, 2)
    assert household.losses == by_plain_torch(plain, counted, micro_batch=3)
    assert _same_weights(job, plain)


PLANS: Sequence[tuple[Sequence[Stage], MicroBatch]] = [
    ([divided(3, 2)], 5),
    ([dealt(2, 1)], 4),
    ([divided(1, 1), divided(1, 1)], 2),
    ([Stage((1,), slack=1), Stage((1,), slack=1), Stage((1,), slack=1)], 1),
    ([dealt(2, 2), divided(2, 1)], 3),
    ([divided(2, 1), Stage((2, 2), DEALT, slack=1)], 3),
]


@pytest.mark.parametrize(
    ("plan", "micro_batch", "empty"),
    [*((*planned, _most) for planned in PLANS), (*PLANS[0], _some), (*PLANS[4], _some)],
)
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
    household = await trained(job, 2, mode.get("planner", "pp"), mode="async")
    assert household.losses[0] == pytest.approx(by_plain_torch(plain, steps=1)[0], abs=1e-12)
    assert len(household.losses) == STEPS


async def test_without_a_barrier_a_mini_batch_that_counts_nothing_changes_nothing() -> None:
    job = _job(_data(lambda _: True), torch.float32, None, optimizer=AdamW(lr=0.1))
    before = {name: value.clone() for name, value in job.model.state_dict().items()}
    household = await trained(job, 2, mode="async")
    assert household.losses == [0.0] * STEPS
    assert all(torch.equal(before[name], v) for name, v in job.model.state_dict().items())


async def test_a_last_stage_that_is_lost_is_rebuilt_with_its_weights(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What it is fed again weighs what it did."""
    monkeypatch.setattr(SnapshotManager, "wants", lambda _copies, step: step == 2)
    job, plain = (_job(_data(_some), torch.float32, 4) for _ in range(2))
    steps, killing = 10, []
    async with devices(3, settings=NO_FIRST_WEIGHTS) as household:

        def listen(event: Event) -> None:
            household.events.append(event)
            if isinstance(event, Step) and event.step == 6:
                killing.append(asyncio.create_task(household.mesh.kill("c")))

        options = TrainOptions(wait_for=3, planner="pp", steps=steps)
        await household.holder_run(job, options, listen).run()
        await asyncio.gather(*killing)
    (recovered,) = (event for event in household.events if isinstance(event, Recovered))
    assert recovered.replayed_steps <= 1
    assert household.losses == by_plain_torch(plain, micro_batch=4, steps=steps)
    assert _same_weights(job, plain)


async def test_maps_in_tiles_are_weighed_by_their_pixels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Labels of pixels, of which most of some images are left out."""

    def segmenting() -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(2)
            layers = [nn.Conv2d(2, 6, 3, padding=1), nn.Tanh(), nn.Conv2d(6, 6, 3, padding=1)]
            return nn.Sequential(*layers, nn.Tanh(), nn.Conv2d(6, 4, 1)).double()

    generator = torch.Generator().manual_seed(1)
    data = []
    for index in range(SAMPLES):
        image = torch.randn(2, 8, 8, generator=generator, dtype=torch.float64)
        labels = torch.randint(0, 4, (8, 8), generator=generator)
        data.append((image, labels.where(torch.rand(8, 8, generator=generator) < index % 3, 255)))
    loss = partial(cross_entropy, ignore_index=255)
    job, plain = (Job(segmenting(), data, loss, SGD(lr=0.1), BATCH, 2, epochs=9) for _ in range(2))
    forced(monkeypatch, TileShape((0.5, 0.5), (1.0,), (0, 2)), (1, 1), behind="c")
    household = await trained(job, 3, "auto")
    wanted = by_plain_torch(plain, lambda _x, labels: int((labels != 255).sum()))
    assert household.losses == pytest.approx(wanted, abs=1e-10)


def _mean_over_mask(output: Tensor, target: Tensor) -> Tensor:
    mask = (target != 0).to(output.dtype)
    errors = (output.mean(-1) - target).square() * mask
    return errors.sum() / mask.sum()


def _mask_count(_inputs: Tensor, target: Tensor) -> int:
    return int((target != 0).sum())


@pytest.mark.parametrize(
    ("normalizer", "size"), [(None, BATCH), (lambda batch: (batch[1] != 0).sum(), None)]
)
async def test_a_normalizer_counts_for_a_mean_of_one_s_own(normalizer: Any, size: Any) -> None:
    data = [(words, words * (labels != IGNORED)) for words, labels in _data()]
    more = {"loss": _mean_over_mask, "normalizer": normalizer}
    prepared = prepare(_job(data, torch.float64, None, **more), TrainOptions(local=True))
    assert prepared.job.micro_batch == size
    job, plain = (_job(data, torch.float64, 5, **more) for _ in range(2))
    household = await trained(job, 2)
    wanted = by_plain_torch(plain, _mask_count)
    if normalizer is None:
        assert household.losses != pytest.approx(wanted, abs=1e-6)
        assert "micro_batch=12" in household.plan.changes_results[0]
    else:
        assert household.losses == pytest.approx(wanted, abs=1e-12)
        assert not household.plan.changes_results


def _weighted_mean(output: Tensor, weights: Tensor) -> Tensor:
    return (output.mean(-1).square() * weights).sum() / weights.sum()


async def test_a_normalizer_may_count_what_is_no_whole_number() -> None:
    generator = torch.Generator().manual_seed(5)
    data = [(words, torch.rand(LENGTH, generator=generator)) for words, _ in _data()]
    more = {"loss": _weighted_mean, "normalizer": lambda batch: batch[1].sum()}
    household = await trained(_job(data, torch.float32, 5, **more), 2)
    wanted = by_plain_torch(_job(data, torch.float32, 5, **more), lambda _, w: float(w.sum()))
    assert household.losses == pytest.approx(wanted, rel=1e-5)
    assert not household.plan.changes_results


@pytest.mark.parametrize(
    ("normalizer", "words"),
    [
        (lambda batch: batch["mask"], "the normalizer failed: TypeError"),
        (lambda batch: "many", "the normalizer failed: ValueError"),
        (lambda batch: -1, "the normalizer gave -1"),
        (lambda batch: float("nan"), "the normalizer gave nan"),
        (lambda batch: batch[1], "the normalizer failed"),
    ],
)
def test_a_normalizer_that_gives_no_count_is_found_before_anything(
    normalizer: Any, words: str
) -> None:
    with pytest.raises(ScriptError, match=words):
        prepare(_job(_data(), torch.float32, 4, normalizer=normalizer), TrainOptions(local=True))


def _right(output: Any, batch: Any) -> Tensor:
    return (output["logits"].argmax(-1) == batch["labels"]).double().mean()


class _OwnLoss(nn.Module):
    """As transformers' models: the loss in its output where there are labels."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.layers = _model(dtype)

    def forward(self, words: Tensor, labels: Tensor | None = None) -> dict[str, Tensor | None]:
        logits = self.layers(words)
        loss = None if labels is None else next_word(logits, labels)
        return {"loss": loss, "logits": logits}


async def test_a_model_computes_its_own_loss_from_batches_that_are_dicts() -> None:
    pairs = _data(_some)
    data = [{"words": words, "labels": labels} for words, labels in pairs]
    looks = {"eval_data": data, "metrics": {"right": _right}}
    job = Job(_OwnLoss(torch.float64), data, None, SGD(lr=0.1), BATCH, 5, epochs=9, **looks)
    plain = _job(pairs, torch.float64, None, optimizer=SGD(lr=0.1))
    household = await trained(job, 3)
    assert household.losses == pytest.approx(by_plain_torch(plain), abs=1e-12)
    seen = [event.metrics for event in household.events if isinstance(event, Eval)]
    labels, output = (
        torch.stack([y for _, y in pairs]),
        job.model(torch.stack([x for x, _ in pairs])),
    )
    assert seen[-1]["right"] == pytest.approx(float(_right(output, {"labels": labels})))
    assert "loss" in seen[-1]


def test_a_batch_without_what_the_loss_needs_is_refused_in_one_line() -> None:
    data = [{"words": words} for words, _ in _data()]
    job = Job(_OwnLoss(torch.float32), data, None, SGD(lr=0.1), BATCH)
    with pytest.raises(CaptureError, match=r"^loss=None, and the loss in .* is None.*labels"):
        prepare(job, TrainOptions(local=True))


def test_a_model_without_a_loss_is_refused_in_one_line() -> None:
    data = [{"input": words} for words, _ in _data()]
    job = Job(_model(), data, None, SGD(lr=0.1), BATCH)
    with pytest.raises(
        CaptureError, match=r"loss=None, so the model must return its loss.*a tensor of"
    ):
        prepare(job, TrainOptions(local=True))


def _to_the_longest(samples: Sequence[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    longest = max(2, *(int((labels != IGNORED).sum()) for _, labels in samples))
    words, labels = (torch.stack([s[k] for s in samples])[:, :longest] for k in (0, 1))
    return {"words": words, "labels": labels}


async def test_batches_padded_to_their_longest_sample_are_counted() -> None:
    def loader() -> torch.utils.data.DataLoader[Any]:
        data: Any = _data()
        return torch.utils.data.DataLoader(data, BATCH, shuffle=True, collate_fn=_to_the_longest)

    job = Job(_OwnLoss(torch.float64), loader(), None, SGD(lr=0.1), micro_batch=5, epochs=9)
    household = await trained(job, 3)
    model, wanted = _OwnLoss(torch.float64), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(2):
        torch.manual_seed(epoch)
        for batch in loader():
            loss = model(**batch)["loss"]
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            wanted.append(loss.item())
    assert household.losses == pytest.approx(wanted[:STEPS], abs=1e-12)


@pytest.mark.parametrize(
    ("large", "ready", "empty", "is_counted"),
    [
        (False, False, False, True),
        (True, False, False, False),  # read micro-batch by micro-batch
        (True, False, True, True),
        (False, True, False, False),  # all of it was looked at
        (False, True, True, True),
    ],
)
def test_a_mini_batch_is_read_whole_where_its_count_may_differ_from_its_samples(
    large: bool, ready: bool, empty: bool, is_counted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if large:
        monkeypatch.setattr(loss_count, "READ_WHOLE_BYTES", 1)
    x = torch.randn(SAMPLES, 3)
    y = torch.where(torch.arange(SAMPLES) % 5 == 0, IGNORED if empty else 1, 2)
    data: Any = torch.utils.data.TensorDataset(x, y)
    if not ready:
        data = [data[k] for k in range(SAMPLES)]
    job = Job(nn.Linear(3, 4), data, cross_entropy, SGD(lr=0.1), BATCH, epochs=9)
    prepared = prepare(job, TrainOptions(local=True))
    assert (prepared.count is not None) is is_counted
    assert (prepared.unweighed is not None) is (large and not is_counted)
    assert prepared.job.micro_batch is None
