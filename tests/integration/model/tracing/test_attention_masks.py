"""torch's transformers with a mask, and nobody who says whether it is causal."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.nn.modules import transformer

from p2ptrain.model.capture.capture import capture
from tests.support import stage_pipeline, zoo
from tests.support.stage_pipeline import assert_same


class _Masked(nn.Module):
    def __init__(self, causal: bool) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.norm = nn.BatchNorm1d(8)
        self.causal = causal

    def forward(self, x: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(2)
        encoded: Tensor = self.encoder(x.unflatten(1, (2, 4)), mask=mask if self.causal else mask.T)
        return torch.as_tensor(self.norm(encoded.flatten(1)))


@pytest.mark.parametrize("causal", [True, False])
def test_it_is_found_out_with_real_values(causal: bool) -> None:
    """The causal kernel rounds differently from a mask."""
    torch.manual_seed(0)
    data = [(torch.randn(8), torch.randn(8)) for _ in range(stage_pipeline.BATCH)]
    made = zoo.Made("masked", _Masked(causal), data, mse_loss)
    before = copy.deepcopy(made.model.state_dict())
    torchs_own, generator = dict(vars(transformer)), torch.get_rng_state()
    model = stage_pipeline.captured(made)
    attention = "aten.scaled_dot_product_attention.default"
    (node,) = [n for n in model.description.train.nodes if n.operator == attention]
    assert (True in node.args or dict(node.kwargs).get("is_causal") is True) == causal
    assert_same(
        stage_pipeline.plain_step(made),
        stage_pipeline.pipeline_step(made, model, range(len(model.description.units) + 1)),
    )
    assert vars(transformer) == torchs_own
    assert torch.equal(torch.get_rng_state(), generator)
    assert all(torch.equal(before[n], t) for n, t in made.model.state_dict().items())


def test_a_model_that_fails_is_explained_as_others_are() -> None:
    model = nn.Sequential(_Masked(True), nn.Linear(5, 8))
    with pytest.raises(Exception, match=r"fails on the first samples .*: mat1 and mat2"):
        capture(model, mse_loss, (torch.randn(4, 8), torch.randn(4, 8)))
