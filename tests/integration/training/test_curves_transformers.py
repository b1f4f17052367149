"""Transformers' own models, unmodified, on several devices: plain torch's curve to the bit.

Stages of more of them are in `tests/integration/model/test_transformers.py`.
"""

from __future__ import annotations

import pytest

from p2ptrain.model.stage.optimizer_spec import AdamW
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
