"""The average of the weights: torch's own to the bit, at any death, on any number of devices."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import p2ptrain
from p2ptrain.errors import OptionError
from p2ptrain.events import Eval, Event, Step
from p2ptrain.holder.snapshots.snapshot_manager import SnapshotManager
from p2ptrain.job.job import Job
from p2ptrain.job.train_options import TrainOptions
from p2ptrain.recovery.version import Version
from tests.integration.training.household import OFTEN_COPIED, Devices, devices, hold_rounds
from tests.integration.training.jobs import make_job

DECAY = 0.9

STEPS = 9


class Normalising(nn.Module):
    """A buffer, a frozen parameter and tied ones, which an average leaves as they are."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.first, self.norm, self.second = nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 6)
        self.second.weight = self.first.weight
        self.scale = nn.Parameter(torch.full((6,), 0.5), requires_grad=False)
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(torch.relu(self.first(x))) * self.scale
        return self.head(torch.relu(self.second(x)))  # type: ignore[no-any-return]


def samples() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(5)
    return [
        (torch.randn(6, generator=generator), torch.randint(3, (), generator=generator))
        for _ in range(24)
    ]


def job(**changes: Any) -> Job:
    settings: dict[str, Any] = {"batch_size": 8, "micro_batch": 4, "epochs": 3, "ema": DECAY}
    settings |= changes
    loss = nn.functional.cross_entropy
    return Job(Normalising(), samples(), loss, p2ptrain.AdamW(lr=0.05), **settings)


