from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import mse_loss

from p2ptrain.errors import OptionError, ScriptError
from p2ptrain.job.job import Job
from p2ptrain.model.stage.optimizer_spec import SGD

DATA = [(torch.zeros(3), torch.zeros(1)) for _ in range(10)]


def make(**changes: Any) -> Job:
    fields: dict[str, Any] = {
        "model": torch.nn.Linear(3, 1),
        "data": DATA,
        "loss": mse_loss,
        "optimizer": SGD(lr=0.1),
        "batch_size": 4,
    }
    return Job(**{**fields, **changes})


LOADER = torch.utils.data.DataLoader(DATA, batch_size=5)  # type: ignore[arg-type]


class Endless(torch.utils.data.IterableDataset[int]):
    def __len__(self) -> int:
        return 10

    def __iter__(self) -> Iterator[int]:
        return iter(range(10))


class Broken:
    def __len__(self) -> int:
        raise RuntimeError("no such file")

    def __getitem__(self, index: int) -> int:
        return index


def frozen() -> torch.nn.Module:
    return torch.nn.Linear(3, 1).requires_grad_(False)


@pytest.mark.parametrize(
    ("changes", "error", "told"),
    [
        ({"model": torch.nn.Linear}, ScriptError, "the class Linear; give an instance"),
        ({"model": lambda x: x}, ScriptError, "must be a torch.nn.Module, not function"),
        ({"model": frozen()}, ScriptError, "no parameter that requires a gradient"),
        ({"model": torch.nn.LazyLinear(1)}, ScriptError, "run it once on a sample"),
        ({"model": torch.jit.script(torch.nn.Linear(3, 1))}, ScriptError, "TorchScript"),
        ({"loss": "mse"}, ScriptError, "loss must be a function, not str"),
        ({"loss": torch.nn.MSELoss}, ScriptError, "loss is the class MSELoss; give an instance"),
        ({"optimizer": torch.optim.SGD}, OptionError, r"not the class SGD: call it with"),
        ({"optimizer": "Adam"}, OptionError, "not builtins.str"),
        ({"optimizer": SGD}, OptionError, "not the class SGD"),
        ({"data": 3}, ScriptError, "must be a dataset .* or a DataLoader, not int"),
        ({"data": "train.csv"}, ScriptError, "not str"),
        ({"data": Endless(), "batch_size": None}, OptionError, "batch_size is missing"),
        ({"batch_size": None}, OptionError, "batch_size is missing"),
        ({"data": LOADER}, OptionError, "batch_size is 4, but the DataLoader's is 5: .* leave it"),
        ({"data": []}, ScriptError, "data is empty"),
        ({"data": Broken()}, ScriptError, r"len\(data\) failed: RuntimeError: no such file"),
        ({"batch_size": 11}, ScriptError, "10 samples, fewer than one batch of 11"),
        ({"batch_size": 0}, OptionError, "batch_size must be at least 1, not 0"),
        ({"batch_size": 2.0}, OptionError, "batch_size must be a whole number, not 2.0"),
        ({"batch_size": True}, OptionError, "batch_size must be a whole number"),
        ({"micro_batch": -1}, OptionError, "micro_batch must be at least 1"),
        ({"epochs": 0}, OptionError, "epochs must be at least 1"),
        ({"epochs": "3"}, OptionError, "epochs must be a whole number, not '3'"),
        ({"seed": 2**63 - 1}, OptionError, "seed must be below"),
        ({"seed": 0.5}, OptionError, "seed must be a whole number"),
        ({"schedule": 0.9}, ScriptError, "schedule must be a function, not float"),
        ({"clip_grad_norm": 0}, OptionError, "clip_grad_norm must be a positive number"),
        ({"clip_grad_norm": float("nan")}, OptionError, "clip_grad_norm"),
        ({"clip_grad_norm": "1"}, OptionError, "clip_grad_norm"),
        ({"eval_data": 3}, ScriptError, "eval_data must be a dataset"),
        ({"metrics": {"accuracy": 1}, "eval_data": DATA}, ScriptError, "metrics.'accuracy'."),
        ({"metrics": [len], "eval_data": DATA}, ScriptError, "metrics must be a dict"),
        ({"metrics": {"accuracy": max}}, ScriptError, "give eval_data too"),
    ],
)
def test_a_wrong_field_is_named(changes: dict[str, Any], error: type, told: str) -> None:
    with pytest.raises(error, match=told):
        make(**changes)


