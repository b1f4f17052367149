"""Transformers' own models, unmodified, on several devices: plain torch's curve to the bit.

Stages of more of them are in `tests/integration/model/test_transformers.py`.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

from p2ptrain.job.job import Job
from p2ptrain.job.train_options import TrainOptions
from p2ptrain.model.stage.optimizer_spec import SGD, AdamW
from tests.integration.training.group_plans import divided, force
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


def encoder_decoder(name: str) -> nn.Module:
    """Two layers on either side, without dropout."""
    import transformers

    size = {"vocab_size": 40, "d_model": 32, "use_cache": False, "decoder_start_token_id": 0}
    torch.manual_seed(4)
    if name == "t5":
        more = {"d_kv": 16, "d_ff": 48, "num_layers": 2, "num_heads": 2, "dropout_rate": 0.0}
        return transformers.T5ForConditionalGeneration(transformers.T5Config(**size, **more))
    sides = {
        f"{side}_{what}": number
        for side in ("encoder", "decoder")
        for what, number in (("layers", 2), ("attention_heads", 2), ("ffn_dim", 48))
    }
    none = dict.fromkeys(("dropout", "attention_dropout", "activation_dropout"), 0.0)
    config = transformers.BartConfig(**size, **sides, **none, max_position_embeddings=16)
    return transformers.BartForConditionalGeneration(config)


def translated(rows: list[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    """Both sides padded to the longest."""
    given = pad_sequence([x for x, _ in rows], batch_first=True)
    labels = pad_sequence([y for _, y in rows], batch_first=True, padding_value=-100)
    return {"input_ids": given, "attention_mask": (given > 0).long(), "labels": labels}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", ["t5", "bart"])
@pytest.mark.parametrize("stages", [3, 2])
async def test_an_encoder_and_a_decoder_train_as_in_plain_torch(
    name: str, stages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Padded on both sides, on several devices; the mini-batch's mean is over its tokens.

    The embedding is used three times: with three stages once in each, with two twice in the first.
    """
    draw = torch.Generator().manual_seed(2)
    rows = [
        tuple(torch.randint(1, 40, (n + k % 5,), generator=draw) for n in (4, 3)) for k in range(24)
    ]
    data: DataLoader[Any] = DataLoader(rows, batch_size=8, collate_fn=translated)  # type: ignore[arg-type]
    model, plain = encoder_decoder(name), encoder_decoder(name).train()
    job = Job(model, data, None, SGD(lr=0.1, momentum=0.9), micro_batch=4, epochs=1)
    force(monkeypatch, [divided(4)] * stages)
    async with devices(stages) as household:
        await household.holder_run(job, TrainOptions(wait_for=stages)).run()
    assert len(household.plan.stages) == stages

    optimizer, losses = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9), []
    for batch in data:
        total, every = 0.0, int((batch["labels"] != -100).sum())
        for part in (slice(4), slice(4, None)):
            piece = {key: value[part] for key, value in batch.items()}
            weight = int((piece["labels"] != -100).sum()) / every
            loss = plain(**piece).loss
            (loss * weight).backward()
            total += loss.item() * weight
        losses.append(total)
        optimizer.step()
        optimizer.zero_grad()
    trained, wanted = model.state_dict(), plain.state_dict()
    assert household.losses == losses
    assert [key for key in wanted if not torch.equal(trained[key], wanted[key])] == []
