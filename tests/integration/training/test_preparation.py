"""A job that goes on from a checkpoint computes as if it had never stopped."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from p2ptrain.errors import CaptureError, OptionError
from p2ptrain.events import Plan, Step
from p2ptrain.holder.start.prepare import prepare
from p2ptrain.holder.start.prepared_job import PreparedJob
from p2ptrain.job.job import Job
from p2ptrain.job.train_options import TrainOptions
from p2ptrain.model.stage.optimizer import state_layout
from p2ptrain.model.stage.optimizer_spec import SGD, Adam
from p2ptrain.model.wire.tensor_layout import ALIGNMENT
from p2ptrain.state import checkpoint_files
from p2ptrain.state.checkpoint_files import Checkpoint
from tests.integration.training.household import devices
from tests.support.zoo_transformers import llama


def prepared(
    resume: Path | None = None,
    planner: str = "auto",
    optimizer: SGD | Adam = SGD(lr=0.1, momentum=0.9),  # noqa: B008
    frozen: bool = False,
) -> PreparedJob:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)  # equal models are captured once
        model = nn.Sequential(nn.Linear(5, 33), nn.Tanh(), nn.Linear(33, 13), nn.Linear(13, 3))
    model[2].weight = nn.Parameter(torch.zeros(33, 13).t())  # lies by columns
    model[0].requires_grad_(not frozen)
    data = [(torch.full((5,), float(n)), n % 3) for n in range(8)]
    job = Job(model, data, nn.functional.cross_entropy, optimizer, batch_size=4, micro_batch=2)
    return prepare(job, TrainOptions(resume=resume, planner=planner))


@pytest.mark.parametrize(("noted", "evaluated"), [(None, 2), (1, 1), (2, 2)])
def test_what_was_evaluated_before_the_checkpoint_is_known(
    tmp_path: Path, noted: int | None, evaluated: int
) -> None:
    """A file that does not say counts as one whose evaluation was reported."""
    first = prepared()
    model = {name.removeprefix("model:"): tensor for name, tensor in first.state.items()}
    progress = replace(first.progress(2), evaluated=noted)
    checkpoint_files.save(tmp_path, Checkpoint(progress, model, {}))
    resumed = prepared(tmp_path)
    assert (resumed.first_step, resumed.evaluated) == (2, evaluated)


def test_a_planner_that_there_is_not_is_named_before_anybody_is_waited_for() -> None:
    with pytest.raises(OptionError, match=r"unknown planner 'best' \(known: auto, dp, .*tiles\)"):
        prepared(planner="best")


def test_another_default_type_than_other_devices_have_is_refused() -> None:
    torch.set_default_dtype(torch.float64)
    try:
        with pytest.raises(OptionError, match=r"torch's default type is torch\.float64 here"):
            prepared()
    finally:
        torch.set_default_dtype(torch.float32)


def placed(tensor: Tensor) -> tuple[tuple[int, ...], int]:
    """(strides, bytes past the grid): products of small matrices differ in bits with both."""
    return tensor.stride(), tensor.data_ptr() % ALIGNMENT


def test_what_a_checkpoint_gives_lies_in_memory_as_in_the_model(tmp_path: Path) -> None:
    first = prepared()
    names = [name.removeprefix("model:") for name in first.state]
    model = {name: torch.randn(first.state[f"model:{name}"].shape) for name in names}
    slots = {f"{name}.momentum_buffer": tensor + 1 for name, tensor in model.items()}
    others = {"a constant of another loss": torch.ones(3)}
    checkpoint_files.save(tmp_path, Checkpoint(first.progress(2), {**model, **others}, slots))
    resumed = prepared(tmp_path)
    assert resumed.first_step == 2
    for name in names:
        wanted = placed(first.state[f"model:{name}"])
        kept = resumed.state[f"model:{name}"]
        slot = resumed.state[f"optimizer:{name}.momentum_buffer"]
        assert torch.equal(kept, model[name])
        assert torch.equal(slot, model[name] + 1)
        assert [placed(kept), placed(slot)] == [wanted, wanted], name


ADAM, AMSGRAD = Adam(lr=0.1), Adam(lr=0.1, amsgrad=True)
WEIGHTS = ("weight", "bias")
WITH_MOMENTUM, WITHOUT = SGD(lr=0.1, momentum=0.9), SGD(lr=0.1)


def kept(folder: Path, optimizer: SGD | Adam) -> None:
    """A checkpoint of that optimizer, all of whose parameters have been updated."""
    first = prepared(optimizer=optimizer)
    model = {name.removeprefix("model:"): tensor for name, tensor in first.state.items()}
    layout = state_layout(optimizer, model)
    slots = {name: torch.ones(shape, dtype=dtype) for name, (dtype, shape) in layout.items()}
    checkpoint_files.save(folder, Checkpoint(first.progress(2), model, slots))


@pytest.mark.parametrize(
    ("before", "now", "words"),
    [
        (
            WITH_MOMENTUM,
            WITHOUT,
            "its optimizer keeps momentum_buffer, which SGD as given does not",
        ),
        (AMSGRAD, ADAM, "its optimizer keeps max_exp_avg_sq, which Adam as given does not"),
        (ADAM, AMSGRAD, "its optimizer keeps no max_exp_avg_sq, which Adam as given does"),
    ],
)
def test_an_optimizer_that_keeps_something_else_is_refused(
    tmp_path: Path, before: SGD | Adam, now: SGD | Adam, words: str
) -> None:
    kept(tmp_path, before)
    with pytest.raises(OptionError, match=f"of another training: {words}: give it the arguments"):
        prepared(tmp_path, optimizer=now)


def test_an_optimizer_that_kept_nothing_begins_to(tmp_path: Path) -> None:
    """As torch's own, which makes what is not there with the next update."""
    kept(tmp_path, WITHOUT)
    assert not [n for n in prepared(tmp_path).state if n.startswith("optimizer:")]


