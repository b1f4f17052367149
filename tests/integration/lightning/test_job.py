"""`p2ptrain.lightning.job` beside Lightning's own Trainer."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

import p2ptrain.lightning
from p2ptrain.errors import CaptureError, OptionError, ScriptError
from p2ptrain.events import Eval, Event, Step
from p2ptrain.job.job import Job
from p2ptrain.job.train_options import TrainOptions
from tests.integration.lightning.modules import (
    EPOCHS,
    Classifier,
    Data,
    Dictionaries,
    fitted,
    samples,
)
from tests.integration.training.household import devices

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")

HERE = Path(__file__)


def trained(job: Job) -> list[Event]:
    """On this device alone."""
    events: list[Event] = []
    p2ptrain.train(job, local=True, on_event=events.append)
    return events


def losses(events: list[Event]) -> list[float]:
    return [event.loss for event in events if isinstance(event, Step)]


def assert_same(
    module: Any, events: list[Event], other: Any, data: Any, clip: float | None
) -> None:
    """To the bit, as Lightning trains another module like it."""
    curve = fitted(other, data, clip)
    assert losses(events) == curve.losses
    assert [event.metrics for event in events if isinstance(event, Eval)] == curve.metrics
    weights, wanted = module.state_dict(), other.state_dict()
    assert list(weights) == list(wanted)
    assert all(torch.equal(weights[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize("form", ["one cycle", "lists", "plateau"])
def test_a_module_trains_as_with_lightning(form: str) -> None:
    module = Classifier(form)
    clip = 0.5 if form == "lists" else None
    job = p2ptrain.lightning.job(module, Data(), epochs=EPOCHS, clip_grad_norm=clip)
    assert list(job.model.state_dict()) == list(module.state_dict())
    assert_same(module, trained(job), Classifier(form), Data(), clip)
    batch = torch.zeros(3, 20)
    assert torch.equal(job.model.eval()(batch), module.eval()(batch))


class Masked(Classifier):
    """Some labels are ignored, another number in each part of a batch; the step takes anything."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(20, 2)

    def training_step(self, *given: Any) -> Any:
        x, y = given[0]["x"], given[0]["labels"]
        return nn.functional.cross_entropy(self(x), torch.where(x[:, 0] > 0, y, -100))


def test_parts_of_a_mini_batch_count_what_the_loss_does_not_ignore() -> None:
    curves = []
    for micro_batch in (16, 4):
        rows = DataLoader([{"x": x, "labels": y} for x, y in samples()], batch_size=16)
        module = Masked()
        job = p2ptrain.lightning.job(module, rows, epochs=2, micro_batch=micro_batch)
        seen: list[Event] = []
        assert p2ptrain.train(job, local=True, on_event=seen.append) is module
        curves.append(losses(seen))
    assert len(curves[0]) == 8
    assert curves[1] == pytest.approx(curves[0], rel=1e-5)


def test_a_module_with_loaders_of_its_own_and_batches_that_are_dicts() -> None:
    module = Dictionaries()
    job = p2ptrain.lightning.job(module, epochs=EPOCHS)
    assert_same(module, trained(job), Dictionaries(), None, None)


async def test_a_household_trains_the_same_and_callbacks_see_what_is_logged(
    tmp_path: Path,
) -> None:
    best = p2ptrain.SaveBest("val_loss", tmp_path / "best.safetensors")
    stop = p2ptrain.EarlyStopping("acc", patience=2, mode="max", min_delta=1.0)
    how: dict[str, Any] = {"epochs": 9, "clip_grad_norm": 0.5, "micro_batch": 16}
    module, alone = Classifier("plateau"), Classifier("plateau")
    job = p2ptrain.lightning.job(module, Data(), callbacks=[best, stop], **how)
    async with devices(2) as household:
        await household.holder_run(job, TrainOptions(wait_for=2, planner="pp")).run()
    events = trained(p2ptrain.lightning.job(alone, Data(), **(how | {"epochs": EPOCHS})))
    assert stop.stopped_step == 9
    assert household.losses == losses(events)
    assert [e.metrics for e in household.events if isinstance(e, Eval)] == [
        e.metrics for e in events if isinstance(e, Eval)
    ]
    assert (tmp_path / "best.safetensors").exists()
    weights = module.state_dict()
    assert all(torch.equal(weights[name], value) for name, value in alone.state_dict().items())


def line_of(words: str, file: Path = HERE) -> int:
    lines = file.read_text(encoding="utf-8").splitlines()
    return next(number for number, line in enumerate(lines, 1) if words in line)


