"""A group's running statistics against plain torch on one device."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from p2ptrain.model.capture.capture import capture
from p2ptrain.model.capture.captured import Captured
from p2ptrain.model.sample_independence.division_effects import division_effects
from p2ptrain.model.stage.running_statistics import NotShareable, shareable
from p2ptrain.model.stage.stage import Stage
from p2ptrain.plan.types.allocation import deal

torch.set_num_threads(1)
SAMPLES, MICRO_BATCH = 11, 3  # the last micro-batch is smaller


class Normalised(nn.Module):
    """Uses one normalisation twice, two with other momenta, and one for instances."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, 4, 3)
        self.twice = nn.BatchNorm2d(4)
        self.slow = nn.BatchNorm2d(4, momentum=0.01)
        self.newest = nn.BatchNorm2d(4, momentum=1.0)
        self.instances = nn.InstanceNorm2d(4, track_running_stats=True)

    def forward(self, x: Tensor) -> Tensor:
        x = self.twice(self.convolution(x)).relu()
        x = self.slow(self.instances(self.twice(x)))
        return self.newest(x).mean((2, 3))


class Watched(nn.Module):
    """Something outside the normalisation touches its buffer."""

    def __init__(self, touch: Callable[[nn.BatchNorm1d, Tensor], Tensor]) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.touch = touch

    def forward(self, x: Tensor) -> Tensor:
        return self.touch(self.norm, self.norm(x))


def _data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(SAMPLES, 3, 6, 6, generator=generator, dtype=torch.float64)
    return x, torch.randint(0, 4, (SAMPLES,), generator=generator)


def _captured(model: nn.Module, x: Tensor, y: Tensor) -> Captured:
    return capture(model, cross_entropy, (x[:3], y[:3]), evaluation=False)


@pytest.fixture(scope="module")
def normalised() -> tuple[nn.Module, Captured]:
    torch.manual_seed(0)
    model = Normalised().double()
    return model, _captured(model, *_data())


def _plain_buffers(model: nn.Module, rounds: int) -> dict[str, Tensor]:
    model = copy.deepcopy(model).train()
    for _ in range(rounds):
        for x in _data()[0].split(MICRO_BATCH):
            model(x)
    return dict(model.named_buffers())


def _replicas(model: Captured, count: int) -> list[Stage]:
    units = len(model.description.units)
    return [Stage(model.description, 0, units, model.state(), shared=True) for _ in range(count)]


def _merge(stages: Sequence[Stage]) -> None:
    """What a group reduction does, without a network."""
    statistics = [stage.statistics for stage in stages]
    names = statistics[0].sums if statistics[0] else {}
    totals = {n: sum(s.sums[n] for s in statistics if s is not None) for n in names}
    for each in statistics:
        assert each is not None
        for name, total in totals.items():
            each.sums[name].copy_(total)
        each.merge()


def _begin(stages: Sequence[Stage], micro_batches: int) -> None:
    for stage in stages:
        assert stage.statistics is not None
        stage.statistics.begin(micro_batches)


@pytest.mark.parametrize("shares", [(2, 2), (3, 1), (1, 2, 1)])
def test_whole_micro_batches_leave_one_devices_statistics(
    normalised: tuple[nn.Module, Captured], shares: tuple[int, ...]
) -> None:
    model, captured = normalised
    stages = _replicas(captured, len(shares))
    x, y = _data()
    for _ in range(2):
        _begin(stages, sum(shares))
        parts = zip(x.split(MICRO_BATCH), y.split(MICRO_BATCH), strict=True)
        for number, (inputs, target) in enumerate(parts):
            stage = stages[deal(shares)[number]]
            stage.forward(number, [inputs], [target])
            stage.forget_held()
        _merge(stages)
    for name, expected in _plain_buffers(model, 2).items():
        for stage in stages if name in stages[0].state() else ():
            found = stage.state()[name]
            torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
            assert torch.equal(found, stages[0].state()[name])


