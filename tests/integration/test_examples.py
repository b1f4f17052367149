"""Examples that have no system test of their own, small."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from p2ptrain.cli.script import load_job
from p2ptrain.errors import UserError
from p2ptrain.events import Eval
from p2ptrain.job.asynchrony import AsyncOptions
from p2ptrain.job.job import Job
from p2ptrain.job.train_options import TrainOptions
from p2ptrain.photos.folder import PhotoFolder
from p2ptrain.profiling.profile_cache import ProfileCache
from tests.integration.training.delayed import by_formula, cut_of
from tests.integration.training.household import devices
from tests.integration.training.jobs import one_stage_each
from tests.support.curves import by_plain_torch
from tests.support.pictures import fill

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


def photos(folder: Path) -> Job:
    """A job of examples/photos.py, small."""
    settings = {"folder": str(folder), "size": "32", "width": "8", "epochs": "12", "lr": "1e-2"}
    return load_job(str(EXAMPLES / "photos.py"), tuple(settings.items()))


async def test_pictures_of_a_folder_are_distinguished_and_a_wrong_label_is_doubted(
    tmp_path: Path,
) -> None:
    fill(tmp_path, 30)
    circle, square = (photos(tmp_path).eval_data.dataset.samples[at][0] for at in (0, -1))
    circle.replace(square)
    curves = []
    for count in (1, 3):
        job = replace(photos(tmp_path), micro_batch=16)  # else the pipeline may have two
        options = TrainOptions(local=True) if count == 1 else one_stage_each(count, 1000)
        async with devices(count) as household:
            await household.holder_run(job, options).run()
            curves.append(household.losses)
            found = [e.metrics["accuracy"] for e in household.events if isinstance(e, Eval)]
        assert found[-1] >= 0.8
        assert len(found) == 12
        step, evaluated, doubted = PhotoFolder(tmp_path).uncertain()
        assert (step, evaluated) == (len(household.losses), 11)
        assert (doubted[0].file, doubted[0].guess) == (square.name, "circle")
    assert curves[0] == curves[1]


def test_too_few_pictures_and_none_are_said(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="page --lan --photos"):
        photos(tmp_path / "none")
    fill(tmp_path, 5, ("circle",))
    with pytest.raises(UserError, match="but there is 1 label"):
        photos(tmp_path)
    fill(tmp_path, 4, ("square",))
    with pytest.raises(UserError, match="but square has 4"):
        photos(tmp_path)
    (tmp_path / "square" / "4.jpg").write_bytes(b"no picture")
    with pytest.raises(UserError, match=r"4\.jpg cannot be read, remove it"):
        photos(tmp_path)
