"""Masks of dropout that are the same on a processor and on an accelerator."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from p2ptrain.devices.processor import HOST
from p2ptrain.model.graph.nodes import GraphNode, InputRef
from p2ptrain.model.stage.instructions import call_of
from p2ptrain.model.stage.random_operators import drawing_call, mask
from p2ptrain.model.stage.round_replay import Replay, ReplayBatch
from p2ptrain.model.stage.stage import Stage
from tests.support import zoo
from tests.support.reference import stack
from tests.support.stage_pipeline import captured
from tests.support.twin_device import TwinDevice

SHAPE = (3, 41, 1000)  # several spans on a processor, the last one short


def seeded_mask(seed: int, p: float, shape: tuple[int, ...] = SHAPE) -> Tensor:
    torch.manual_seed(seed)
    return mask(shape, p, HOST.place)


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_so_many_stay(p: float) -> None:
    kept = seeded_mask(1, p)
    assert kept.shape == SHAPE
    spread = math.sqrt(p * (1 - p) / kept.numel())
    assert abs(float(kept.double().mean()) - (1 - p)) < 5 * spread


def test_all_are_dropped_with_one_and_none_with_zero() -> None:
    assert not seeded_mask(1, 1.0).any()
    assert seeded_mask(1, 0.0).all()
    assert seeded_mask(1, 0.5, ()).shape == ()
    assert seeded_mask(1, 0.5, (0, 3)).shape == (0, 3)


def test_masks_have_nothing_to_do_with_each_other() -> None:
    """Nor with themselves, shifted or from element to element."""
    torch.manual_seed(2)
    first, second = (mask((60_000,), 0.5, HOST.place).double() - 0.5 for _ in range(2))
    bound = 5 * 0.25 / math.sqrt(60_000)
    for shift in (0, 1, 2, 64, 1000):
        assert abs(float((first * second.roll(shift)).mean())) < bound
        if shift:
            assert abs(float((first * first.roll(shift)).mean())) < bound


def test_an_accelerator_makes_the_same_mask() -> None:
    device = TwinDevice()
    device.prepare_thread()
    torch.manual_seed(3)
    (made,) = device.fetched([mask(SHAPE, 0.3, device.place)])
    assert made is not None
    assert torch.equal(made, seeded_mask(3, 0.3))


def test_a_tensor_of_probabilities_may_take_what_is_drawn_with_them() -> None:
    node = GraphNode("drawn", "aten.bernoulli_.Tensor", (InputRef(0), InputRef(0)), (), False)
    chances = torch.rand(3, 40, generator=torch.Generator().manual_seed(0))
    found = []
    for device in (HOST, TwinDevice()):
        device.prepare_thread()
        drawn = device.copy_in(chances.clone())
        torch.manual_seed(4)
        result = (drawing_call(node, device, hashes=True) or call_of(node))(drawn, drawn)
        assert result is drawn
        found += device.fetched([drawn])
    assert found[0] is not None
    assert found[1] is not None
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], chances)


def test_a_stage_with_dropout_computes_the_same_on_both() -> None:
    made = zoo.make("dropout")
    model = captured(made)
    x, y = stack(made.data[:8])
    found = []
    for device in (HOST, TwinDevice()):
        device.prepare_thread()
        units = len(model.description.units)
        stage = Stage(model.description, 0, units, model.state(), device=device, hashes=True)
        losses = [
            stage.forward(k, [device.copy_in(x)], [device.copy_in(y)], weight=1.0, seed=(0, k, 0))
            for k in range(2)
        ]
        stage.backward(0)
        gradients = [parameter.grad for parameter in stage.parameters().values()]
        found.append(device.fetched([*losses[0], *losses[1], *gradients]))
    assert float(found[0][0]) != float(found[0][1]), "masks differ from step to step"
    for on_host, on_twin in zip(*found, strict=True):
        assert torch.equal(on_host, on_twin)


def test_a_round_is_done_again_with_the_masks_that_it_had() -> None:
    """Else what devices have sent would not be what the holder computes, and one be blamed."""
    made = zoo.make("dropout")
    model = captured(made)
    x, y = stack(made.data[:4])
    units = len(model.description.units)
    crossed: list[list[Tensor]] = []

    def note(_unit: int, backward: bool, _number: int, values: object) -> None:
        if not backward:
            crossed.append([value.detach().clone() for value in values])

    replay = Replay(model.description, model.state(), 5, 0, note, hashes=True)
    assert replay.find(0, ReplayBatch([x], [y], 1.0)) is None
    values = [x]
    for unit in range(units):
        assert len(crossed[unit]) == len(values)
        assert all(map(torch.equal, crossed[unit], values))
        stage = Stage(model.description, unit, unit + 1, model.state(), hashes=True)
        uses = model.description.target_uses(unit, unit + 1, "train")
        values = stage.forward(0, values, [y] if uses else [], seed=(5, 0, 0))
