"""Convolutions begun before their halos are there: the same values, gradients, and when."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from p2ptrain.model.description import ModelDescription
from p2ptrain.model.graph import Argument, NodeRef, StateRef
from p2ptrain.model.tiles.interior import InteriorFirst
from p2ptrain.model.tiles.messages import Halo, Message
from p2ptrain.model.tiles.pieces import cut
from p2ptrain.model.tiles.program import Replica, TileProgram
from p2ptrain.model.tiles.reading import read_tiled_part
from p2ptrain.model.tiles.tile_pass import TilePass
from p2ptrain.tiles.interior import NEVER, Splitting
from p2ptrain.tiles.layout import Layout
from p2ptrain.tiles.lines import GridError
from p2ptrain.tiles.span import Region
from tests.thorough import examples_of
from tests.tiles_in_process import Tiles
from tests.unit.model.tiles.descriptions import IMAGE, convolution, describe
from tests.unit.model.tiles.test_drawn_models import run_nodes

CHANNELS, SIZES = 4, (19, 16)
WHEREVER = Splitting(least_part=0.0, least_operations=0.0)
FILTERS, BIAS, LAST = StateRef("filters"), StateRef("bias"), StateRef("last")
Step = tuple[str, tuple[Argument, ...]]


@dataclass(frozen=True)
class Case:
    """A model whose second unit begins with a convolution, and how it is cut."""

    description: ModelDescription
    layout: Layout


def model(first: Step, shape: tuple[int, ...], *, residual: bool, bias: bool) -> ModelDescription:
    """tanh of a convolution; `first` of that, relu in place, a convolution, and perhaps a sum."""
    steps: list[Step] = [
        convolution(IMAGE),
        ("aten.tanh.default", (NodeRef(0),)),
        first,
        ("aten.relu_.default", (NodeRef(2),)),
        ("aten.conv2d.default", (NodeRef(3), LAST, None, (1, 1), (1, 1))),
    ]
    if residual:
        steps.append(("aten.add_.Tensor", (NodeRef(4), NodeRef(1))))
    steps.append(("aten.mean.default", (NodeRef(len(steps) - 1),)))
    tensors = {FILTERS.name: shape, LAST.name: (CHANNELS, CHANNELS, 3, 3)}
    return describe(
        steps,
        cuts=[2, *([] if residual else [4]), len(steps) - 1],
        tensors={**tensors, **({BIAS.name: (CHANNELS,)} if bias else {})},
        shape=(CHANNELS, *SIZES),
        dtype=torch.float64,
        state_dtype=torch.float64,
    )


@st.composite
def cases(draw: st.DrawFn) -> Case:
    residual, bias = draw(st.booleans()), draw(st.booleans())
    kernel = draw(st.tuples(st.integers(1, 5), st.integers(1, 4)))
    stride, dilation, padding = (1, 1), draw(st.sampled_from(((1, 1), (2, 1), (1, 3)))), (0, 0)
    groups = draw(st.sampled_from((1, 2, CHANNELS)))
    argument: Argument = "same"
    if residual or draw(st.booleans()):
        operator = "aten.conv2d.padding"
    else:
        operator = "aten.conv2d.default"
        stride = draw(st.sampled_from(((1, 1), (2, 1), (2, 3))))
        padding = draw(st.tuples(*(st.integers(0, k - 1) for k in kernel)))
        argument = padding
        sides = [
            (side + 2 * p - d * (k - 1) - 1) // s + 1
            for side, p, d, k, s in zip(SIZES, padding, dilation, kernel, stride, strict=True)
        ]
        assume(min(sides) >= 3)
    weight = CHANNELS, CHANNELS // groups, *kernel
    given_bias = BIAS if bias else None
    first = (operator, (NodeRef(1), FILTERS, given_bias, stride, argument, dilation, groups))
    description = model(first, weight, residual=residual, bias=bias)
    network = read_tiled_part(description).network
    units = len(network.units)
    inner = draw(st.sets(st.integers(2, units - 1))) if units > 2 else set()
    borders = [0, 1, *sorted(inner), units]
    weights = [draw(st.lists(st.floats(0.5, 2.0), min_size=1, max_size=4)) for _ in range(2)]
    try:
        lines = weights[0], weights[1]
        return Case(description, Layout(network, lines, borders, aligned=draw(st.booleans())))
    except GridError:
        assume(False)
        raise


def test_drawn_convolutions_give_what_the_whole_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[int] = []
    begin = InteriorFirst.begin

    def spy(self: InteriorFirst, owned: Tensor) -> Tensor:
        begun.append(self.operation)
        return begin(self, owned)

    monkeypatch.setattr(InteriorFirst, "begin", spy)

    @settings(max_examples=examples_of(30), deadline=None, database=None)
    @given(cases(), st.integers(0, 999))
    def check(case: Case, seed: int) -> None:
        torch.manual_seed(seed)
        compare(case)

    check()
    assert len(begun) > 30


def compare(case: Case) -> None:
    """Values and gradients of tiles against the nodes', to 1e-10."""
    description, layout, part = case.description, case.layout, read_tiled_part(case.description)
    x = torch.randn(2, CHANNELS, *SIZES, dtype=torch.float64)
    state = {t.name: torch.randn(t.shape, dtype=torch.float64) / 3 for t in description.tensors}
    plain = {name: tensor.clone().requires_grad_() for name, tensor in state.items()}
    expected = run_nodes(description.train.nodes[: part.stop], x, plain)[-1]
    gradient = torch.randn_like(expected)
    expected.backward(gradient)  # type: ignore[no-untyped-call]
    states = [{name: t.clone() for name, t in state.items()} for _ in range(layout.tiles)]
    tiles = Tiles(description, part, layout, states, splitting=WHEREVER)
    (made,) = tiles.forward(0, [x])
    torch.testing.assert_close(made, expected.detach(), rtol=1e-10, atol=1e-10)
    tiles.backward(0, [gradient])
    tiles.sum_gradients()
    for name, parameter in tiles.replicas[0].parameters.items():
        torch.testing.assert_close(parameter.grad, plain[name].grad, rtol=1e-10, atol=1e-9)


