"""Loaders, streams, batches of differing lengths: the curve is plain torch's for the same loader.

On one device and on three, with a death on the way, and after the holder has started again.
"""

from __future__ import annotations

import asyncio
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    TensorDataset,
    WeightedRandomSampler,
)

from p2ptrain import events
from p2ptrain.errors import CaptureError, OptionError, ScriptError
from p2ptrain.events import Done, Event, Failure, Plan, Step
from p2ptrain.holder import trainer
from p2ptrain.job.callbacks import StopTraining
from p2ptrain.job.job import Job
from p2ptrain.job.train_options import TrainOptions
from p2ptrain.model.stage.optimizer_spec import SGD
from p2ptrain.state import checkpoint_files
from p2ptrain.state.checkpoint_files import Checkpoint, WrittenCheckpoint
from p2ptrain.state.weights_files import average_path
from tests.integration.training.delayed import Generations
from tests.integration.training.household import Devices, devices
from tests.integration.training.jobs import assert_same_weights
from tests.integration.training.test_insiders import spoil
from tests.integration.training.test_recovery_holder import Process, again, killed
from tests.support import delayed_reference
from tests.support.delayed_reference import Recipe

SEED = 5

EPOCHS = 3

MICRO_BATCH = 3


class Words(Dataset[Any]):
    """Sentences of several lengths.

    Args:
        later: how long a few are, which none of the first batches has.
        alike: whether all before these have one length.
    """

    def __init__(self, later: int | None = None, *, alike: bool = False) -> None:
        draw = torch.Generator().manual_seed(6)
        lengths = torch.randint(4, 14, (30,), generator=draw).tolist()
        if later is not None and alike:
            lengths = [6] * 76 + [later] * 4 + [6] * 4 + [3 * later] * 2
        elif later is not None:
            lengths = [4, 5, 6, 4, 5, 4, 4, 5] * 10 + [later, 9, 4, 6, 3 * later, 5]
        self._words = [torch.randint(1, 20, (n,), generator=draw) for n in lengths]
        self._labels = torch.randint(0, 3, (len(lengths),), generator=draw)

    def __len__(self) -> int:
        return len(self._words)

    def __getitem__(self, index: int) -> Any:
        return self._words[index], self._labels[index]


def padded(samples: list[Any]) -> Any:
    words = nn.utils.rnn.pad_sequence([w for w, _ in samples], batch_first=True)
    mask = (words > 0).long()
    return {"words": words, "mask": mask}, torch.stack([label for _, label in samples])


def padded_dict(samples: list[Any]) -> dict[str, Tensor]:
    given, labels = padded(samples)
    return {**given, "labels": labels}


