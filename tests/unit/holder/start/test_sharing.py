"""What plans a job allows: groups never change results unless somebody asked for it by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from p2ptrain.errors import CaptureError, PlanError, ProtocolError, ScriptError
from p2ptrain.holder.start.prepare import prepare
from p2ptrain.job.job import Job
from p2ptrain.job.train_options import TrainOptions
from p2ptrain.messages.plan_request import SharingLimits
from p2ptrain.model.stage.optimizer_spec import SGD
from p2ptrain.net import cbor
from p2ptrain.net.forms import write_form
from p2ptrain.net.read_form import read_form
from p2ptrain.plan.types.allocation import EVERY_ALLOCATION, Allocation
from p2ptrain.plan.types.request import PlanRequest
from p2ptrain.tiling.planning.make_plan import make_plan
from tests.support import planning_examples

DEALING = frozenset({Allocation.MICRO_BATCHES})
EFFECTS = SharingLimits(effects=("BatchNorm statistics are those of each part",))


@pytest.mark.parametrize("planner", ["auto", "dp", "hybrid", "pipedream", "pp"])
def test_a_model_that_looks_at_no_other_sample_may_be_divided(planner: str) -> None:
    assert list(SharingLimits().allocations(planner)) == [EVERY_ALLOCATION]


def test_auto_only_deals_where_dividing_changes_results() -> None:
    assert list(EFFECTS.allocations("auto")) == [DEALING]


def test_planners_with_a_choice_deal_first_and_asteroids_is_obeyed() -> None:
    assert list(EFFECTS.allocations("dp")) == [DEALING, EVERY_ALLOCATION]
    assert list(EFFECTS.allocations("hybrid")) == [EVERY_ALLOCATION]


@pytest.mark.parametrize("planner", ["auto", "dp", "hybrid"])
def test_what_cannot_be_divided_is_not(planner: str) -> None:
    assert list(SharingLimits(divisible=False).allocations(planner)) == [DEALING]


def test_planners_that_share_by_nature_refuse_a_model_that_cannot_be_shared() -> None:
    own = SharingLimits(unshared="training changes weight_u in unit 1 by other means")
    with pytest.raises(PlanError, match=r"dp gives layers to several devices.*weight_u"):
        own.check("dp")
    with pytest.raises(PlanError, match=r"tiles gives layers to several devices.*weight_u"):
        own.check("tiles")
    own.check("auto")
    own.check("pp")


def test_a_plan_that_divides_says_what_changes_and_one_that_deals_does_not() -> None:
    profile, cluster = planning_examples.household(5, units=8, devices=3)
    request = PlanRequest(64, 8, "dp", allocations=frozenset({Allocation.SAMPLES}))
    assert EFFECTS.changes(make_plan(profile, cluster, request)) == EFFECTS.effects
    dealt = make_plan(profile, cluster, replace(request, allocations=DEALING))
    assert EFFECTS.changes(dealt) == ()


def test_it_travels_and_is_checked() -> None:
    told = cbor.loads(cbor.dumps(write_form(EFFECTS)), 1 << 20)
    assert read_form(SharingLimits, told, "sharing") == EFFECTS
    for wrong in (None, {"more": 1}, {**told, "divisible": 1}, {**told, "effects": ["x" * 2000]}):
        with pytest.raises(ProtocolError):
            read_form(SharingLimits, wrong, "sharing")


def _prepared(model: nn.Module, reduction: str = "mean") -> SharingLimits:
    values = torch.randn(8, 6, generator=torch.Generator().manual_seed(0))
    data = [(row, row[:3]) for row in values]

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return nn.functional.mse_loss(output, target, reduction=reduction)

    job = Job(model, data, loss, SGD(lr=0.1), batch_size=8, micro_batch=4)
    return prepare(job, TrainOptions()).sharing


def test_what_a_graph_does_not_show_is_tried() -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3))
    assert _prepared(model) == SharingLimits()
    with pytest.raises(CaptureError, match="would be 2 times too small"):
        _prepared(model, "sum")


def _labelled(
    labels: list[int],
    model: nn.Module | None = None,
    loss: Callable[[Tensor, Tensor], Tensor] = nn.functional.cross_entropy,
) -> SharingLimits:
    data = [(torch.ones(6) * label, label) for label in labels]
    model, sgd = model or nn.Linear(6, 3), SGD(lr=0.1)
    job = Job(model, data, loss, sgd, batch_size=8, micro_batch=4)
    return prepare(job, TrainOptions()).sharing


def test_targets_that_torch_leaves_out_are_counted() -> None:
    assert _labelled([0, 1, 2] * 32) == SharingLimits()
    assert _labelled([0, 1, 2] * 26 + [-100] * 18) == SharingLimits()


def test_targets_that_are_left_out_beside_another_term_are_seen() -> None:
    """Not only among the first samples: no count weighs both."""

    def both(output: Tensor, target: Tensor) -> Tensor:
        return nn.functional.cross_entropy(output, target) + output.square().mean()

    assert _labelled([0, 1, 1, 2, 0, 2, 1] * 14, loss=both) == SharingLimits()
    (effect,) = _labelled([0, 1, 1, 2, 0, 2, 1] * 12 + [-100] * 18, loss=both).effects
    assert effect.startswith("samples are not computed independently")


def test_no_part_is_one_sample_where_a_normalisation_needs_two() -> None:
    """torch would refuse it; the operator alone makes the running variance NaN."""
    assert not _prepared(
        nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))
    ).divisible
    convolution = nn.Conv1d(1, 2, 1), nn.BatchNorm1d(2), nn.Flatten(), nn.Linear(12, 3)
    normed = _prepared(nn.Sequential(nn.Unflatten(1, (1, 6)), *convolution))
    assert normed.divisible
    assert len(normed.effects) == 1


@pytest.mark.parametrize(
    ("model", "labels", "told"),
    [
        (
            nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3)).half(),
            [0] * 8,
            "the input is float32, the model float16",
        ),
        (nn.Linear(6, 3), [7] * 8, "labels go up to 7, but the model has 3 outputs"),
    ],
)
def test_samples_that_the_model_does_not_take_are_the_script_s_fault(
    model: nn.Module, labels: list[int], told: str
) -> None:
    with pytest.raises(ScriptError, match=told):
        _labelled(labels, model)


class EncoderDecoder(nn.Module):
    """Its decoder reads the labels, one place later, and by the mask what the encoder gives."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.encoder = nn.Embedding(9, 4), nn.Linear(4, 4)
        self.answers, self.decoder = nn.Embedding(9, 4), nn.Linear(4, 9)

    def forward(self, words: Tensor, mask: Tensor, labels: Tensor) -> dict[str, Tensor]:
        encoded = self.encoder(self.words(words)).tanh()
        answers = self.answers(labels.roll(1, 1))
        seen = (encoded * mask.unsqueeze(-1)).mean(dim=1, keepdim=True)
        logits = self.decoder(answers + seen)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return {"loss": loss, "logits": logits}


def test_with_private_the_layers_that_leave_none_between_are_named() -> None:
    ids = torch.arange(32).reshape(8, 4) % 9
    data = [{"words": row, "mask": torch.ones(4), "labels": row} for row in ids]
    job = Job(EncoderDecoder(), data, None, SGD(lr=0.1), batch_size=4, micro_batch=4)
    (why,) = prepare(job, TrainOptions(private=True)).warnings
    assert why.startswith("with --private this device trains alone: 'answers' still reads")
    assert "'answers' reads labels already (a decoder's input is made of the labels)" in why
    assert not prepare(job, TrainOptions()).warnings
