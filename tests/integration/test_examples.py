"""Examples that have no system test of their own, small."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from p2ptrain.cli.script import load_job
from p2ptrain.events import Eval
from p2ptrain.job.asynchrony import AsyncOptions
from p2ptrain.job.job import Job
from p2ptrain.job.train_options import TrainOptions
from p2ptrain.profiling.profile_cache import ProfileCache
from tests.integration.training.delayed import by_formula, cut_of
from tests.integration.training.household import devices
from tests.support.curves import by_plain_torch

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SMALL = (("width", "64"), ("lr", "2e-3"))


def continual(*settings: tuple[str, str]) -> Job:
    """A job of examples/continual_digits.py, its large layers narrow."""
    return load_job(str(EXAMPLES / "continual_digits.py"), (*SMALL, *settings))


@torch.no_grad()
def accuracy(job: Job) -> float:
    """Of its model on its test images."""
    job.model.eval()
    samples = [job.eval_data[index] for index in range(len(job.eval_data))]
    x, y = (torch.stack(column) for column in zip(*samples, strict=True))
    job.model.train()
    return job.metrics["accuracy"](job.model(x), y).item()


@dataclass(frozen=True)
class Trained:
    """A file of weights that know the old digits, and how well."""

    weights: Path
    level: float


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """Trained once for all tests, which only read the file."""
    torch.set_num_threads(1)
    job = continual(("phase", "old"), ("epochs", "2"))
    by_plain_torch(job)
    weights = tmp_path_factory.mktemp("old") / "old.safetensors"
    save_file(job.model.state_dict(), weights)
    return Trained(weights, accuracy(job))


async def test_trained_weights_learn_new_digits_and_come_back_to_the_old_level(
    old: Trained,
) -> None:
    level = old.level
    assert level > 0.85
    start = (("start", str(old.weights)), ("epochs", "2"))
    job, names = continual(*start), []
    before = accuracy(job)
    assert before < level - 0.2, "it does not know the new digits yet"
    how = AsyncOptions()
    # The accuracy depends on the cut: measured in full, as by a member.
    async with devices(3, profiles=ProfileCache(None)) as household:
        options = TrainOptions(wait_for=3, planner="pp", mode="async", asynchrony=how)
        await household.holder_run(job, options).run()
        names = cut_of(household)
        found = [e.metrics["accuracy"] for e in household.events if isinstance(e, Eval)]
        losses = household.losses
    assert len(names) == 3
    assert found[-1] > level - 0.02
    updates = job.steps_per_epoch
    wanted = by_formula(continual(*start), names, how, len(losses), {updates: names})
    assert losses == wanted.losses


def test_what_is_not_seen_again_is_forgotten(old: Trained) -> None:
    new = continual(("start", str(old.weights)), ("epochs", "1"), ("remembered", "0"))
    by_plain_torch(new)
    new.model.eval()
    assert accuracy(new) < 0.5
