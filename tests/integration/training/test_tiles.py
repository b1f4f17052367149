"""A first stage in tiles on several devices computes what plain torch does."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

from p2ptrain.coordinator import plan_cluster
from p2ptrain.errors import Error
from p2ptrain.events import Eval, Event, Step
from p2ptrain.holder.rounds import trained_weights
from p2ptrain.job.job import Job
from p2ptrain.job.train_options import TrainOptions
from p2ptrain.model.stage.optimizer_spec import SGD
from p2ptrain.plan.types.allocation import Allocation, BatchSplit, TileShape
from p2ptrain.plan.types.cluster import Cluster
from p2ptrain.plan.types.plan import DeviceShare, Plan, PlannedStage, Predicted
from p2ptrain.plan.types.profile import Profile
from p2ptrain.plan.types.request import PlanMode, PlanRequest
from p2ptrain.plan.types.schedule import usual_warmup
from p2ptrain.tiling.planning.make_plan import make_plan
from tests.integration.training.household import Devices, devices
from tests.support import reference
from tests.support.curves import by_plain_torch, difference
from tests.support.reference import Outcome

TOLERANCE = 1e-8


def forced(
    monkeypatch: pytest.MonkeyPatch,
    shape: TileShape,
    shares: Sequence[int],
    *,
    behind: str,
) -> None:
    """Let every coordinator tile the first units on as many devices as `shares` has, a, b, ...

    The rest is a stage on each device of `behind`.
    """
    monkeypatch.setattr(plan_cluster, "make_plan", partial(_plan, shape, shares, behind))


def _plan(
    shape: TileShape,
    shares: Sequence[int],
    behind: str,
    profile: Profile,
    cluster: Cluster,
    request: PlanRequest,
) -> Plan:
    assert request.micro_batch is not None
    split = BatchSplit(request.batch_size, request.micro_batch)
    devices = tuple(DeviceShare(name, share) for name, share in zip("abcdef", shares, strict=False))
    depths = usual_warmup(1 + len(behind), split.micro_batches)
    rest = len(profile.units) - shape.units
    borders = [shape.units + rest * k // len(behind) for k in range(1 + len(behind))]
    alone = [
        PlannedStage(units, (DeviceShare(name, split.micro_batch),), depth)
        for units, name, depth in zip(pairwise(borders), behind, depths[1:], strict=True)
    ]
    tiles = PlannedStage((0, shape.units), devices, depths[0], Allocation.TILES, tiling=shape)
    stages = (tiles, *alone)
    peaks = {device.name: 0 for device in cluster.devices}
    return Plan("auto", split, stages, Predicted(1.0, 1.0, peaks))


class Net(nn.Module):
    """Two normalised blocks with a strided one between them, and a head that cannot be tiled."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU())
        self.two = nn.Sequential(nn.Conv2d(6, 8, 3, stride=2, padding=1), nn.ReLU(inplace=True))
        self.three = nn.Sequential(nn.Conv2d(8, 9, 3, padding=1), nn.BatchNorm2d(9), nn.Tanh())
        self.four = nn.Sequential(nn.MaxPool2d(2), nn.Conv2d(9, 8, 3, padding=1))
        self.head = nn.Linear(8 * 4 * 5, 5)

    def forward(self, x: Tensor) -> Tensor:
        """Image to classes."""
        x = self.four(self.three(self.two(self.one(x))))
        out: Tensor = self.head(x.flatten(1))
        return out