def plain(steps: int = STEPS) -> AveragedModel:
    """By the contract's rules, with torch's average."""
    model, data = Normalising().train(), samples()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.05)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    for step in range(steps):
        generator = torch.Generator().manual_seed(step // 3)
        order = torch.randperm(len(data), generator=generator).split(8)[step % 3]
        for piece in order.split(4):
            x, y = (torch.stack([data[k][side] for k in piece]) for side in (0, 1))
            (nn.functional.cross_entropy(model(x), y) * 0.5).backward()
        optimizer.step()
        optimizer.zero_grad()
        average.update_parameters(model)
    return average


def assert_is_the_average(file: Path, steps: int = STEPS) -> None:
    found, wanted = load_file(file), plain(steps).module.state_dict()
    assert found.keys() == wanted.keys()
    assert [name for name in wanted if not torch.equal(found[name], wanted[name])] == []


@pytest.mark.parametrize("count", [1, 3])
async def test_the_average_is_written_beside_the_weights(tmp_path: Path, count: int) -> None:
    out = tmp_path / "weights.safetensors"
    made = job()
    how: dict[str, Any] = {"local": True} if count == 1 else {"wait_for": count, "planner": "pp"}
    async with devices(count) as household:
        await household.holder_run(made, TrainOptions(**how, out=out)).run()
    assert_is_the_average(tmp_path / "weights.ema.safetensors")
    weights = load_file(out)
    assert all(torch.equal(weights[n], t) for n, t in made.model.state_dict().items())


async def test_a_death_does_not_change_the_average(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stable: list[Version] = []
    keep_only = SnapshotManager.keep_only

    def noted(
        manager: SnapshotManager, versions: Collection[Version], members: Collection[str]
    ) -> None:
        stable.extend(versions)
        keep_only(manager, versions, members)

    monkeypatch.setattr(SnapshotManager, "keep_only", noted)
    hold_rounds(monkeypatch, 3, lambda: bool(stable))
    async with devices(3, settings=OFTEN_COPIED) as household:

        def listen(event: Event) -> None:
            household.events.append(event)
            if isinstance(event, Step) and event.step == 4:
                asyncio.get_running_loop().create_task(household.mesh.kill("c"))

        options = TrainOptions(wait_for=3, planner="pp", out=tmp_path / "weights.safetensors")
        await household.holder_run(job(), options, listen).run()
    assert any(isinstance(event, p2ptrain.events.Recovered) for event in household.events)
    assert_is_the_average(tmp_path / "weights.ema.safetensors")


async def test_a_checkpoint_has_the_average(tmp_path: Path) -> None:
    out, kept = tmp_path / "weights.safetensors", tmp_path / "checkpoint"
    async with devices(2) as household:
        first = TrainOptions(wait_for=2, planner="pp", steps=4, checkpoint=kept)
        await household.holder_run(job(), first).run()
    async with devices(2) as household:
        again = TrainOptions(wait_for=2, planner="pp", out=out, resume=kept)
        await household.holder_run(job(), again).run()
    assert_is_the_average(tmp_path / "weights.ema.safetensors")


async def evaluated(options: TrainOptions, **changes: Any) -> tuple[Devices, Job]:
    metrics = {"accuracy": lambda output, y: (output.argmax(1) == y).float().mean()}
    made = job(eval_data=samples(), metrics=metrics, eval_with_ema=True, **changes)
    async with devices(options.wait_for) as household:
        await household.holder_run(made, options).run()
    return household, made


async def test_evaluations_and_the_best_take_the_average_where_asked(tmp_path: Path) -> None:
    best = p2ptrain.SaveBest("loss", tmp_path / "best.safetensors")
    options = TrainOptions(wait_for=2, planner="pp")
    household, _ = await evaluated(options, callbacks=[best])
    x, y = (torch.stack(column) for column in zip(*samples(), strict=True))
    for event in (event for event in household.events if isinstance(event, Eval)):
        output = plain(event.step).module.eval()(x).detach()
        loss = nn.functional.cross_entropy(output, y).item()
        assert event.metrics["loss"] == pytest.approx(loss, rel=1e-5)
        accuracy = (output.argmax(1) == y).float().mean().item()
        assert event.metrics["accuracy"] == pytest.approx(accuracy)
    assert_is_the_average(best.path, best.best_step)


async def test_without_barriers_there_is_an_average_of_the_updates_made(tmp_path: Path) -> None:
    out = tmp_path / "weights.safetensors"
    options = TrainOptions(wait_for=2, planner="pp", mode="async", out=out)
    async with devices(2) as household:
        await household.holder_run(make_job(ema=DECAY), options).run()
    found, weights = load_file(tmp_path / "weights.ema.safetensors"), load_file(out)
    assert found.keys() == weights.keys()
    assert any(not torch.equal(found[name], weights[name]) for name in weights)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"ema": 1.5}, "from 0 to 1"),
        ({"ema": True}, "from 0 to 1"),
        ({"ema": "0.9"}, "from 0 to 1"),
        ({"ema": None, "eval_with_ema": True}, "set ema=0.999"),
        ({"eval_with_ema": 1}, "must be a bool"),
    ],
)
def test_averages_that_cannot_be_are_refused(given: dict[str, Any], words: str) -> None:
    with pytest.raises(OptionError, match=words):
        job(**given)


class PartlyDetached(nn.Module):
    """The second layer is used, and never gets a gradient."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.first, self.second, self.head = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.first(x))
        return self.head(x + self.second(x).detach())  # type: ignore[no-any-return]


async def test_what_gets_no_gradient_has_an_average_and_no_more(tmp_path: Path) -> None:
    def made(**changes: Any) -> Job:
        given: dict[str, Any] = {"batch_size": 8, "micro_batch": 4, "epochs": 3, "ema": DECAY}
        loss = nn.functional.cross_entropy
        adam = p2ptrain.AdamW(lr=0.05)
        return Job(PartlyDetached(), samples(), loss, adam, **{**given, **changes})

    kept, files = tmp_path / "checkpoint", [tmp_path / "a.safetensors", tmp_path / "b.safetensors"]
    async with devices(1) as household:
        await household.holder_run(made(), TrainOptions(local=True, out=files[0])).run()
        first = TrainOptions(local=True, steps=4, checkpoint=kept)
        await household.holder_run(made(), first).run()
        again = TrainOptions(local=True, resume=kept, out=files[1])
        await household.holder_run(made(), again).run()
        with pytest.raises(OptionError, match=r"has an average of the weights.*keeps none"):
            await household.holder_run(made(ema=None), again).run()
    one, other = (load_file(file.with_name(f"{file.stem}.ema.safetensors")) for file in files)
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert torch.equal(one["second.weight"], PartlyDetached().second.weight)
