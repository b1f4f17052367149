"""The average of the weights that stages keep, beside torch's own."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from p2ptrain.errors import InternalError
from p2ptrain.model.stage.optimizer import StageOptimizer, optimizer_state_ratio, state_layout
from p2ptrain.model.stage.optimizer_form import OptimizerSpec
from p2ptrain.model.stage.optimizer_spec import SGD, AdamW

DECAY = 0.9


def averaged(spec: OptimizerSpec, ema: float | None = DECAY) -> OptimizerSpec:
    return replace(OptimizerSpec(spec.name, spec.columns), ema=ema)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.first, self.unused = nn.Linear(4, 6), nn.Parameter(torch.ones(3))
        self.second = nn.Linear(6, 2).double()
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).relu().double()).sum() + self.frozen.sum()  # type: ignore[no-any-return]


def updates(model: nn.Module) -> list[torch.Tensor]:
    torch.manual_seed(3)
    return [torch.randn(5, 4) for _ in range(6)]


@pytest.mark.parametrize("spec", [SGD(lr=0.1, momentum=0.9), AdamW(lr=0.05)])
def test_the_average_is_torchs_to_the_bit(spec: OptimizerSpec) -> None:
    model, plain = Model(), Model()
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    halves = [dict(list(model.named_parameters())[:3]), dict(list(model.named_parameters())[3:])]
    group_of = dict.fromkeys(names, 0)
    stages = [StageOptimizer(averaged(spec), half, group_of) for half in halves]
    torch_optimizer = spec.build(p for p in plain.parameters() if p.requires_grad)
    ema = AveragedModel(plain, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    for number, x in enumerate(updates(model)):
        model(x).backward()
        plain(x).backward()
        torch_optimizer.step()
        torch_optimizer.zero_grad()
        ema.update_parameters(plain)
        for stage in stages:
            several = list(stage.parameters)
            stage.step(names=several[:1])  # as a group does, whose sums come one by one
            stage.step(names=several[1:])
            stage.zero_grad()
        if number == 2:  # it moves to other devices
            states = [copy.deepcopy(stage.state()) for stage in stages]
            stages = [StageOptimizer(averaged(spec), half, group_of) for half in halves]
            for stage, state in zip(stages, states, strict=True):
                stage.load_state(state)
    found = {name: tensor for stage in stages for name, tensor in stage.averages().items()}
    wanted = dict(ema.module.named_parameters())
    assert found.keys() == set(names)
    assert all(torch.equal(found[name], wanted[name]) for name in names)


def test_what_is_kept_is_counted_and_nothing_else_is_taken() -> None:
    weight = nn.Parameter(torch.ones(8, 8))
    spec, plain = averaged(AdamW()), averaged(AdamW(), None)
    assert optimizer_state_ratio(plain, {"w": weight}) == 2.0
    assert optimizer_state_ratio(spec, {"w": weight}) == 3.0
    assert state_layout(spec, {"w": weight})["w.ema"] == (torch.float32, (8, 8))
    optimizer = StageOptimizer(plain, {"w": weight})
    with pytest.raises(InternalError, match=r"w\.ema"):
        optimizer.load_state({"w.ema": torch.ones(8, 8)})
    assert not optimizer.averages()
