"""`p2ptrain.hf.Trainer` beside transformers' own, on this device alone."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from torch.utils.data import IterableDataset
from transformers import (
    AutoModelForCausalLM,
    EarlyStoppingCallback,
    TrainerCallback,
    default_data_collator,
)
from transformers.integrations import integration_utils
from transformers.utils import logging

import p2ptrain.hf
from p2ptrain.errors import OptionError
from p2ptrain.hf.losses import leaves_count
from p2ptrain.job.train_options import TrainOptions
from tests.support.hf_scripts import SCRIPTS, Rows, arguments, clm, glue

TIMES = ("runtime", "per_second", "total_flos")

CLOSE = 5e-6
"""Between losses of about 3, in float32: a dozen units in the last place. The household adds up the
same numbers in another order."""


def here(folder: Path, script: dict[str, Any], **changes: Any) -> p2ptrain.hf.Trainer:
    return p2ptrain.hf.Trainer(
        args=arguments(folder, **changes), options=TrainOptions(local=True), **script
    )


def theirs(folder: Path, script: dict[str, Any], **changes: Any) -> transformers.Trainer:
    return transformers.Trainer(args=arguments(folder, **changes), **script)


def logged(trainer: transformers.Trainer) -> list[dict[str, Any]]:
    """What was logged, but for times."""
    left_out = TIMES if trainer.args.max_grad_norm else (*TIMES, "grad_norm")
    return [without(left_out, line) for line in trainer.state.log_history]


def without(left_out: Iterable[str], line: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in line.items() if not any(part in key for part in left_out)}


def assert_same_logs(ours: transformers.Trainer, wanted: transformers.Trainer) -> None:
    assert len(logged(ours)) == len(logged(wanted))
    for line, other in zip(logged(ours), logged(wanted), strict=True):
        assert line == pytest.approx(other, abs=CLOSE, rel=CLOSE)


@pytest.mark.parametrize("name", list(SCRIPTS))
def test_a_script_trains_as_with_transformers(name: str, tmp_path: Path) -> None:
    how = {"eval_strategy": "epoch", "gradient_accumulation_steps": 1 + (name == "clm")}
    ours, wanted = (
        here(tmp_path / "a", SCRIPTS[name](), **how),
        theirs(tmp_path / "b", SCRIPTS[name](), **how),
    )
    done, other = ours.train(), wanted.train()
    assert_same_logs(ours, wanted)
    assert (done.global_step, done.training_loss) == (
        other.global_step,
        pytest.approx(other.training_loss, abs=CLOSE),
    )
    found = without(TIMES, ours.evaluate())
    assert found == pytest.approx(without(TIMES, wanted.evaluate()), abs=CLOSE, rel=CLOSE)
    ours.save_model(str(tmp_path / "saved"))
    again = type(ours.model).from_pretrained(tmp_path / "saved").state_dict()
    assert all(torch.equal(again[key], value) for key, value in ours.model.state_dict().items())


@pytest.mark.parametrize(
    "changes",
    [
        {"label_smoothing_factor": 0.1, "max_grad_norm": 0.0, "lr_scheduler_type": "cosine"},
        {"lr_scheduler_type": "polynomial", "max_steps": 7, "max_grad_norm": 0.3, "optim": "sgd"},
        {
            **{"lr_scheduler_type": "reduce_lr_on_plateau", "eval_strategy": "steps"},
            **{"eval_steps": 2, "lr_scheduler_kwargs": {"patience": 0}, "learning_rate": 1e-2},
            **{"metric_for_best_model": "loss", "warmup_steps": 0, "optim": "rmsprop"},
        },
    ],
)
def test_arguments_do_what_they_do_with_transformers(
    changes: dict[str, Any], tmp_path: Path
) -> None:
    ours, wanted = here(tmp_path / "a", clm(), **changes), theirs(tmp_path / "b", clm(), **changes)
    ours.train()
    wanted.train()
    assert_same_logs(ours, wanted)


def trimmed(samples: list[Any]) -> dict[str, torch.Tensor]:
    """As long as the longest of a batch is."""
    batch = default_data_collator(samples)
    longest = int((batch["labels"] != -100).sum(dim=1).max())
    return {name: tensor[:, :longest] for name, tensor in batch.items()}


def test_accumulated_batches_of_many_lengths_weigh_as_with_transformers(tmp_path: Path) -> None:
    """In float64, as AdamW divides noise by noise in the keys' bias, whose gradient is zero."""
    changes = {"gradient_accumulation_steps": 4, "max_steps": 3}
    scripts = {**clm(), "data_collator": trimmed}, {**clm(), "data_collator": trimmed}
    for script in scripts:
        script["model"].double()
    ours = here(tmp_path / "a", scripts[0], **changes)
    wanted = theirs(tmp_path / "b", scripts[1], **changes)
    ours.train()
    wanted.train()
    assert_same_logs(ours, wanted)
    weights, others = ours.model.state_dict(), wanted.model.state_dict()
    for name, tensor in weights.items():
        assert torch.allclose(tensor, others[name], rtol=1e-12, atol=1e-12), name