def job(*, micro_batch: int = 4, steps: int = 20, clip: float | None = None) -> Job:
    """17 x 21 pixels: no grid divides them."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = Net().double()
        data = [
            (torch.randn(3, 17, 21, dtype=torch.float64), torch.randint(5, ())) for _ in range(24)
        ]
    return Job(
        model=model,
        data=data,
        loss=nn.functional.cross_entropy,
        optimizer=SGD(lr=0.05, momentum=0.9),
        batch_size=8,
        micro_batch=micro_batch,
        epochs=1000,
        seed=3,
        clip_grad_norm=clip,
    )


async def trained(
    household: Devices, what: Job, steps: int, options: TrainOptions | None = None
) -> Outcome:
    """Train on it; tile devices are compared after the last update."""

    def listen(event: Event) -> None:
        household.events.append(event)
        if isinstance(event, Step) and event.step == steps:
            check_replicas(household)

    options = options or TrainOptions(wait_for=len(household.names), steps=steps)
    await household.holder_run(what, options, listen).run()
    assert isinstance(what.model, nn.Module)
    state = what.model.state_dict()
    copies = {name: tensor.detach().clone() for name, tensor in state.items()}
    return Outcome(list(household.losses), copies)


def check_replicas(household: Devices) -> None:
    """Every device of a stage holds the same bits."""
    states: dict[int, Mapping[str, Tensor]] = {}
    for member in household.members.values():
        hosted = member.service.slot.hosted
        if hosted is None or hosted.assignment.key.generation != household.plan.epoch:
            continue  # it is dead, or has no part any more
        for index, executor in hosted.executors.items():
            state = executor.live.copied({})
            first = states.setdefault(index, state)
            for name, tensor in state.items():
                assert torch.equal(first[name], tensor), (index, name)


GRIDS = {
    "1x2": (TileShape((1.0,), (0.4, 0.6), (0, 1, 2, 3)), (1, 1)),
    "1x2 in pairs": (TileShape((1.0,), (0.4, 0.6), (0, 2, 3)), (1, 1)),
    "2x2": (TileShape((0.6, 0.4), (0.45, 0.55), (0, 1, 2, 3)), (1, 1, 1, 1)),
    "2x2, proportional": (
        TileShape((0.6, 0.4), (0.45, 0.55), (0, 1, 3), aligned=False),
        (1, 1, 1, 1),
    ),
    "2x2 on two devices": (TileShape((0.5, 0.5), (0.45, 0.55), (0, 2, 3)), (3, 1)),
    "halos with statistics": (
        TileShape((0.6, 0.4), (0.45, 0.55), (0, 1, 2, 3), early=(1, 2)),
        (1, 1, 1, 1),
    ),
    "halos with statistics, on two devices": (
        TileShape((0.5, 0.5), (0.45, 0.55), (0, 1, 3), early=(1,)),
        (3, 1),
    ),
}


@pytest.mark.parametrize("grid", sorted(GRIDS.keys() - {"1x2", "halos with statistics"}))
async def test_tiles_train_as_plain_torch(monkeypatch: pytest.MonkeyPatch, grid: str) -> None:
    shape, shares = GRIDS[grid]
    forced(monkeypatch, shape, shares, behind="abcdef"[len(shares)])
    async with devices(len(shares) + 1) as household:
        ours = await trained(household, job(), 6)
    found = difference(ours, by_plain_torch(job(), 6))
    assert found.loss < TOLERANCE
    assert found.state < TOLERANCE


async def test_a_mini_batch_may_be_one_micro_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then every gradient is that of a single backward."""
    shape, shares = GRIDS["2x2"]
    forced(monkeypatch, shape, shares, behind="a")
    async with devices(4) as household:
        ours = await trained(household, job(micro_batch=8), 6)
    found = difference(ours, by_plain_torch(job(micro_batch=8), 6))
    assert found.loss < TOLERANCE
    assert found.state < TOLERANCE


@pytest.mark.parametrize("behind", ["a", "b", "c"])
async def test_the_rest_may_follow_on_a_device_that_has_tiles(
    monkeypatch: pytest.MonkeyPatch, behind: str
) -> None:
    """Also with clipping, and a last micro-batch of two samples."""
    shape, shares = GRIDS["1x2 in pairs"]
    forced(monkeypatch, shape, shares, behind=behind)
    async with devices(3) as household:
        ours = await trained(household, job(micro_batch=3, clip=0.5), 6)
    found = difference(ours, by_plain_torch(job(micro_batch=3, clip=0.5), 6))
    assert found.loss < TOLERANCE
    assert found.state < TOLERANCE


