"""Stages on an accelerator: what a model writes, draws and asks for is where it computes."""

from __future__ import annotations

import pytest
import torch

from p2ptrain.devices.check import CheckReport
from p2ptrain.devices.check_cases import CASES
from p2ptrain.devices.interface import operator_name
from p2ptrain.devices.processor import HOST
from p2ptrain.job.rounds import Round, RoundMode
from p2ptrain.messages.round_orders import RoundOrder
from p2ptrain.model.stage.optimizer import StageOptimizer
from p2ptrain.model.stage.optimizer_spec import AdamW
from p2ptrain.model.stage.stage import Stage
from p2ptrain.recovery.version import Version
from p2ptrain.runtime.live_stage import LiveStage
from tests.support import model_idioms, odd_models, zoo
from tests.support.stage_pipeline import assert_same, captured, pipeline_step
from tests.support.twin_device import TwinDevice

WRONG = CheckReport({case.kind: "NaN" for case in CASES}).wrong_operators
"""All that one could have wrong."""

IN_HALF = CheckReport({f"{case.kind} in bfloat16": "NaN" for case in CASES}).wrong_operators


def assert_the_processors(
    made: tuple[object, str], twin: TwinDevice, dtype: torch.dtype | None = None, *, split: bool
) -> None:
    """What a step gives, to the bit."""
    module, name = made
    more = {} if dtype is None else {"dtype": dtype}
    example = module.make(name, **more)  # type: ignore[attr-defined]
    model = captured(example)
    units = len(model.description.units)
    boundaries = sorted({0, units // 2, units})
    torch.manual_seed(0)
    here = pipeline_step(example, model, boundaries, split=split, hashes=True)
    twin.prepare_thread()
    torch.manual_seed(0)
    assert_same(here, pipeline_step(example, model, boundaries, split=split, device=twin))
    twin.assert_empty()


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize(
    "made",
    [
        (odd_models, "decayed_weight"),  # writes a parameter that the backward reads
        (odd_models, "normalised_weights"),  # writes a buffer that the forward reads
        (odd_models, "complex_weights"),
        (odd_models, "bounded_embedding"),
        (model_idioms, "drawing"),  # random numbers of several operators
        (model_idioms, "adapting"),  # asks for a number on the way
        (zoo, "dropout"),
    ],
    ids=lambda made: made[1],
)
def test_a_step_is_the_processors(made: tuple[object, str], split: bool) -> None:
    assert_the_processors(made, TwinDevice(), split=split)


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize(
    "made",
    [
        (zoo, "cnn"),
        (zoo, "gpt"),
        (zoo, "unet"),
        (zoo, "dropout"),
        (zoo, "bert"),
        (odd_models, "in_place"),
        (odd_models, "attention"),
        (odd_models, "shared_layer"),
        (model_idioms, "penalised"),  # brings a backward of its own
        (model_idioms, "drawing"),
        (model_idioms, "autocast"),
    ],
    ids=lambda made: made[1],
)
def test_what_it_computes_wrong_the_host_computes(made: tuple[object, str], split: bool) -> None:
    twin = TwinDevice()
    twin.wrong = WRONG
    assert_the_processors(made, twin, split=split)
    computed = {operator_name(call) for call in twin.call_names if call.startswith("aten.")}
    assert not computed & WRONG.keys()


@pytest.mark.parametrize(("dtype", "there"), [(torch.float32, True), (torch.bfloat16, False)])
def test_what_is_wrong_in_half_precision_alone_is_left_to_it_there(
    dtype: torch.dtype, there: bool
) -> None:
    twin = TwinDevice()
    twin.wrong = IN_HALF
    assert_the_processors((zoo, "mlp"), twin, dtype, split=False)
    assert ("aten.addmm.default" in twin.call_names) is there


def test_what_is_updated_at_home_takes_no_more_of_the_accelerator() -> None:
    """Which computes with the new weights and statistics then."""
    model = captured(zoo.make("cnn"))
    twin, units = TwinDevice(), len(model.description.units)
    twin.prepare_thread()
    stage = Stage(model.description, 0, units, model.state(), shared=True, device=twin, home=HOST)
    live = LiveStage(stage, StageOptimizer(AdamW(lr=0.1), stage.parameters()), Version(0, 0), 1)
    before, first = twin.live(), {name: p.clone() for name, p in stage.state().items()}
    for step in range(2):
        live.save(1)
        for parameter in stage.parameters().values():
            parameter.grad = torch.ones_like(parameter)
        live.get_ready(RoundOrder(Round(step, RoundMode.TRAIN, step, 4, 4)))
        live.apply(None)
    assert twin.live() == before
    state, names = stage.state(), [*stage.inside(), *stage.statistics.scratch]
    same = {name for name in names if torch.equal(first[name], state[name])}
    assert all(name.endswith("running_mean") for name in same), "whose sums were zero"
    inside = stage.inside()
    for name, found in zip(inside, twin.fetched([*inside.values()]), strict=True):
        assert torch.equal(found, state[name])
    assert live.copied({}).keys() == live.present().keys()
