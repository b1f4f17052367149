"""Tiles against plain torch."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from p2ptrain.errors import InternalError, ProtocolError
from p2ptrain.plan.types.cluster import ClusterLink
from p2ptrain.tiling.grid import GridLayout
from p2ptrain.tiling.kernels.tile_pass import TilePass
from p2ptrain.tiling.kernels.tile_program import TileProgram
from p2ptrain.tiling.kernels.tile_steps import Halo, Moments, TileMessage
from p2ptrain.tiling.planning.tiling_cost import Costs
from p2ptrain.tiling.planning.tiling_problem import TileDevice
from tests.support.thorough import examples_of
from tests.support.tiled_models import EXAMPLES
from tests.support.tiled_training import Prepared, Run, compare, prepare, train_plainly, train_tiled
from tests.support.tiling_examples import by_flops
from tests.support.tiling_in_process import Tiles, replica, trained

NETWORKS = (
    ["unet", "vgg16"] if examples_of(1) == 1 else [name for name in EXAMPLES if name != "six"]
)
EQUAL = {1: (1.0,), 2: (1.0, 1.0), 3: (1.0, 1.0, 1.0)}


@pytest.fixture(scope="module")
def six() -> Prepared:
    torch.set_num_threads(1)
    return prepare("six", torch.float64, 2)


@pytest.fixture(scope="module")
def plain(six: Prepared) -> Run:
    return train_plainly(six)


def layout(
    prepared: Prepared,
    rows: int,
    columns: int,
    borders: tuple[int, ...],
    early: tuple[int, ...] = (),
) -> GridLayout:
    network = prepared.part.network.with_early(early)
    return GridLayout(network, (EQUAL[rows], EQUAL[columns]), borders)


@pytest.mark.parametrize(
    ("rows", "columns", "borders", "early"),
    [
        (1, 2, (0, 1, 2, 3, 4, 5, 6), ()),
        (1, 2, (0, 1, 2, 3, 4, 5, 6), (1, 2, 3, 4, 5)),
        (2, 2, (0, 6), ()),
        (3, 3, (0, 2, 3, 6), ()),
        (2, 2, (0, 2, 3, 6), (2, 3)),
    ],
)
def test_tiles_train_as_plain_torch_does(
    six: Prepared,
    plain: Run,
    rows: int,
    columns: int,
    borders: tuple[int, ...],
    early: tuple[int, ...],
) -> None:
    grid = layout(six, rows, columns, borders, early)
    run, same = train_tiled(six, grid, range(rows * columns))
    apart = compare(plain, run, same)
    assert apart.losses < 1e-12
    assert apart.gradients < 1e-10
    assert apart.buffers < 1e-12
    assert apart.replicas


def test_unequal_tiles_several_on_a_device(six: Prepared, plain: Run) -> None:
    chance = random.Random(5)
    borders = (0, *sorted(chance.sample(range(1, 6), 3)), 6)
    uneven = GridLayout(six.part.network, ([1.0, 1.8], [2.0, 1.0]), borders, aligned=False)
    run, same = train_tiled(six, uneven, [0, 1, 1, 0])
    apart = compare(plain, run, same)
    assert apart.losses < 1e-12
    assert apart.gradients < 1e-10
    assert apart.buffers < 1e-12
    assert apart.replicas


@pytest.mark.parametrize("name", NETWORKS)
def test_networks_that_people_know_train_as_in_plain_torch(name: str) -> None:
    """Sizes that the grid does not divide; pairs of units in a group, a single last one."""
    torch.set_num_threads(1)
    known = prepare(name, torch.float64, 1)
    units = len(known.part.network.units)
    run, same = train_tiled(known, layout(known, 1, 2, (*range(0, units, 2), units)), range(2))
    apart = compare(train_plainly(known), run, same)
    assert max(apart.losses, apart.buffers) < 1e-8
    assert apart.gradients < 1e-6
    assert apart.replicas


def test_single_precision() -> None:
    single = prepare("six", torch.float32, 2)
    run, same = train_tiled(single, layout(single, 2, 2, (0, 3, 6)), range(4))
    apart = compare(train_plainly(single), run, same)
    assert apart.losses < 1e-5
    assert apart.gradients < 1e-4
    assert same


# -- messages ------------------------------------------------------------------------------------


def passes(prepared: Prepared, grid: GridLayout) -> tuple[list[TilePass], list[TileProgram]]:
    programs = [
        TileProgram(
            *(prepared.description, prepared.part, grid, tile),
            replica(prepared.description, prepared.part, copied(prepared)),
        )
        for tile in range(grid.tiles)
    ]
    return [TilePass(program, 2) for program in programs], programs


def copied(prepared: Prepared) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in prepared.captured.state().items()}


def inputs(prepared: Prepared, grid: GridLayout, tile: int) -> dict[int, Tensor]:
    region = grid.input_region(tile, 0)
    x = prepared.batches[0][0]
    return {
        0: x[:, :, region.rows.first : region.rows.end, region.columns.first : region.columns.end]
    }


def delivered(
    machines: list[TilePass], sent: list[TileMessage], chance: random.Random
) -> Iterator[TileMessage]:
    """Deliver in random order until nothing is left."""
    while sent or any(machine.is_paused for machine in machines):
        for machine in machines if not sent else ():
            if machine.is_paused:
                sent += machine.resume()
        if sent:
            message = sent.pop(chance.randrange(len(sent)))
            sent += machines[message.receiver].receive(message)
            yield message


def test_the_order_of_messages_changes_no_bit(six: Prepared) -> None:
    grid = layout(six, 2, 3, (0, 1, 3, 6))
    found: list[list[Tensor]] = []
    for seed in range(2):
        chance = random.Random(seed)
        machines, programs = passes(six, grid)
        sent: list[TileMessage] = []
        for tile, machine in enumerate(machines):
            sent += machine.begin_forward(inputs(six, grid, tile))
        forward = [*delivered(machines, sent, chance)]
        assert {type(m.subject).__name__ for m in forward} == {"Halo", "Moments"}
        assert not any(machine.is_waiting for machine in machines)
        for machine in machines:
            sent += machine.begin_backward(
                {number: torch.ones_like(value) for number, value in machine.outputs.items()}
            )
        back = [*delivered(machines, sent, chance)]
        assert {type(m.subject).__name__ for m in back} == {"HaloGradient", "GradientSums"}
        assert not any(machine.is_waiting for machine in machines)
        found.append([p.grad for program in programs for p in trained(program.tensors).values()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("early", [(), (1, 2, 3, 4, 5)])
def test_each_tile_stops_when_others_have_all_that_they_wait_for(
    six: Prepared, early: tuple[int, ...]
) -> None:
    """And puts gradients of filters off until it is to go on."""
    grid = layout(six, 2, 2, (0, 1, 2, 3, 4, 5, 6), early)
    machines, programs = passes(six, grid)
    sent: list[TileMessage] = []
    for tile, machine in enumerate(machines):
        sent += machine.begin_forward(inputs(six, grid, tile))
    assert not deliver(machines, sent)
    for machine in machines:
        sent += machine.begin_backward(
            {number: torch.ones_like(value) for number, value in machine.outputs.items()}
        )
    stops = deliver(machines, sent)
    assert not any(machine.is_waiting for machine in machines)
    gradients = [p.grad for program in programs for p in trained(program.tensors).values()]
    assert not any(gradient is None or gradient.requires_grad for gradient in gradients)
    convolutions = sum(operation.flops > 0 for operation in six.part.network.operations)
    assert 0 < stops <= 4 * convolutions


def deliver(machines: list[TilePass], sent: list[TileMessage]) -> int:
    """In order until nothing is left; how often a tile was asked to go on."""
    stops = 0
    while sent or any(machine.is_paused for machine in machines):
        while sent:
            message = sent.pop(0)
            assert not message.tensor.requires_grad
            sent += machines[message.receiver].receive(message)
        for machine in machines:
            if machine.is_paused:
                stops += 1
                sent += machine.resume()
    return stops


def test_what_nobody_expects_is_refused(six: Prepared) -> None:
    grid = layout(six, 1, 2, (0, 1, 6))
    machines, _ = passes(six, grid)
    machines[0].begin_forward(inputs(six, grid, 0))
    (halo,) = [t for t in grid.transfers[1] if t.receiver == 0]
    number = next(k for k, o in enumerate(six.part.network.operations) if o.statistics)
    subject, channels = Moments(number), six.part.network.maps[1].channels
    moments = torch.zeros(2, channels, dtype=torch.float64)
    good = TileMessage(1, 0, subject, moments)
    bad = [
        TileMessage(0, 0, subject, moments),
        TileMessage(1, 0, Moments(99), moments),
        TileMessage(1, 0, subject, moments[:1]),
        TileMessage(1, 0, subject, moments.float()),
        TileMessage(1, 0, Halo(1, halo.map), torch.zeros(3, 4, 5, 6)),
        TileMessage(1, 0, Halo(0, halo.map), torch.zeros(3, 4, 5, 6)),
    ]
    for message in bad:
        with pytest.raises(ProtocolError, match="to tile 0, which expects"):
            machines[0].receive(message)
    machines[0].receive(good)
    with pytest.raises(ProtocolError, match="which expects it once"):
        machines[0].receive(good)


def test_images_of_another_size_are_refused(six: Prepared) -> None:
    grid = layout(six, 1, 2, (0, 6))
    tiles = Tiles(six.description, six.part, grid, [copied(six), copied(six)])
    with pytest.raises(ProtocolError, match="images must keep their size within a job"):
        tiles.forward(0, [torch.zeros(2, 3, 30, 30, dtype=torch.float64)])


def test_devices_are_numbered_without_gaps(six: Prepared) -> None:
    grid = layout(six, 1, 2, (0, 6))
    with pytest.raises(InternalError, match="2 tiles on devices"):
        Tiles(six.description, six.part, grid, [copied(six)], device_of_tile=[0, 1])


@pytest.mark.parametrize("borders", [(0, 6), (0, 2, 4, 6), (0, 1, 2, 3, 4, 5, 6)])
def test_the_bytes_that_travel_are_those_that_planners_count(
    six: Prepared, borders: tuple[int, ...]
) -> None:
    x = six.batches[0][0]
    grid = layout(six, 2, 2, borders)
    devices = [0, 1, 1, 2]
    states = [copied(six) for _ in range(3)]
    tiles = Tiles(six.description, six.part, grid, states, device_of_tile=devices)
    made = tiles.forward(0, [x])
    tiles.backward(0, [torch.ones_like(value) for value in made])
    question = by_flops(six.part.network, len(x), ClusterLink(1e6, 0.0), flops_per_s=1e9)
    named = [TileDevice(f"d{k}") for k in range(3)]
    costs = Costs(question, named, grid.grid, devices)
    groups = [costs.group(first, end) for first, end in pairwise(borders)]
    halos = sum(sum(group.halo.sent) for group in groups if group is not None)
    sums = sum(sum(s.sent) for group in groups if group is not None for s in group.statistics)
    assert tiles.traffic["Halo"] == tiles.traffic["HaloGradient"] == halos
    # A device with two tiles gets each sum once: 8 times in all, where tiles get 10.
    assert tiles.traffic["Moments"] == tiles.traffic["GradientSums"] == 10 * sums / 8 > 0
    assert (halos > 0) == (len(groups) > 1)