@pytest.mark.parametrize("behind", ["cd", "cb"])
async def test_a_pipeline_may_follow(monkeypatch: pytest.MonkeyPatch, behind: str) -> None:
    """Of two stages, on devices without tiles or with; the last micro-batch has two samples."""
    shape, shares = GRIDS["1x2 in pairs"]
    forced(monkeypatch, shape, shares, behind=behind)
    async with devices(4) as household:
        ours = await trained(household, job(micro_batch=3), 6)
        assert [stage.warmup for stage in household.plan.stages] == [3, 3, 1]
    found = difference(ours, by_plain_torch(job(micro_batch=3), 6))
    assert found.loss < TOLERANCE
    assert found.state < TOLERANCE


@pytest.mark.parametrize(
    ("how", "shares"), [(Allocation.SAMPLES, (3, 1)), (Allocation.MICRO_BATCHES, (1, 1))]
)
async def test_a_group_may_follow(
    monkeypatch: pytest.MonkeyPatch, how: Allocation, shares: tuple[int, int]
) -> None:
    """Each of its devices gets from every tile what it lacks of its samples, or micro-batches."""

    def plan(profile: Profile, cluster: Cluster, request: PlanRequest) -> Plan:
        found = _plan(*GRIDS["1x2 in pairs"], "c", profile, cluster, request)
        group = tuple(map(DeviceShare, "cd", shares))
        behind = replace(found.stages[1], devices=group, allocation=how)
        return replace(found, stages=(found.stages[0], behind))

    monkeypatch.setattr(plan_cluster, "make_plan", plan)
    async with devices(4) as household:
        ours = await trained(household, job(), 6)
    found = difference(ours, by_plain_torch(job(), 6))
    assert found.loss < TOLERANCE
    assert found.state < TOLERANCE


async def test_evaluations_are_tiled_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """By running statistics, which all tiles have; with a smaller last micro-batch."""
    shape, shares = GRIDS["2x2 on two devices"]
    forced(monkeypatch, shape, shares, behind="c")
    what = job()
    evaluated = what.data[:11]  # type: ignore[index]
    async with devices(3) as household:
        await trained(household, replace(what, eval_data=evaluated), 4)
    *_, told = [event for event in household.events if isinstance(event, Eval)]
    inputs, targets = reference.stack(evaluated)
    assert isinstance(what.model, nn.Module)
    with torch.no_grad():
        what.model.eval()
        expected = what.loss(reference.call(what.model, inputs), targets).item()
    assert told.metrics["loss"] == pytest.approx(expected, abs=1e-9)


async def test_images_keep_their_size_within_a_job(monkeypatch: pytest.MonkeyPatch) -> None:
    shape, shares = GRIDS["1x2"]
    forced(monkeypatch, shape, shares, behind="c")
    what = job()
    large = [(torch.zeros(3, 18, 22, dtype=torch.float64), torch.tensor(0))] * 4
    async with devices(3) as household:
        with pytest.raises(
            Error, match=r"eval_data\[0\]: input is .*; the model is made for samples"
        ):
            await trained(household, replace(what, eval_data=large), 4)


async def test_a_grid_that_does_not_fit_names_the_unit(monkeypatch: pytest.MonkeyPatch) -> None:
    """On one device: of two, one's refusal would be the cause of another plan."""
    shape = TileShape((0.48, 0.04, 0.48), (1.0,), (0, 1, 3), aligned=False)
    forced(monkeypatch, shape, (3,), behind="a")
    async with devices(1) as household:
        with pytest.raises(Error, match=r"narrower than the halo that layers two\.0 to"):
            await trained(household, job(), 4)


async def test_units_that_cannot_be_tiled_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """On one device, as above."""
    shape = TileShape((0.5, 0.5), (1.0,), (0, 5))
    forced(monkeypatch, shape, (2,), behind="a")
    async with devices(1) as household:
        with pytest.raises(Error, match=r"tiling ends in layer four.1#2 at flatten"):
            await trained(household, job(), 4)