def test_a_micro_batch_is_the_whole_batch_at_most() -> None:
    """As `batch.split(micro_batch)` has it."""
    assert make(batch_size=4, micro_batch=5).micro_batch == 4
    assert replace(make(batch_size=8, micro_batch=8), batch_size=4).micro_batch == 4


def test_the_size_of_mini_batches_is_the_loaders() -> None:
    assert make(data=LOADER, batch_size=None).batch_size == 5
    assert make(data=LOADER, batch_size=5).batch_size == 5
    assert make(data=LOADER, batch_size=None, epochs=3).total_steps() == 6


def test_the_end_of_a_stream_is_not_known_beforehand() -> None:
    assert make(data=Endless(), batch_size=4).total_steps(7) is None


def test_numpy_integers_become_int() -> None:
    job = make(batch_size=np.int64(4), micro_batch=np.int32(2), seed=np.int8(3))
    assert (type(job.batch_size), type(job.micro_batch), type(job.seed)) == (int, int, int)


def test_total_steps_is_the_smaller_of_steps_and_epochs() -> None:
    job = make(epochs=3)
    assert job.steps_per_epoch == 2
    assert [job.total_steps(), job.total_steps(5), job.total_steps(50)] == [6, 5, 6]


def test_without_a_schedule_numbers_stay() -> None:
    numbers = make().numbers
    assert numbers.changes(7, 0) == {}
    assert numbers.rates({}) == (0.1,)


def test_a_schedule_is_a_factor_on_the_rate() -> None:
    numbers = make(schedule=lambda update: 0.5**update).numbers
    assert numbers.changes(3, 0) == {"lr": (0.1 * 0.125,)}
    assert numbers.rates(numbers.changes(3, 0)) == (0.1 * 0.125,)


def test_a_failing_schedule_is_a_script_error_with_its_cause() -> None:
    with pytest.raises(ScriptError, match=r"schedule\(0\) failed: ZeroDivisionError") as caught:
        make(schedule=lambda update: 1 / update).numbers.changes(0, 0)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_a_factor_that_is_not_finite_is_refused() -> None:
    with pytest.raises(ScriptError, match=r"schedule\(1\) gave inf"):
        make(schedule=lambda update: float("inf")).numbers.changes(1, 0)


def test_a_schedule_that_ends_itself_ends_no_event_loop() -> None:
    with pytest.raises(ScriptError, match=r"schedule\(0\) failed: SystemExit: 3"):
        make(schedule=lambda update: sys.exit(3)).numbers.changes(0, 0)


def test_a_schedule_that_makes_a_learning_rate_beyond_float32_is_a_script_error() -> None:
    """Torch would raise in the middle of an update, on whatever device that is."""
    job = make(optimizer=SGD(lr=10.0), schedule=lambda update: 10.0 ** (29 * update))
    assert job.numbers.changes(1, 0) == {"lr": (10.0 * 1e29,)}
    with pytest.raises(ScriptError, match=r"schedule\(2\) gave 1e\+58: with lr=10.0"):
        job.numbers.changes(2, 0)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("shuffle", "Job has no shuffle: samples of a dataset are shuffled in every epoch"),
        ("gradient_accumulation_steps", "`batch_size` is the samples of one update"),
        ("microbatch", "Job has no microbatch: did you mean micro_batch?"),
        ("wandb", "Job has no wandb: it has model, data, loss"),
    ],
)
def test_what_a_job_does_not_have_is_said_with_where_it_belongs(name: str, words: str) -> None:
    with pytest.raises(OptionError, match=re.escape(words)):
        make(**{name: True})


def test_a_pair_of_tensors_is_no_dataset() -> None:
    with pytest.raises(ScriptError, match=r"write torch\.utils\.data\.TensorDataset\(x, y\)"):
        make(data=(torch.ones(9, 4), torch.ones(9)))
