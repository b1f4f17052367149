"""A job under autocast trains what plain torch trains under `torch.autocast`, to the bit."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss

from p2ptrain.errors import OptionError
from p2ptrain.events import Eval
from p2ptrain.job.job import Job
from p2ptrain.job.train_options import TrainOptions
from p2ptrain.model.stage.optimizer_spec import AdamW
from tests.integration.training.household import devices


class Attending(nn.Module):
    """What autocast casts, what it computes in float32, a weight used twice, a normalisation."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.first = nn.Linear(6, 16), nn.Linear(16, 16)
        self.norm = nn.LayerNorm(16)
        self.second, self.head = nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.first(torch.relu(self.first(self.embed(x)))))
        weights = torch.softmax(x @ x.transpose(-1, -2), dim=-1)
        return self.head(self.second(self.norm(weights @ x))).mean(1)  # type: ignore[no-any-return]


class Remembering(nn.Module):
    """A whole LSTM, whose weights autocast casts once for both calls."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(6, 8)
        self.steps = nn.LSTM(8, 6, num_layers=2, batch_first=True, bidirectional=True)
        self.head = nn.Linear(12, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        forth, _ = self.steps(x)
        back, (state, _) = self.steps(x.flip(1))
        return self.head(forth[:, -1] + back[:, 0] + torch.cat([state[0], state[1]], 1))  # type: ignore[no-any-return]


def images() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    return [
        (torch.randn(5, 6, generator=generator), torch.randint(4, (), generator=generator))
        for _ in range(32)
    ]


def squared(output: Tensor, target: Tensor) -> Tensor:
    return mse_loss(output, nn.functional.one_hot(target, 4).float())


def job(loss: Any, **changes: Any) -> Job:
    torch.manual_seed(7)
    settings: dict[str, Any] = {"batch_size": 8, "micro_batch": 4, "epochs": 3, **changes}
    model, data = Attending(), images()
    return Job(model, data, loss, AdamW(lr=0.01), autocast=torch.bfloat16, **settings)


def plain(job: Job) -> tuple[list[float], dict[str, Tensor]]:
    """By the contract's rules, under autocast."""
    model, losses = copy.deepcopy(job.model).train(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    data = list(job.data)
    for epoch in range(job.epochs):
        order = torch.randperm(len(data), generator=torch.Generator().manual_seed(epoch))
        for batch in order.split(job.batch_size):
            total = 0.0
            for piece in batch.split(4):
                x = torch.stack([data[k][0] for k in piece])
                y = torch.stack([data[k][1] for k in piece])
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    loss = job.loss(model(x), y)
                (loss * (len(piece) / len(batch))).backward()
                total += loss.item() * (len(piece) / len(batch))
            optimizer.step()
            optimizer.zero_grad()
            losses.append(total)
    return losses, model.state_dict()


@pytest.mark.parametrize("loss", [cross_entropy, squared])
@pytest.mark.parametrize("count", [1, 3])
async def test_the_curve_is_that_of_plain_torch_under_autocast(loss: Any, count: int) -> None:
    made = job(loss)
    losses, weights = plain(made)
    how: dict[str, Any] = {"local": True} if count == 1 else {"wait_for": count, "planner": "pp"}
    async with devices(count) as household:
        await household.holder_run(made, TrainOptions(**how)).run()
    assert household.losses == losses
    trained = made.model.state_dict()
    assert all(tensor.dtype is torch.float32 for tensor in trained.values())
    assert all(torch.equal(trained[name], weights[name]) for name in weights)
    assert household.plan.changes_results == ()


async def test_a_whole_lstm_under_autocast_is_plain_torchs() -> None:
    torch.manual_seed(7)
    made = replace(job(cross_entropy), model=Remembering())
    losses, weights = plain(made)
    async with devices(3) as household:
        await household.holder_run(made, TrainOptions(wait_for=3, planner="pp")).run()
    assert household.losses == losses
    trained = made.model.state_dict()
    assert all(torch.equal(trained[name], weights[name]) for name in weights)


async def test_evaluations_are_under_autocast_too() -> None:
    seen: list[torch.dtype] = []

    def accuracy(output: Tensor, target: Tensor) -> Tensor:
        seen.append(output.dtype)
        return (output.argmax(1) == target).float().mean()

    made = job(cross_entropy, eval_data=images(), metrics={"accuracy": accuracy})
    async with devices(2) as household:
        await household.holder_run(made, TrainOptions(wait_for=2, planner="pp")).run()
    last = [event for event in household.events if isinstance(event, Eval)][-1]
    x, y = (torch.stack(column) for column in zip(*images(), strict=True))
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        output = made.model.eval()(x)
        wanted = cross_entropy(output, y)
    assert set(seen) == {torch.bfloat16}
    assert last.metrics["loss"] == pytest.approx(wanted.item(), rel=1e-5)
    assert last.metrics["accuracy"] == (output.argmax(1) == y).float().mean().item()


@pytest.mark.parametrize("dtype", [torch.float64, "bfloat16", True])
def test_other_types_are_refused(dtype: Any) -> None:
    made = job(cross_entropy)
    with pytest.raises(OptionError, match=r"autocast must be torch\.bfloat16"):
        Job(made.model, made.data, made.loss, made.optimizer, batch_size=8, autocast=dtype)