class Rows(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        draw = torch.Generator().manual_seed(8)
        for _ in range(26):
            yield torch.randn(6, generator=draw), torch.randint(0, 3, (), generator=draw)


class Stateful:
    """Says how far it is, as torchdata's StatefulDataLoader does."""

    def __init__(self) -> None:
        self.read = 0
        self._first = 0

    def state_dict(self) -> dict[str, Any]:
        return {"order": self._order, "next": self._next}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._first, self._order = state["next"], state["order"]

    def __iter__(self) -> Iterator[Any]:
        if not self._first:
            self._order = torch.randperm(26)
        self._next, self._first = self._first, 0
        return self._batches()

    def _batches(self) -> Iterator[Any]:
        x, y = table().tensors
        while self._next < 26:
            self.read += 1
            chosen = self._order[self._next : self._next + 1]
            self._next += 1
            yield x[chosen] + torch.rand(1, 6), y[chosen]


class Reader(nn.Module):
    """Reads sentences, by attention and step by step."""

    def __init__(self, *, scores: bool = False) -> None:
        super().__init__()
        self._scores = scores
        self.embedding = nn.Embedding(20, 8)
        self.attention = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.steps = nn.GRU(8, 8, batch_first=True)
        self.out = nn.Linear(8, 3)

    def forward(self, words: Tensor, mask: Tensor, labels: Tensor | None = None) -> Any:
        x = self.attention(self.embedding(words), src_key_padding_mask=mask == 0)
        x, _ = self.steps(x)
        x = self.out((x * mask[..., None]).sum(1) / mask.sum(1, keepdim=True))
        if not self._scores or labels is None:
            return x
        return {"loss": functional.cross_entropy(x, labels), "logits": x}


def small() -> nn.Module:
    torch.manual_seed(7)
    return nn.Sequential(
        *(nn.Linear(6, 12), nn.LayerNorm(12), nn.ReLU(), nn.Linear(12, 12), nn.ReLU()),
        nn.Linear(12, 3),
    )


def tied() -> nn.Module:
    """Its first weight is used in its last stage too."""
    torch.manual_seed(7)
    first, last = nn.Linear(6, 6), nn.Linear(6, 6)
    last.weight = first.weight
    return nn.Sequential(first, nn.ReLU(), nn.Linear(6, 6), nn.ReLU(), last, nn.Linear(6, 3))


def reader(*, scores: bool = False) -> nn.Module:
    torch.manual_seed(7)
    return Reader(scores=scores)


def table() -> TensorDataset:
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(26, 6, generator=draw)
    return TensorDataset(x, torch.randint(0, 3, (26,), generator=draw))


def made(kind: str) -> dict[str, Any]:
    """Model, data and loss of a kind of data; new ones each time."""
    cross_entropy = functional.cross_entropy
    if kind == "ragged":
        data = DataLoader(table(), batch_size=8, shuffle=True)
        return {"model": small(), "data": data, "loss": cross_entropy}
    if kind == "tied":  # the last batch has fewer micro-batches
        data = DataLoader(table(), batch_size=8, shuffle=True)
        return {"model": tied(), "data": data, "loss": cross_entropy}
    if kind == "weighted":
        sampler = WeightedRandomSampler([1.0, 3.0] * 13, 20)
        data = DataLoader(table(), batch_size=8, sampler=sampler, num_workers=1)
        return {"model": small(), "data": data, "loss": cross_entropy}
    if kind == "stream":
        return {"model": small(), "data": DataLoader(Rows(), batch_size=8), "loss": cross_entropy}
    if kind == "pictures":
        torch.manual_seed(7)
        maps = nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU()
        model = nn.Sequential(*maps, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3))
        draw = torch.Generator().manual_seed(4)
        pictures = torch.randn(26, 3, 16, 16, generator=draw)
        data = DataLoader(TensorDataset(pictures, table().tensors[1]), batch_size=8, shuffle=True)
        return {"model": model, "data": data, "loss": cross_entropy}
    if kind == "stateful":
        return {"model": small(), "data": Stateful(), "loss": cross_entropy}
    if kind == "lengths":
        data = DataLoader(Words(), batch_size=8, shuffle=True, collate_fn=padded)  # type: ignore[arg-type]
        return {"model": reader(), "data": data, "loss": cross_entropy}
    if kind == "longer":  # than four times what the first batches are
        data = DataLoader(Words(later=30), batch_size=4, collate_fn=padded)  # type: ignore[arg-type]
        return {"model": reader(), "data": data, "loss": cross_entropy}
    if kind == "late":  # the first batches have one length
        words = Words(later=9, alike=True)
        data = DataLoader(words, batch_size=4, collate_fn=padded)  # type: ignore[arg-type]
        return {"model": reader(), "data": data, "loss": cross_entropy}
    if kind == "twice late":  # first another width, then another height
        torch.manual_seed(7)
        first, second = nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        maps = first, nn.ReLU(), second, nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()
        draw = torch.Generator().manual_seed(4)
        sizes = {20: (6, 9), 24: (9, 6)}
        batches = [
            (torch.randn(4, 1, *sizes.get(k, (6, 6)), generator=draw), torch.arange(4) % 3)
            for k in range(26)
        ]
        data = DataLoader(batches, batch_size=None)  # type: ignore[arg-type]
        return {"model": nn.Sequential(*maps, nn.Linear(4, 3)), "data": data, "loss": cross_entropy}
    assert kind == "dicts"
    data = DataLoader(Words(), batch_size=8, shuffle=True, collate_fn=padded_dict)  # type: ignore[arg-type]
    return {"model": reader(scores=True), "data": data, "loss": None}


KINDS = ["ragged", "tied", "weighted", "stream", "lengths", "longer", "late", "dicts"]


def job(kind: str, **more: Any) -> Job:
    given = made(kind) | {"micro_batch": MICRO_BATCH, "epochs": EPOCHS, "seed": SEED}
    return Job(**given | {"optimizer": SGD(lr=0.1, momentum=0.9)} | more)


def cut(batch: Any, rows: slice) -> Any:
    if isinstance(batch, dict):
        return {key: value[rows] for key, value in batch.items()}
    return batch[rows]