# -- by hand -------------------------------------------------------------------------------------


def passes(
    *, splitting: Splitting = WHEREVER, columns: int = 2, pauses: bool = True
) -> tuple[list[TilePass], Layout, dict[str, Tensor]]:
    """A residual block behind the first unit, whose tiles have run as far as they could."""
    torch.manual_seed(5)
    first = ("aten.conv2d.default", (NodeRef(1), FILTERS, None, (1, 1), (1, 1)))
    shape = CHANNELS, CHANNELS, 3, 3
    description = model(first, shape, residual=True, bias=False)
    part = read_tiled_part(description)
    layout = Layout(part.network, ((1.0,), (1.0,) * columns), [0, 1, 2])
    state = {t.name: torch.randn(t.shape, dtype=torch.float64) / 3 for t in description.tensors}
    found = []
    for tile in range(layout.tiles):
        replica = Replica(description, part, {n: t.clone() for n, t in state.items()})
        program = TileProgram(description, part, layout, tile, replica, splitting=splitting)
        found.append(TilePass(program, 1, pauses=pauses))
    return found, layout, state


def begin(machines: Sequence[TilePass], layout: Layout) -> list[list[Message]]:
    x = torch.randn(1, CHANNELS, *SIZES, dtype=torch.float64)
    (entering,) = layout.network.entering

    def images(tile: int) -> dict[int, Tensor]:
        region = layout.input_region(tile, entering)
        whole = Region(type(region.rows)(0, SIZES[0]), type(region.rows)(0, SIZES[1]))
        return {entering: cut(x, region.within(whole))}

    return [machine.begin_forward(images(t)) for t, machine in enumerate(machines)]


def watched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is done, in order."""
    done: list[str] = []

    def noting(name: str) -> Callable[..., Tensor | None]:
        original = getattr(InteriorFirst, name)

        def run(self: InteriorFirst, *arguments: Tensor) -> Tensor | None:
            done.append(name)
            result: Tensor | None = original(self, *arguments)
            return result

        return run

    for name in ("begin", "finish"):
        monkeypatch.setattr(InteriorFirst, name, noting(name))
    return done


def test_halos_leave_then_the_interior_is_computed_then_they_are_awaited(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    done = watched(monkeypatch)
    machines, layout, _ = passes()
    sent = begin(machines, layout)
    assert [[type(m.subject) for m in messages] for messages in sent] == [[Halo], [Halo]]
    assert [machine.is_paused for machine in machines] == [True, True]
    assert not done
    assert not machines[0].awaits  # it need not wait to go on
    assert machines[0].resume() == []
    assert done == ["begin"]
    assert {type(subject) for subject, _ in machines[0].awaits} == {Halo}
    assert machines[0].receive(sent[1][0]) == []
    assert done == ["begin", "finish"]
    assert not machines[0].is_waiting
    machines[1].receive(sent[0][0])
    assert machines[1].is_waiting  # the halo came while it was paused
    machines[1].resume()
    assert done == ["begin", "finish"] * 2
    assert not machines[1].is_waiting


def test_when_a_halo_comes_changes_no_bit() -> None:
    found = []
    for early in (False, True):
        machines, layout, _ = passes()
        sent = begin(machines, layout)
        if not early:
            for machine in machines:
                machine.resume()
        for messages in sent:
            for message in messages:
                machines[message.receiver].receive(message)
        if early:
            for machine in machines:
                machine.resume()
        found.append([machine.outputs[layout.network.leaving[0]] for machine in machines])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_nothing_is_begun_where_it_is_switched_off_or_tiles_are_narrow(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    done = watched(monkeypatch)
    machines, layout, _ = passes(splitting=NEVER)
    begin(machines, layout)
    assert [machine.is_paused for machine in machines] == [False, False]
    machines, layout, _ = passes(columns=8)  # two columns each, and the block reads two more
    sent = begin(machines, layout)
    assert [machine.is_paused for machine in machines] == [True, *[False] * 6, True]
    assert not done
    waiting = [message for messages in sent for message in messages]
    while waiting or any(machine.is_paused for machine in machines):
        for message in waiting:
            machines[message.receiver].receive(message)
        waiting = [m for machine in machines if machine.is_paused for m in machine.resume()]
    assert done == ["begin", "finish"] * 2
    assert not any(machine.is_waiting for machine in machines)


def test_autograd_keeps_and_puts_off_what_it_does_otherwise() -> None:
    """The same tensors are kept for the backward, and the same nodes record it."""
    kept: list[list[tuple[int, ...]]] = []
    for splitting in (WHEREVER, NEVER):
        machines, layout, _ = passes(splitting=splitting)
        shapes: list[tuple[int, ...]] = []

        def pack(tensor: Tensor, shapes: list[tuple[int, ...]] = shapes) -> Tensor:
            shapes.append(tuple(tensor.shape))
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            sent = begin(machines, layout)
            for machine in machines:
                if machine.is_paused:
                    machine.resume()
            for messages in sent:
                for message in messages:
                    machines[message.receiver].receive(message)
        kept.append(sorted(shapes))
    assert kept[0] == kept[1]
