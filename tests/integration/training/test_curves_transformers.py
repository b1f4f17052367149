"""Transformers' own models, unmodified, on several devices: plain torch's curve to the bit.

Stages of more of them are in `tests/integration/model/test_transformers.py`.
"""

from __future__ import annotations

import pytest
import torch

from p2ptrain.job.job import Job
from p2ptrain.job.train_options import TrainOptions
from p2ptrain.model.stage.optimizer_spec import SGD, AdamW
from tests.integration.training.household import devices
from tests.support import zoo
from tests.support.curves import Case, difference, plain_torch, with_p2ptrain


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "case",
    [
        Case("resnet", devices=2, micro_batch=8, steps=3),
        Case("bert", devices=3, micro_batch=4, steps=3, optimizer=AdamW(lr=0.003), decay=0.9),
        Case("gpt2", devices=3, micro_batch=6, steps=3, clip_grad_norm=0.5),
        Case("llama", devices=2, micro_batch=8, steps=3),
    ],
    ids=str,
)
async def test_a_transformer_trains_as_in_plain_torch(case: Case) -> None:
    found = difference(await with_p2ptrain(case), plain_torch(case))
    assert (found.loss, found.state) == (0.0, 0.0)


@pytest.mark.timeout(120)
async def test_a_private_model_that_computes_its_own_loss_is_divided() -> None:
    """Its labels are inputs, and stay with the data all the same."""
    steps, size, part = 3, 8, 4
    made, plain = zoo.make("gpt2"), zoo.make("gpt2")
    tokens = torch.randint(0, 40, (24, 8), generator=torch.Generator().manual_seed(1))
    labels = tokens.masked_fill(tokens % 5 == 0, -100)
    data = [{"input_ids": x, "labels": y} for x, y in zip(tokens, labels, strict=True)]
    job = Job(made.model, data, None, SGD(lr=0.05), batch_size=size, micro_batch=part, epochs=1)
    async with devices(3) as household:
        options = TrainOptions(wait_for=3, planner="pp", steps=steps, private=True)
        await household.holder_run(job, options).run()
    first, *between, last = [d.name for stage in household.plan.stages for d in stage.devices]
    assert (first, sorted(between), last) == ("a", ["b", "c"], "a")

    order = torch.randperm(len(data), generator=torch.Generator().manual_seed(0))
    model, losses = plain.model.train(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for batch in order.split(size):
        total, every = 0.0, int((labels[batch, 1:] != -100).sum())
        for q in batch.split(part):
            weight = int((labels[q, 1:] != -100).sum()) / every
            loss = model(input_ids=tokens[q], labels=labels[q]).loss
            (loss * weight).backward()
            total += loss.item() * weight
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    assert household.losses == losses
    own = plain.model.state_dict()
    assert all(torch.equal(own[name], tensor) for name, tensor in made.model.state_dict().items())