def test_a_loss_that_does_not_count_is_a_mean_here_and_a_sum_there(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    changes = {"gradient_accumulation_steps": 4, "max_steps": 1}
    ours, wanted = (
        here(tmp_path / "a", glue(), **changes),
        theirs(tmp_path / "b", glue(), **changes),
    )
    logging.enable_propagation()
    ours.train()
    logging.disable_propagation()
    wanted.train()
    for name in ("loss", "grad_norm"):
        here_is, there = logged(ours)[0][name], logged(wanted)[0][name]
        assert 4 * here_is == pytest.approx(there, rel=1e-5)
    assert "adds up the means of the 4 batches of an update for BertForSeq" in caplog.text


@pytest.mark.parametrize(
    ("model", "leaves"),
    [
        ("ConvNextForImageClassification", True),
        ("BertForSequenceClassification", True),
        ("T5ForConditionalGeneration", True),
        ("LlamaForCausalLM", False),
        ("ViTForImageClassification", False),
        ("LlamaForSequenceClassification", True),
    ],
)
def test_who_passes_the_number_of_items_on_is_known(model: str, leaves: bool) -> None:
    made = getattr(transformers, model)
    assert leaves_count(made.__new__(made)) is leaves


def test_of_a_model_without_source_nothing_is_said() -> None:
    def forward(_model: torch.nn.Module) -> None:
        """As in a class that `exec` has made."""

    forward.__code__ = forward.__code__.replace(co_filename="<made>")
    assert not leaves_count(type("Made", (torch.nn.Module,), {"forward": forward})())


def test_operations_are_estimated_as_with_transformers_or_not_at_all(tmp_path: Path) -> None:
    ours, wanted = here(tmp_path / "a", clm()), theirs(tmp_path / "b", clm())
    ours.train()
    wanted.train()
    assert ours.state.total_flos == wanted.state.total_flos > 0
    seen = here(tmp_path / "c", SCRIPTS["images"]())
    seen.train()
    assert not any("total_flos" in line for line in seen.state.log_history)


def test_what_is_saved_is_resumed_and_the_best_comes_back(tmp_path: Path) -> None:
    how = {
        **{"save_strategy": "steps", "save_steps": 3, "eval_strategy": "steps", "eval_steps": 3},
        **{"load_best_model_at_end": True, "metric_for_best_model": "loss"},
    }
    whole = here(tmp_path / "a", clm(), **how)
    whole.train()
    folder = tmp_path / "a" / "checkpoint-6"
    opened = AutoModelForCausalLM.from_pretrained(folder)
    assert opened.config.n_embd == 16
    state = json.loads((folder / "trainer_state.json").read_text())
    assert state["global_step"] == 6
    shutil.copytree(folder, tmp_path / "c" / "checkpoint-6")
    resumed = here(tmp_path / "c", clm(), **how)
    loss = resumed.train(resume_from_checkpoint=True).training_loss
    after = [line["loss"] for line in logged(whole) if line["step"] > 6 and "loss" in line]
    assert loss == pytest.approx(sum(after) / 6)  # as transformers has it: of the steps resumed
    assert logged(resumed)[:-1] == logged(whole)[:-1]
    weights, others = whole.model.state_dict(), resumed.model.state_dict()
    assert all(torch.equal(weights[key], others[key]) for key in weights)
    best = AutoModelForCausalLM.from_pretrained(whole.state.best_model_checkpoint).state_dict()
    assert all(torch.equal(weights[key], best[key]) for key in weights)


class Endless(IterableDataset[Any]):
    """Rows without a length."""

    def __init__(self, rows: Any) -> None:
        self.rows = rows

    def __iter__(self) -> Iterator[Any]:
        return iter(list(self.rows))


class Writer:
    """In place of TensorBoard's."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, float, int]] = []

    def add_scalar(self, name: str, value: float, step: int) -> None:
        if not any(part in name for part in TIMES):
            self.seen.append((name, value, step))

    def add_text(self, name: str, text: str, step: int = 0) -> None:
        assert name
        assert text

    def flush(self) -> None:
        pass

    close = flush


def seen_of(
    train: Callable[..., transformers.Trainer], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> list[tuple[str, float, int]]:
    """What a Trainer writes for TensorBoard, and predicts."""
    script, writer = glue(), Writer()
    script["train_dataset"] = Endless(script["train_dataset"])
    several = script["eval_dataset"]
    script["eval_dataset"] = {"one": several, "two": Rows(several.rows[:5])}
    how = {"eval_strategy": "steps", "eval_steps": 3, "activation_checkpointing": True}
    monkeypatch.setattr(integration_utils, "is_tensorboard_available", lambda: True)
    board = SimpleNamespace(SummaryWriter=lambda log_dir: writer)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", board)
    trainer = train(folder, script, max_steps=6, report_to=["tensorboard"], **how)
    trainer.train()
    prediction = trainer.predict(several)
    assert prediction.predictions.shape == (10, 2)
    return writer.seen + [("predicted", one, 6) for one in prediction.predictions.ravel().tolist()]


def test_data_without_a_length_several_evaluations_tensorboard_and_predict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = seen_of(here, tmp_path / "a", monkeypatch)
    wanted = seen_of(theirs, tmp_path / "b", monkeypatch)
    assert [(name, step) for name, _, step in ours] == [(name, step) for name, _, step in wanted]
    assert {("eval/one_loss", 3), ("eval/two_accuracy", 6)} < {(name, s) for name, _, s in ours}
    values = [[value for name, value, _ in seen if "epoch" not in name] for seen in (ours, wanted)]
    assert values[0] == pytest.approx(values[1], abs=CLOSE, rel=1e-5)


class Notes(TrainerCallback):
    """Writes down what it sees, and asks for an evaluation at step 5, where none is due."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self.seen.append("begin")

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> Any:
        self.seen.append(f"step {state.global_step}")
        control.should_evaluate = state.global_step == 5
        return control

    def on_epoch_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self.seen.append(f"epoch {state.epoch}")

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any, **more: Any) -> None:
        self.seen.append(f"evaluated {metrics['eval_loss']:.4f}")

    def on_train_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self.seen.append("end")