async def test_auto_may_tile_the_last_convolution(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though it stands in one unit with what cannot be tiled."""
    shape = TileShape((0.5, 0.5), (1.0,), (0, 1, 4))
    forced(monkeypatch, shape, (1, 1), behind="a")
    async with devices(2) as household:
        ours = await trained(household, job(), 6)
    found = difference(ours, by_plain_torch(job(), 6))
    assert found.loss < TOLERANCE
    assert found.state < TOLERANCE


async def test_where_the_mode_is_open_rounds_may_be_in_tiles(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`auto` sees the maps; rounds in tiles are held against what needs no barrier."""
    seen: list[tuple[bool, PlanMode]] = []

    def plan(profile: Profile, cluster: Cluster, request: PlanRequest) -> Plan:
        seen.append((profile.maps is not None, request.mode))
        if request.mode is PlanMode.ASYNC:
            return make_plan(profile, cluster, replace(request, planner="pp"))
        return _plan(*GRIDS["1x2"], "a", profile, cluster, request)

    monkeypatch.setattr(plan_cluster, "make_plan", plan)
    monkeypatch.setattr(plan_cluster, "choose_mode", lambda rounds, seconds, free, weights: rounds)
    options = TrainOptions(wait_for=2, steps=6, mode="auto", replan=False)
    what = job(steps=6)
    async with devices(2) as household:
        await household.holder_run(what, options).run()
        assert household.plan.stages[0].allocation == "tiles"
    assert set(seen) == {(True, PlanMode.SYNC), (True, PlanMode.ASYNC)}


@pytest.mark.parametrize("grid", [None, (2, 2)])
async def test_planner_tiles_makes_such_plans(grid: tuple[int, int] | None) -> None:
    """Units are cut where tiling ends, here in the last one: behind flatten nothing is tiled."""
    what = job(steps=8)
    options = TrainOptions(wait_for=3, steps=8, planner="tiles", grid=grid)
    async with devices(3) as household:
        await household.holder_run(what, options).run()
        first, *behind = household.plan.stages
    assert first.allocation == "tiles"
    with_tiles = {device.name for device in first.devices}
    everybody = with_tiles | {device.name for stage in behind for device in stage.devices}
    assert everybody == {"a", "b", "c"}
    if grid is not None:
        assert with_tiles == everybody, "who can have one of the tiles asked for has one"
    assert sum(device.share for device in first.devices) == (len(with_tiles), 4)[grid is not None]
    assert first.units[1] == behind[0].units[0] <= 4
    assert isinstance(what.model, nn.Module)
    state = {name: tensor.detach().clone() for name, tensor in what.model.state_dict().items()}
    found = difference(Outcome(list(household.losses), state), by_plain_torch(job(), 8))
    assert found.loss < TOLERANCE
    assert found.state < TOLERANCE


async def told_of(household: Devices, what: Job) -> str:
    with pytest.raises(Error) as caught:
        await trained(household, what, 20)
    return str(caught.value)


@pytest.mark.parametrize(
    ("weight", "where"),
    [
        (
            1e307,
            r'The first NaN or infinity came from layers? "two\.0".* \(in tiles\) on a, b, in the ',
        ),
        (
            torch.inf,
            r'An earlier update made weights of layer "two\.0" \(in tiles\) on a, b NaN or',
        ),
    ],
)
async def test_tiles_that_diverge_are_not_blamed_on_the_samples(
    monkeypatch: pytest.MonkeyPatch, weight: float, where: str
) -> None:
    """As after updates that were too large: values overflow, or the weights themselves."""
    forced(monkeypatch, *GRIDS["1x2 in pairs"], behind="a")
    what = job()
    assert isinstance(what.model, Net)
    with torch.no_grad():
        what.model.two[0].weight.fill_(weight)  # type: ignore[operator, union-attr]
    async with devices(2) as household:
        assert re.search(rf"nan at step 1. {where}", await told_of(household, what))


async def test_images_that_are_not_finite_are_reported_by_the_tile_that_got_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Statistics spread it to all tiles; the last column is the second device's."""
    forced(monkeypatch, *GRIDS["1x2"], behind="a")
    what = job()
    images = [(image.clone(), label) for image, label in what.data]  # type: ignore[union-attr]
    for image, _ in images:
        image[0, 0, -1] = torch.nan
    async with devices(2) as household:
        words = await told_of(household, replace(what, data=images))
    assert "The data contain NaN or infinity" in words


async def test_without_memory_for_all_weights_no_layer_of_the_tiles_is_blamed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The holder cannot do the round again, and the stage behind gets nothing but nan."""
    forced(monkeypatch, *GRIDS["1x2"], behind="a")
    monkeypatch.setattr(trained_weights, "usable_memory_bytes", lambda: 100)
    what = job()
    assert isinstance(what.model, Net)
    with torch.no_grad():
        what.model.one[0].weight.fill_(torch.nan)  # type: ignore[operator, union-attr]
    async with devices(2) as household:
        words = await told_of(household, what)
    assert 'came from the data or from layers "one.0" to "three.0" (in tiles)' in words


async def test_what_stops_being_finite_behind_tiles_is_not_blamed_on_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    forced(monkeypatch, *GRIDS["1x2"], behind="a")
    what = job()
    assert isinstance(what.model, Net)
    with torch.no_grad():
        what.model.head.weight[0, 0] = torch.nan
    async with devices(2) as household:
        words = await told_of(household, what)
    assert "An earlier update made weights of layer" in words
    assert "in tiles" not in words


class Branched(Net):
    """Two branches read the image, one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Sequential(nn.Conv2d(3, 6, 5, padding=2), nn.BatchNorm2d(6), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        """Image to classes."""
        x = self.two(self.one(x) + self.other(x))
        out: Tensor = self.head(self.four(self.three(x)).flatten(1))
        return out


def branched() -> Job:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2)
        return replace(job(steps=4), model=Branched().double())


async def test_tiles_end_where_the_image_is_read_no_more() -> None:
    what = branched()
    options = TrainOptions(wait_for=2, steps=4, planner="tiles")
    async with devices(2) as household:
        await household.holder_run(what, options).run()
        assert household.plan.stages[0].allocation == "tiles"
    assert isinstance(what.model, nn.Module)
    state = {name: tensor.detach().clone() for name, tensor in what.model.state_dict().items()}
    found = difference(Outcome(list(household.losses), state), by_plain_torch(branched(), 4))
    assert found.loss < TOLERANCE
    assert found.state < TOLERANCE


async def test_what_cannot_be_tiled_at_all_is_reported() -> None:
    what = job()
    linear = nn.Sequential(nn.Flatten(), nn.Linear(3 * 17 * 21, 5)).double()
    options = TrainOptions(wait_for=2, steps=8, planner="tiles")
    async with devices(2) as household:
        with pytest.raises(Error, match="tiling ends in layer 1 at flatten"):
            await household.holder_run(replace(what, model=linear), options).run()


class Repeated(nn.Module):
    """A convolution that is used in tiles, and again behind what cannot be tiled."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 6, 3, padding=1)
        self.again = nn.Conv2d(6, 6, 3, padding=1)
        self.head = nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        """Image to classes."""
        x = torch.tanh(self.again(torch.tanh(self.first(x))))
        x = torch.tanh(self.again(nn.functional.adaptive_avg_pool2d(x, 6)))
        out: Tensor = self.head(x.mean((2, 3)))
        return out


async def test_tiles_of_one_device_may_share_a_weight_with_what_follows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As `--grid 1x1` in front of other devices has it."""

    def repeated() -> Job:
        torch.manual_seed(1)
        return replace(job(micro_batch=2), model=Repeated().double())

    forced(monkeypatch, TileShape((0.6, 0.4), (1.0,), (0, 1, 2)), (2,), behind="b")
    async with devices(2) as household:
        ours = await trained(household, repeated(), 3)
        assert household.plan.stages[0].units == (0, 2)
    found = difference(ours, by_plain_torch(repeated(), 3))
    assert found.loss < TOLERANCE
    assert found.state < TOLERANCE