def test_divided_samples_keep_the_mean_but_not_the_variance_between_parts() -> None:
    x = torch.randn(SAMPLES, 4, dtype=torch.float64)
    y = torch.randint(0, 4, (SAMPLES,))
    stages = _replicas(_captured(Watched(lambda _norm, x: x).double(), x, y), 2)
    _begin(stages, 1)
    for stage, part in zip(stages, (slice(0, 8), slice(8, SAMPLES)), strict=True):
        stage.forward(0, [x[part]], [y[part]], share=len(x[part]) / SAMPLES)
    _merge(stages)
    variance = (x[:8].var(0) * 8 + x[8:].var(0) * 3) / SAMPLES
    for stage in stages:
        state = stage.state()
        torch.testing.assert_close(state["norm.running_mean"], 0.1 * x.mean(0))
        torch.testing.assert_close(state["norm.running_var"], 0.9 + 0.1 * variance)
        assert state["norm.num_batches_tracked"] == 1


def test_divided_samples_leave_an_instance_normalisation_as_one_device_has_it() -> None:
    """Each sample has statistics of its own, and their mean adds up: nothing to warn of."""
    norm = nn.InstanceNorm2d(3, affine=True, track_running_stats=True)
    model = nn.Sequential(norm, nn.Flatten(), nn.Linear(108, 4)).double()
    x, y = _data()
    captured = _captured(model, x, y)
    assert division_effects(captured.description) == ()
    stages = _replicas(captured, 2)
    _begin(stages, 1)
    for stage, part in zip(stages, (slice(0, 8), slice(8, SAMPLES)), strict=True):
        stage.forward(0, [x[part]], [y[part]], share=len(x[part]) / SAMPLES)
    _merge(stages)
    model.train()(x)
    for stage in stages:
        for name in ("0.running_mean", "0.running_var"):
            torch.testing.assert_close(stage.state()[name], model.state_dict()[name])


def test_buffers_hold_the_last_rounds_values_until_the_merge(
    normalised: tuple[nn.Module, Captured],
) -> None:
    stages = _replicas(normalised[1], 1)
    x, y = _data()
    before = {name: tensor.clone() for name, tensor in stages[0].state().items()}
    _begin(stages, 1)
    stages[0].forward(0, [x], [y])
    assert all(torch.equal(before[n], t) for n, t in stages[0].state().items())
    _merge(stages)
    assert stages[0].state()["twice.num_batches_tracked"] == 2


def _shareable(touch: Callable[[nn.BatchNorm1d, Tensor], Tensor]) -> str | None:
    x, y = torch.randn(6, 4), torch.randint(0, 4, (6,))
    description = _captured(Watched(touch), x, y).description
    return shareable(description, 0, len(description.units))


def test_a_normalisation_alone_may_be_shared() -> None:
    assert _shareable(lambda norm, x: x) is None


@pytest.mark.parametrize(
    "touch",
    [
        lambda norm, x: x - norm.running_mean,
        lambda norm, x: x * norm.num_batches_tracked,
        lambda norm, x: x + norm.running_var.mul_(0.5).detach(),
        lambda norm, x: x + norm.running_mean[:1],
    ],
)
def test_a_written_buffer_that_is_used_otherwise_may_not_be_shared(
    touch: Callable[[nn.BatchNorm1d, Tensor], Tensor],
) -> None:
    reason = _shareable(touch)
    assert reason is not None
    assert "norm." in reason


def test_a_stage_that_may_not_be_shared_is_refused() -> None:
    x, y = torch.randn(6, 4), torch.randint(0, 4, (6,))
    captured = _captured(Watched(lambda norm, x: x - norm.running_mean), x, y)
    units = len(captured.description.units)
    with pytest.raises(NotShareable, match="running_mean"):
        Stage(captured.description, 0, units, captured.state(), shared=True)