class Manual(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False  # of Manual


class Clips(Classifier):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        nn.utils.clip_grad_value_(self.parameters(), 1.0)


class EndsEpochs(Classifier):
    def on_train_epoch_end(self) -> None:
        self.train_accuracy.reset()


class Augments(Data):
    def on_after_batch_transfer(self, batch: Any, index: int) -> Any:
        return batch


class Two(Classifier):
    def configure_optimizers(self) -> Any:  # of Two
        return [torch.optim.SGD(self.parameters(), lr=0.1) for _ in range(2)]


class Seldom(Classifier):
    def configure_optimizers(self) -> Any:  # of Seldom
        adam = torch.optim.Adam(self.parameters())
        scheduler = torch.optim.lr_scheduler.ExponentialLR(adam, 0.5)
        return [adam], [{"scheduler": scheduler, "frequency": 2}]


class Anneals(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss, *_ = self.shared_step(batch)
        return loss * min(1.0, self.global_step / 10)  # of Anneals


class Sometimes(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss, *_ = self.shared_step(batch)
        if batch_idx % 10 == 0:  # of Sometimes
            self.first_batch = batch
        return loss


class Silent(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Any:  # of Silent
        self.shared_step(batch)


class Peeks(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.optimizers().zero_grad()  # of Peeks
        return super().training_step(batch, batch_idx)


class Watches(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.trainer.callback_metrics.clear()  # of Watches
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize(
    ("module", "data", "line", "says"),
    [
        (Manual, Data, "# of Manual", "automatic_optimization is False"),
        (Clips, Data, "def on_before_optimizer_step", "clip_grad_norm"),
        (EndsEpochs, Data, "def on_train_epoch_end", "would never be called"),
        (Classifier, Augments, "def on_after_batch_transfer", "collate_fn"),
        (Two, Data, "# of Two", "returns 2 optimizers"),
        (Seldom, Data, "# of Seldom", "frequency=2"),
        (Anneals, Data, "# of Anneals", "reads self.global_step"),
        (Sometimes, Data, "# of Sometimes", "reads batch_idx"),
        (Silent, Data, "# of Silent", "must return the loss"),
        (Peeks, Data, "# of Peeks", "reads self.optimizers()"),
        (Watches, Data, "# of Watches", "there is no Trainer"),
    ],
)
def test_what_cannot_be_taken_is_refused_with_its_line(
    module: Callable[[], Any], data: Callable[[], Any], line: str, says: str
) -> None:
    with pytest.raises((ScriptError, CaptureError), match=re.escape(says)) as raised:
        trained(p2ptrain.lightning.job(module(), data()))
    assert f"{HERE.name}:{line_of(line)}" in str(raised.value)


class Endless(IterableDataset[Any]):
    def __iter__(self) -> Any:
        yield from [(torch.zeros(20), torch.tensor(0))] * 4


def test_what_does_not_fit_together_is_refused() -> None:
    def job(module: Any = None, data: Any = None, **more: Any) -> Job:
        return p2ptrain.lightning.job(module or Classifier(), data, **more)

    loader = DataLoader(Data().data if hasattr(Data(), "data") else Endless(), batch_size=2)
    refusals = [
        (lambda: job(nn.Linear(1, 1)), "takes a LightningModule, not a Linear"),
        (lambda: job(), "nothing to train on"),
        (lambda: job(data=Data(), loss=None), "leave out loss: it is what training_step"),
        (lambda: job(data=Data(), epochs=0), "epochs must be 1 or more"),
        (lambda: job(data=Data(), max_epochs=3), "epochs"),
        (lambda: job(data={"a": loader}), "several loaders"),
        (lambda: job(data=loader, val_dataloaders=loader), "give val_check_interval"),
        (lambda: job(Classifier("plateau"), loader), "waits for 'val_loss'"),
        (lambda: job(Classifier("one cycle"), loader), "estimated_stepping_batches"),
    ]
    for call, says in refusals:
        with pytest.raises((OptionError, ScriptError), match=re.escape(says)):
            call()


def test_a_callback_that_waits_for_what_is_not_logged_is_named() -> None:
    stop = p2ptrain.EarlyStopping("val_los")
    with pytest.raises(ScriptError, match=r"'val_los', and what is logged is 'train_loss', 'val_l"):
        trained(p2ptrain.lightning.job(Classifier(), Data(), callbacks=[stop]))


class LogsMore(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss, output, y = self.shared_step(batch)
        self.log("train_acc", (output.argmax(1) == y).float().mean())  # of LogsMore
        return loss


@pytest.mark.filterwarnings("default")
def test_a_log_of_training_that_is_not_the_loss_is_named() -> None:
    with pytest.warns(UserWarning, match=r"logs 'train_acc' .*Log it in validation_step") as seen:
        trained(p2ptrain.lightning.job(LogsMore(), Data()))
    assert any(f"{HERE.name}:{line_of('# of LogsMore')}" in str(one.message) for one in seen)