def plain(kind: str) -> tuple[list[float], dict[str, Tensor]]:
    """As the contract has it: the loader's own batches, in micro-batches."""
    given = made(kind)
    model, losses = given["model"].train(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for epoch in range(EPOCHS):
        torch.manual_seed(SEED + epoch)
        for batch in given["data"]:
            count = len(batch["labels"] if isinstance(batch, dict) else batch[1])
            total = 0.0
            for first in range(0, count, MICRO_BATCH):
                rows = slice(first, min(first + MICRO_BATCH, count))
                weight = (rows.stop - rows.start) / count
                if isinstance(batch, dict):
                    loss = model(**cut(batch, rows))["loss"]
                else:
                    x, y = cut(batch[0], rows), batch[1][rows]
                    output = model(**x) if isinstance(x, dict) else model(x)
                    loss = given["loss"](output, y)
                (loss * weight).backward()
                total += loss.item() * weight
            losses.append(total)
            optimizer.step()
            optimizer.zero_grad()
    return losses, {name: tensor.clone() for name, tensor in model.state_dict().items()}


def assert_plain(household: Devices, trained: Job, kind: str) -> None:
    losses, state = plain(kind)
    assert household.losses == losses
    for name, tensor in trained.model.state_dict().items():
        assert torch.equal(tensor, state[name]), name


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("kind", KINDS)
async def test_the_curve_is_plain_torchs(kind: str, count: int) -> None:
    trained = job(kind)
    async with devices(count) as household:
        options = TrainOptions(wait_for=count, planner="pp")
        await household.holder_run(trained, options).run()
    assert len(household.plan.stages) == count
    assert_plain(household, trained, kind)
    plans = [event.reason for event in household.events if isinstance(event, Plan)]
    more = {"longer": ["drift", "drift"], "late": ["start", "drift"]}
    assert plans == ["start", *more.get(kind, [])]
    numbers = [event.epoch for event in household.events if isinstance(event, Plan)]
    assert numbers == sorted(set(numbers))
    steps = [event for event in household.events if isinstance(event, Step)]
    (done,) = (event for event in household.events if isinstance(event, Done))
    samples = sum(step.samples_per_s * step.seconds for step in steps)
    assert done.samples_per_s * done.seconds == pytest.approx(samples)
    assert done.seconds >= sum(step.seconds for step in steps)


class _Unpacked(nn.Module):
    """Takes a batch of names and tensors as one value."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: dict[str, Tensor]) -> Any:
        return self.model(**batch)


def delayed(kind: str, generations: Generations) -> list[float]:
    """Plain torch with the delays of the pipelines that there were."""
    given, cuts = made(kind), {}
    for step, _, names in generations.begun:
        cuts[step] = [[f"model.{name}" for name in stage] for stage in names]
    course = [[batch] for _ in range(EPOCHS) for batch in given["data"]]
    recipe = Recipe(SGD(lr=0.1, momentum=0.9).build, 4, len(course), empty=cuts)
    model = _Unpacked(given["model"])
    outcome = delayed_reference.train(model, [], given["loss"], cuts[0], recipe, course=course)
    return outcome.losses


WAYS: dict[str, tuple[str, TrainOptions]] = {
    "replicated": ("lengths", TrainOptions(wait_for=3, planner="dp")),
    "tiled": ("pictures", TrainOptions(wait_for=3, planner="tiles")),
    "private": ("stream", TrainOptions(wait_for=3, private=True)),
    "asynchronous": ("longer", TrainOptions(wait_for=3, planner="pp", mode="async")),
}


@pytest.mark.parametrize("way", WAYS)
async def test_loaders_go_with_every_way_to_train(way: str) -> None:
    """Where devices add up in another order, curves are alike; with delays, those of the delays."""
    kind, options = WAYS[way]
    async with devices(3) as household:
        generations = Generations(household)
        with generations.watched():
            await household.holder_run(job(kind), options).run()
    stages = household.plan.stages
    assert {
        "replicated": len(stages) == 1 and len(stages[0].devices) == 3,
        "tiled": stages[0].allocation == "tiles",
        "private": {stages[0].devices[0].name, stages[-1].devices[0].name} == {"a"},
        "asynchronous": len(stages) == 3,
    }[way]
    if way == "asynchronous":
        assert household.losses == delayed(kind, generations)
    else:
        expected, _ = plain(kind)
        assert household.losses == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("kind", ["stream", "lengths", "late", "dicts"])
async def test_a_death_on_the_way_does_not_show(kind: str) -> None:
    trained = job(kind)
    killing: list[asyncio.Task[None]] = []
    async with devices(3) as household:

        def listen(event: Event) -> None:
            household.events.append(event)
            if isinstance(event, Step) and event.step == 5:
                killing.append(asyncio.create_task(household.mesh.kill("b")))

        options = TrainOptions(wait_for=3, planner="pp")
        await household.holder_run(trained, options, listen).run()
        await asyncio.gather(*killing)
    assert [event.name for event in household.events if isinstance(event, Failure)] == ["b"]
    assert_plain(household, trained, kind)


@pytest.mark.parametrize(
    ("kind", "step"),
    [("ragged", 5), ("stream", 5), ("dicts", 5), ("late", 18), ("late", 19), ("late", 25)],
)
async def test_a_killed_holder_goes_on_with_the_same_batches(
    kind: str, step: int, tmp_path: Path
) -> None:
    options = TrainOptions(wait_for=3, planner="pp")
    async with devices(3) as household:
        process = await killed(household, tmp_path, step, job(kind), options)
        trained = job(kind)
        await again(household, process, trained, options)
    assert_plain(household, trained, kind)


async def test_a_holder_killed_as_it_captures_again_goes_on_from_there(tmp_path: Path) -> None:
    options = TrainOptions(wait_for=3, planner="pp")
    async with devices(3) as household:
        process = Process(household, tmp_path, job("late"), options)
        process.at_warning("captured again")
        await process.ended()
        trained = job("late")
        await again(household, process, trained, options)
        warned = [event.message for event in household.events if isinstance(event, events.Warning)]
    assert_plain(household, trained, "late")
    assert not any("dropped" in words for words in warned)
    numbers = [event.epoch for event in household.events if isinstance(event, Plan)]
    assert numbers == sorted(set(numbers))
    assert not (process.left.path / "job.json").exists()
    assert not (process.left.path / "captured").exists()


@pytest.mark.parametrize("count", [1, 3])
async def test_a_holder_killed_between_the_state_and_the_record_of_its_second_capture(
    count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The record still says the sizes of the first."""
    loop, save, saved = asyncio.get_running_loop(), checkpoint_files.save, list[int]()

    def saving(place: Path, point: Checkpoint) -> WrittenCheckpoint:
        written = save(place, point)
        if place.name == "captured":
            saved.append(point.progress.step)
            if len(saved) == 2:
                died = threading.Event()
                loop.call_soon_threadsafe(lambda: (process.die(), died.set()))
                died.wait(30)
        return written

    monkeypatch.setattr(checkpoint_files, "save", saving)
    options = TrainOptions(wait_for=count, planner="pp" if count > 1 else "auto")
    async with devices(count) as household:
        process = Process(household, tmp_path, job("twice late"), options)
        await process.ended()
        assert len(saved) == 2
        trained = job("twice late")
        await again(household, process, trained, options)
    assert_plain(household, trained, "twice late")


async def test_an_interrupt_while_it_is_captured_again_writes_the_weights(tmp_path: Path) -> None:
    wanted, out = tmp_path / "wanted.safetensors", tmp_path / "out.safetensors"
    async with devices(2) as household:
        first = TrainOptions(local=True, out=wanted, steps=18)
        await household.holder_run(job("late", ema=0.9), first).run()

        def listen(event: Event) -> None:
            household.events.append(event)
            if isinstance(event, events.Warning) and "captured again" in event.message:
                running.cancel()

        options = TrainOptions(wait_for=2, planner="pp", out=out)
        run = household.holder_run(job("late", ema=0.9), options, listen)
        running = asyncio.create_task(run.run())
        with pytest.raises(asyncio.CancelledError):
            await running
        warned = [event.message for event in household.events if isinstance(event, events.Warning)]
    assert warned[-1] == f"the weights of step 18 are in {out}"
    for one, other in ((out, wanted), (average_path(out), average_path(wanted))):
        read = load_file(one)
        assert all(torch.equal(read[name], t) for name, t in load_file(other).items())


async def test_too_little_memory_to_capture_again_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(trainer, "usable_memory_bytes", lambda: 1000)
    out = tmp_path / "out.safetensors"
    async with devices(2) as household:
        options = TrainOptions(wait_for=2, planner="pp", out=out)
        with pytest.raises(ScriptError, match=r"capture the model again takes .* can be used") as e:
            await household.holder_run(job("late"), options).run()
    assert f"{out} has the weights of step 18. Pad it to one size" in str(e.value)
    assert out.exists()


async def test_a_size_that_comes_late_empties_the_pipeline_without_barriers() -> None:
    """From there on the delays count as the formula has them from an empty pipeline."""

    class Mean(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.mean(dim=1)

    def made() -> tuple[nn.Module, Any]:
        torch.manual_seed(3)
        layers = nn.Embedding(20, 8), nn.Linear(8, 8), nn.Tanh(), Mean(), nn.Linear(8, 3)
        words = Words(later=9, alike=True)

        def collate(samples: list[Any]) -> Any:
            batch, labels = padded(samples)
            return batch["words"], labels

        return nn.Sequential(*layers), DataLoader(words, batch_size=4, collate_fn=collate)  # type: ignore[arg-type]

    (model, data), optimizer = made(), SGD(lr=0.1, momentum=0.9)
    given = Job(
        model=model, data=data, loss=functional.cross_entropy, optimizer=optimizer, epochs=EPOCHS
    )
    async with devices(3) as household:
        generations = Generations(household)
        with generations.watched():
            options = TrainOptions(wait_for=3, planner="pp", mode="async")
            await household.holder_run(given, options).run()
    (started, late, *_), empty = (
        generations.begun,
        {step: cut for step, _, cut in generations.begun},
    )
    assert (started[0], late[0]) == (0, 18)
    assert len(household.plan.stages) == 3
    other, loader = made()
    recipe = Recipe(optimizer.build, 4, len(household.losses), empty=empty)
    course = [[batch] for _ in range(EPOCHS) for batch in loader]
    outcome = delayed_reference.train(
        other, [], functional.cross_entropy, started[2], recipe, course=course
    )
    assert household.losses == outcome.losses
    assert_same_weights(given, outcome)


async def test_a_device_without_work_gets_none_after_it_is_captured_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trained = job("late")
    async with devices(3) as household:
        spoil(monkeypatch, "NaN", after=20)
        await household.holder_run(trained, TrainOptions(wait_for=3, planner="pp")).run()
    assert_plain(household, trained, "late")
    plans = [event for event in household.events if isinstance(event, Plan)]
    used = [{d.name for stage in plan.stages for d in stage.devices} for plan in plans]
    assert [plan.reason for plan in plans][-3:] == ["failure", "start", "drift"]
    assert used[0] == {"a", "b", "c"}
    assert used[-3:] == [{"a", "c"}] * 3


async def test_a_loader_that_says_its_place_is_not_read_again(tmp_path: Path) -> None:
    first = TrainOptions(local=True, checkpoint=tmp_path, steps=70)
    async with devices(1) as household:
        await household.holder_run(job("stateful"), first).run()
        trained = job("stateful")
        await household.holder_run(trained, TrainOptions(local=True, resume=tmp_path)).run()
    assert_plain(household, trained, "stateful")
    assert trained.data.read < 60  # of 78; 17 are looked at before it is known where to go on


async def refused(given: Job) -> str:
    """What it is refused with, before the first step."""
    async with devices(1) as household:
        with pytest.raises((ScriptError, CaptureError, OptionError)) as found:
            await household.holder_run(given, TrainOptions(local=True)).run()
    assert not household.losses
    return str(found.value)


def normalised(data: Any, **more: Any) -> Job:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    return job("ragged", model=model, data=data, **{"micro_batch": None} | more)


async def test_a_batch_of_one_for_a_batch_norm_is_named_before_the_first_step() -> None:
    words = await refused(normalised(DataLoader(table(), batch_size=5)))
    assert "the smallest batch of the data has one sample" in words
    assert "drop_last=True" in words


async def test_a_dict_without_what_forward_needs_is_named() -> None:
    data = [{"words": torch.ones(4).long(), "labels": torch.tensor(1)} for _ in range(20)]
    words = await refused(job("dicts", data=data, batch_size=4))
    assert "its forward() needs 'mask', which is not in it" in words


async def test_a_dict_with_more_than_forward_takes_is_named() -> None:
    data = [{"input": torch.ones(6), "labels": torch.tensor(1)} for _ in range(20)]
    words = await refused(job("ragged", data=data, batch_size=4))
    assert "does not take 'labels': give pairs ({'input': ...}, target)" in words


async def test_a_model_for_one_length_says_which_dimension_to_pad(tmp_path: Path) -> None:
    class StepByStep(Reader):
        def forward(self, words: Tensor, mask: Tensor, labels: Tensor | None = None) -> Any:
            x = torch.zeros(words.shape[0], 8)
            for step in range(words.shape[1]):
                x = torch.tanh(x + self.embedding(words[:, step]))
            return self.out(x)

    words = await refused(job("lengths", model=StepByStep()))
    assert "dimension 1 of input['words']" in words
    assert "pad" in words

    out = tmp_path / "out.safetensors"
    async with devices(3) as household:
        options = TrainOptions(wait_for=3, planner="pp", out=out)
        with pytest.raises(
            ScriptError, match=r"dimension 1 of input\['words'\].*Pad it to one"
        ) as e:
            await household.holder_run(job("late", model=StepByStep()), options).run()
    assert f"{out} has the weights of step 18" in str(e.value)
    assert len(household.losses) == 18
    assert load_file(out).keys() == StepByStep().state_dict().keys()


async def test_the_size_of_batches_is_the_loaders() -> None:
    data = DataLoader(table(), batch_sampler=[[0, 1, 2], [3, 4]])
    assert "leave it out" in await refused(job("ragged", data=data, batch_size=4))


def hardest(output: Tensor, y: Tensor) -> Tensor:
    return functional.cross_entropy(output, y, reduction="none").amax()


def summed(output: Tensor, y: Tensor) -> Tensor:
    return functional.cross_entropy(output, y, reduction="sum")


class Growing:
    """Batches of four, and one of eight that nobody has seen before training."""

    def __iter__(self) -> Iterator[Any]:
        x, y = table().tensors
        yield from ((x[:4], y[:4]) for _ in range(18))
        yield x[:8], y[:8]


@pytest.mark.parametrize("loss", [hardest, summed])
async def test_a_larger_batch_of_a_loss_that_needs_it_whole_is_named(loss: Any) -> None:
    given = job("ragged", data=Growing(), loss=loss, micro_batch=None, epochs=1)
    async with devices(1) as household:
        running = household.holder_run(given, TrainOptions(local=True)).run()
        if loss is summed:
            with pytest.raises(ScriptError, match="step 19 has 8 samples, more than the 4"):
                await running
            return
        await running
    (said,) = [
        e.message
        for e in household.events
        if isinstance(e, events.Warning)
        if "step 19" in e.message
    ]
    assert "computed in parts, which trains something else" in said


async def test_the_largest_of_listed_batches_is_known() -> None:
    listed = DataLoader(table(), batch_sampler=[[k, k + 1] for k in range(20)] + [list(range(6))])
    given = job("ragged", data=listed, loss=hardest, micro_batch=None, epochs=1)
    async with devices(1) as household:
        await household.holder_run(given, TrainOptions(local=True)).run()
    assert household.plan.micro_batch == 6


async def test_an_if_of_a_length_ends_the_job_before_it_goes_another_way() -> None:
    class Turning(Reader):
        def forward(self, words: Tensor, mask: Tensor, labels: Tensor | None = None) -> Any:
            found = super().forward(words, mask, labels)
            return -found if words.shape[1] > 15 else found

    torch.manual_seed(7)
    async with devices(1) as household:
        with pytest.raises(ScriptError, match=r"has 30 in dimension 1 of input.*, and the"):
            await household.holder_run(job("longer", model=Turning())).run()
    assert household.losses == plain("longer")[0][: len(household.losses)]
    assert len(household.losses) >= 16


class Slow(TensorDataset):
    """A sample takes long to read."""

    def __getitem__(self, index: int) -> Any:
        time.sleep(0.25)  # it is the dataset's own work
        return super().__getitem__(index)


async def test_data_that_is_slower_than_training_is_named_with_what_would_help() -> None:
    def stop_once_named(event: Event) -> None:
        if isinstance(event, events.Warning) and event.message.startswith("waiting for data"):
            raise StopTraining

    data = DataLoader(Slow(*table().tensors), batch_size=6)
    trained = job("ragged", data=data, epochs=6, callbacks=[stop_once_named])
    async with devices(1) as household:
        await household.holder_run(trained, TrainOptions(local=True)).run()
    said = [e.message for e in household.events if isinstance(e, events.Warning)]
    (named,) = [message for message in said if message.startswith("waiting for data")]
    assert re.fullmatch(r"waiting for data \d\d+% of the time: num_workers=\d+", named)
