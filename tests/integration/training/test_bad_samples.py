"""Samples that the model cannot compute with are reported as such: where, and what to look at."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from p2ptrain import events
from p2ptrain.errors import CaptureError, ScriptError, TrainingError
from p2ptrain.job.job import Job
from p2ptrain.model.stage.optimizer_spec import SGD
from tests.integration.training.household import devices
from tests.integration.training.jobs import one_stage_each

SAMPLES = 32


def job(*, label: int = 0, token: int = 0, **changes: object) -> Job:
    """Batches of 8 in micro-batches of 4; sample 13 is an odd one."""
    inputs = torch.zeros(SAMPLES, 3, dtype=torch.int64)
    labels = torch.zeros(SAMPLES, dtype=torch.int64)
    inputs[13], labels[13] = token, label
    layers = [nn.Embedding(5, 4), nn.Flatten(), *(nn.Linear(12, 12) for _ in range(3))]
    model = nn.Sequential(*layers, nn.Linear(12, 2))
    data = torch.utils.data.TensorDataset(inputs, labels)
    sizes = {"batch_size": 8, "micro_batch": 4, **changes}
    return Job(model, data, cross_entropy, optimizer=SGD(lr=0.1), **sizes)  # type: ignore[arg-type]


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize(
    ("odd", "unit", "why"),
    [
        ({"label": 7}, "5", "Target 7 is out of bounds"),
        ({"token": 9}, "0", "index out of range in self"),
    ],
)
async def test_what_an_operator_refuses_is_reported_by_unit_step_and_micro_batch(
    count: int, odd: dict[str, int], unit: str, why: str
) -> None:
    said = rf"[ab]: layer {unit} failed with micro-batch [01] of step \d: {why}"
    async with devices(count) as household:
        with pytest.raises(TrainingError, match=said):
            await household.holder_run(job(**odd), one_stage_each(count, 8)).run()


async def test_an_evaluation_may_meet_such_samples_too() -> None:
    odd = [(torch.zeros(3, dtype=torch.int64), label) for label in (0, 1, 7)]
    async with devices(2) as household:
        with pytest.raises(TrainingError, match="micro-batch 0 of the evaluation: Target 7 is"):
            await household.holder_run(job(eval_data=odd), one_stage_each(2, 8)).run()


async def test_an_evaluation_of_other_samples_than_training_is_refused_before_it() -> None:
    other = [(torch.zeros(4, dtype=torch.int64), 0)] * 4
    said = r"eval_data\[0\]: input is torch.int64 \[4\], but data\[0\] has torch.int64 \[3\]"
    async with devices(1) as household:
        with pytest.raises(ScriptError, match=said):
            await household.holder_run(job(eval_data=other), one_stage_each(1, 8)).run()
    assert not household.events


class Overwritten(nn.Module):
    """Writes to what its backward needs: plain torch refuses that, too."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(12, 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.sigmoid(self.layer(x))
        out: torch.Tensor = hidden.mul_(2)
        return out


@pytest.mark.parametrize("count", [1, 2])
async def test_a_backward_that_plain_torch_refuses_as_well_is_named_so(count: int) -> None:
    made = job()
    assert isinstance(made.model, nn.Sequential)
    made.model.insert(3, Overwritten())
    said = (
        "the model or its loss fails on batch 1 in plain torch too: RuntimeError: one of the "
        "variables needed for gradient computation has been modified by an inplace operation"
    )
    async with devices(count) as household:
        with pytest.raises(CaptureError, match=said):
            await household.holder_run(made, one_stage_each(count, 8)).run()


SCALE = 1.0


class Scaled(nn.Module):
    """Computes with a global."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(12, 12), nn.Linear(12, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layers(x) * SCALE
        return out


class Rescales(list[tuple[torch.Tensor, int]]):
    """Data that change it, long after the model was captured and compared."""

    reads = 0

    def __getitem__(self, index: object) -> tuple[torch.Tensor, int]:  # type: ignore[override]
        global SCALE
        self.reads += 1
        SCALE = 1.0 if self.reads < 200 else 2.0
        assert isinstance(index, int)
        return super().__getitem__(index)


async def test_a_global_that_the_data_change_under_the_model_is_warned_of_once() -> None:
    torch.manual_seed(0)
    data = Rescales((torch.randn(12), k % 2) for k in range(32))
    sizes = {"batch_size": 8, "micro_batch": 4, "epochs": 16}
    made = Job(Scaled(), data, cross_entropy, optimizer=SGD(lr=0.1), **sizes)  # type: ignore[arg-type]
    async with devices(2) as household:
        await household.holder_run(made).run()
    told = [event.message for event in household.events if isinstance(event, events.Warning)]
    assert [message.partition(" ")[0] for message in told if "was captured" in message] == [
        "'SCALE'"
    ]