def test_callbacks_see_what_they_see_with_transformers(tmp_path: Path) -> None:
    notes, others = Notes(), Notes()
    here(tmp_path / "a", {**clm(), "callbacks": [notes]}).train()
    theirs(tmp_path / "b", {**clm(), "callbacks": [others]}).train()
    assert notes.seen == others.seen
    assert "evaluated" in notes.seen[6]


def test_early_stopping_ends_the_training(tmp_path: Path) -> None:
    how = {
        **{"save_strategy": "steps", "save_steps": 2, "eval_strategy": "steps", "eval_steps": 2},
        **{"load_best_model_at_end": True, "metric_for_best_model": "loss"},
        **{"learning_rate": 1e-2, "save_only_model": True},
    }
    stopping = [EarlyStoppingCallback(early_stopping_patience=2)]
    ours = here(tmp_path / "a", {**clm(), "callbacks": stopping}, **how)
    wanted = theirs(tmp_path / "b", {**clm(), "callbacks": stopping}, **how)
    assert ours.train().global_step == wanted.train().global_step < 12
    assert_same_logs(ours, wanted)


class OwnLoss(p2ptrain.hf.Trainer):
    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        return super().compute_loss(*args, **kwargs)


class SeesGradients(TrainerCallback):
    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        pass


def test_what_would_never_be_called_is_refused(tmp_path: Path) -> None:
    script = clm()
    with pytest.raises(OptionError, match=r"OwnLoss.compute_loss would never be called"):
        OwnLoss(args=arguments(tmp_path), **script)
    with pytest.raises(OptionError, match=r"SeesGradients.on_pre_optimizer_step would never"):
        here(tmp_path, {**script, "callbacks": [SeesGradients()]})
    with pytest.raises(OptionError, match="searches no hyperparameters"):
        here(tmp_path, script).hyperparameter_search()
    with pytest.raises(OptionError, match="no optimizer state that p2ptrain reads"):
        here(tmp_path, script).train(resume_from_checkpoint=str(tmp_path))
