"""A model with backwards of its own under each way to divide it, against plain torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, max_pool2d

from p2ptrain.job.job import Job
from p2ptrain.job.train_options import TrainOptions
from p2ptrain.model.stage.optimizer_spec import SGD
from tests.integration.model.test_own_backwards import Reversed, Swish
from tests.integration.training.household import devices
from tests.support import reference

SGD_ARGUMENTS: dict[str, Any] = {"lr": 0.05, "momentum": 0.9}


class Images(nn.Module):
    """Convolutions, the first of which can be tiled, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv2d(c, 8, 3, padding=1) for c in (3, 8, 8))
        self.head = nn.Linear(8 * 8 * 8, 4)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, 3, 16, 16) -> (batch, 4)."""
        one, two, three = self.layers
        x = Swish.apply(two(torch.relu(one(x))))  # type: ignore[no-untyped-call]
        x = Reversed.apply(max_pool2d(torch.relu(three(x)), 2), 0.5)  # type: ignore[no-untyped-call]
        scores: Tensor = self.head(x.flatten(1))
        return scores


def _made() -> tuple[nn.Module, list[tuple[Tensor, Tensor]]]:
    torch.manual_seed(0)
    data = [(torch.randn(3, 16, 16).double(), torch.randint(0, 4, ())) for _ in range(24)]
    return Images().double(), data


@pytest.mark.parametrize("planner", ["pp", "dp", "hybrid", "tiles"])
async def test_losses_are_plain_torchs(planner: str) -> None:
    model, data = _made()
    optimizer = SGD(**SGD_ARGUMENTS)
    job = Job(model, data, cross_entropy, optimizer, batch_size=8, micro_batch=4, epochs=2)
    async with devices(3) as household:
        await household.holder_run(job, TrainOptions(wait_for=3, planner=planner)).run()
        losses = household.losses
    plain, data = _made()
    recipe = reference.Recipe(
        lambda parameters: torch.optim.SGD(parameters, **SGD_ARGUMENTS),
        batch_size=8,
        micro_batch=4,
        epochs=2,
    )
    outcome = reference.train(plain, data, cross_entropy, recipe)
    assert losses == pytest.approx(outcome.losses, abs=1e-12, rel=0)
    for key, tensor in model.state_dict().items():
        torch.testing.assert_close(tensor, outcome.state_dict[key], rtol=1e-10, atol=1e-12)
