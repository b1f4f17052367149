"""LoRA adapters by peft on transformers' models: what is frozen counts once, and losses are exact.

Layers are frozen in the middle of the model: gradients pass through them to the adapters before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from p2ptrain.model.stage.optimizer_spec import AdamW
from tests.support import zoo
from tests.support.curves import Case, difference, household_run, plain_torch

TARGETS: dict[str, Sequence[str]] = {
    "bert": ["query", "value"],
    "gpt2": ["c_attn"],
    "llama": ["q_proj", "v_proj"],
    "t5": ["q", "v"],
}


def t5() -> zoo.Made:
    """An encoder and a decoder: what frozen layers give crosses many others."""
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=40,
        d_model=32,
        d_kv=16,
        d_ff=48,
        num_layers=2,
        num_heads=2,
        dropout_rate=0.0,
        decoder_start_token_id=0,
        use_cache=False,
    )

    def tokens() -> Tensor:
        return torch.randint(1, 40, (8,))

    data = [
        ({"input_ids": tokens(), "decoder_input_ids": tokens()}, tokens())
        for _ in range(zoo.SAMPLES)
    ]

    def loss(output: Any, target: Tensor) -> Tensor:
        return cross_entropy(output.logits.flatten(0, 1), target.flatten())

    return zoo.Made("t5", T5ForConditionalGeneration(config), data, loss)


def adapted(name: str) -> zoo.Made:
    peft = pytest.importorskip("peft")

    torch.manual_seed(0)
    made = t5() if name == "t5" else zoo.make(name)
    config = peft.LoraConfig(
        r=2,
        target_modules=list(TARGETS[name]),
        fan_in_fan_out=name == "gpt2",
        modules_to_save=["classifier"] if name == "bert" else None,
    )
    model: Any = peft.get_peft_model(made.model, config)
    assert isinstance(model, nn.Module)
    return replace(made, model=model)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", TARGETS)
async def test_adapters_train_as_in_plain_torch(name: str) -> None:
    case = Case(name, devices=2, micro_batch=8, steps=3, optimizer=AdamW(lr=0.01))
    ours = (await household_run(case, adapted(name))).outcome
    found = difference(ours, plain_torch(case, adapted(name)))
    assert (found.loss, found.state) == (0.0, 0.0)