def test_what_is_frozen_since_has_no_optimizer_state(tmp_path: Path) -> None:
    kept(tmp_path, WITH_MOMENTUM)
    found = prepared(tmp_path, frozen=True).state
    slots = {name for name in found if name.startswith("optimizer:")}
    assert slots == {f"optimizer:{i}.{kind}.momentum_buffer" for i in (2, 3) for kind in WEIGHTS}


def test_weights_that_a_forward_writes_to_are_as_they_were_afterwards() -> None:
    """An embedding with a largest norm scales the rows that are looked up."""
    model = nn.Sequential(nn.Embedding(9, 3, max_norm=0.1), nn.Flatten(), nn.Linear(6, 3))
    before = model[0].weight.detach().clone()  # type: ignore[union-attr]
    data = [(torch.tensor([n, 2]), n % 3) for n in range(8)]
    job = Job(model, data, nn.functional.cross_entropy, SGD(lr=0.1), batch_size=4)
    prepare(job, TrainOptions())
    assert torch.equal(model[0].weight, before)  # type: ignore[arg-type]


class Counting(nn.Module):
    """Scales by how often it was called, times `by`."""

    def __init__(self, by: float) -> None:
        super().__init__()
        self.layer, self.calls, self.by = nn.Linear(5, 3), itertools.count(), by

    def forward(self, x: Tensor) -> Tensor:
        scaled: Tensor = self.layer(x) * (1 + self.by * next(self.calls))
        return scaled


def _counting(by: float) -> Job:
    data = [(torch.randn(5), n % 3) for n in range(16)]
    return Job(Counting(by), data, nn.functional.cross_entropy, SGD(lr=0.1), batch_size=8)


async def test_a_model_that_is_captured_wrongly_is_refused_before_the_first_step() -> None:
    async with devices(2) as household:
        options = TrainOptions(wait_for=2, steps=2)
        with pytest.raises(CaptureError, match="than the module itself in plain torch: the loss"):
            await household.holder_run(_counting(0.1), options).run()
        assert not [event for event in household.events if isinstance(event, (Step, Plan))]


async def test_rounding_stands_in_the_plan() -> None:
    async with devices(2) as household:
        options = TrainOptions(wait_for=2, steps=2)
        await household.holder_run(_counting(1e-7), options).run()
        (plan,) = [event for event in household.events if isinstance(event, Plan)]
        assert any(text.startswith("other kernels") for text in plan.changes_results)


class Completing(nn.Module):
    """A causal language model of transformers, whose samples are padded."""

    def __init__(self, attention: str) -> None:
        super().__init__()
        sizes = {"vocab_size": 20, "hidden_size": 16, "intermediate_size": 16}
        self.language = llama(**sizes, num_hidden_layers=1, attn_implementation=attention)

    def forward(self, words: Tensor, there: Tensor) -> Tensor:
        logits: Tensor = self.language(words, attention_mask=there).logits
        return logits.transpose(1, 2)


@pytest.mark.parametrize(
    ("attention", "autocast", "micro_batch", "fewest", "said"),
    [
        ("sdpa", None, 2, 4, "micro-batches without padding"),
        ("sdpa", torch.bfloat16, 2, 4, "micro-batches without padding"),
        ("sdpa", torch.bfloat16, 2, 8, "other kernels"),
        ("sdpa", None, 4, 4, None),
        ("eager", None, 2, 4, None),
    ],
    ids=["parts", "autocast", "unpadded", "whole", "eager"],
)
def test_samples_without_padding_are_compared_too(
    attention: str, autocast: torch.dtype | None, micro_batch: int, fewest: int, said: str | None
) -> None:
    """transformers computes them by another kernel; a trace does not see them."""
    pytest.importorskip("transformers")
    torch.manual_seed(0)
    lengths = [fewest + (8 - fewest) * (n == 3) for n in range(4)]
    words = [torch.randint(1, 20, (8,)) for _ in lengths]
    data = [((w, torch.arange(8) < n), w) for w, n in zip(words, lengths, strict=True)]
    model, loss = Completing(attention), nn.functional.cross_entropy
    more: dict[str, Any] = {"batch_size": 4, "micro_batch": micro_batch, "autocast": autocast}
    job = Job(model, data, loss, SGD(lr=0.1), **more)
    changes = prepare(job, TrainOptions(local=True, steps=1)).compare()
    assert [text.startswith(said or "") for text in changes] == [True] * (said is not None)
