from __future__ import annotations

import json
import weakref
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from p2ptrain.model.capture.capture import capture
from p2ptrain.model.graph.description import ModelDescription
from p2ptrain.model.stage.stage import Stage
from p2ptrain.net.forms import write_form
from p2ptrain.profiling import unit_chain
from p2ptrain.profiling.measure_units import UnitMeasurements, measure_units, work_on
from p2ptrain.profiling.unit_chain import UnitChain
from p2ptrain.profiling.unit_passes import CpuClock
from tests.support import reference, zoo
from tests.support.prepared_models import prepare

torch.set_num_threads(1)


def described(name: str) -> ModelDescription:
    return prepare(name).model.description


@lru_cache
def chain_of_three() -> ModelDescription:
    model = nn.Sequential(nn.Linear(10, 20), nn.Sigmoid(), nn.Linear(20, 30), nn.Linear(30, 5))
    example = torch.randn(4, 10), torch.zeros(4, dtype=torch.int64)
    return capture(model, cross_entropy, example, evaluation=False).description


def ticking() -> CpuClock:
    """Both clocks go one second further at each reading."""
    ticks = iter(range(10**9))
    return CpuClock(wall=lambda: float(next(ticks)), cpu=lambda: float(next(ticks)))


def measured(name: str, *sizes: int, budget_seconds: float = 1e9) -> UnitMeasurements:
    description = described(name)
    return measure_units(
        description, batch_sizes=sizes, budget_seconds=budget_seconds, clock=ticking()
    )


def test_sizes_of_a_plain_chain_are_known_beforehand() -> None:
    result = measure_units(chain_of_three(), batch_sizes=[4], budget_seconds=0.0)
    assert (result.input_bytes, result.target_bytes) == (40, 8)
    assert [unit.parameter_bytes for unit in result.units] == [4 * 220, 4 * 630, 4 * 155]
    assert [unit.output_bytes for unit in result.units] == [80, 120, 0]
    assert [unit.flops > 0 for unit in result.units] == [True] * 3
    kept = [unit.activation_bytes for unit in result.units]
    assert kept[:2] == [40 + 80, 120], "what two units keep counts once, with the first"
    assert kept[2] >= 8 + 5 * 4


@pytest.mark.parametrize("name", ["gpt", "frozen", "cnn"])
def test_every_unit_is_timed_for_every_size(name: str) -> None:
    result = measured(name, 1, 3)
    description, units = described(name), len(described(name).units)
    assert result.times.sizes == (1, 3)
    for times in result.times.times:
        assert len(times.forward) == len(times.backward) == units
        assert min(times.forward) > 0
        takes = [not description.is_forward_only(unit) for unit in range(units)]
        assert [seconds > 0 for seconds in times.backward] == takes
        assert len(times.weight) == units
        assert max(times.weight) > 0
        assert all(0 <= w <= b for w, b in zip(times.weight, times.backward, strict=True))


def test_tied_parameters_count_in_each_unit_that_uses_them() -> None:
    embedding_bytes = zoo.VOCABULARY * 24 * 4
    with_it = [u for u in measured("gpt", 2).units if u.parameter_bytes >= embedding_bytes]
    assert len(with_it) >= 2


def test_buffers_are_no_parameters() -> None:
    model = zoo.make("cnn").model
    assert sum(unit.parameter_bytes for unit in measured("cnn", 2).units) == sum(
        parameter.nbytes for parameter in model.parameters()
    )


def test_what_is_kept_is_about_what_the_whole_model_keeps() -> None:
    """Each unit counts its own; a tensor that two units keep may count twice, not more."""
    made = zoo.make("cnn", samples=16)
    model, own = made.model, {p.untyped_storage().data_ptr() for p in made.model.parameters()}
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    x, y = reference.stack(made.data)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        made.loss(model(x), y)
    whole = sum(kept.values()) / 16
    units = sum(unit.activation_bytes for unit in measured("cnn", 16).units)
    assert 0.9 * whole <= units <= 2 * whole


def adapted() -> ModelDescription:
    """Two frozen layers, then one with an adapter beside it, then a head."""

    class Adapted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base = nn.Linear(30, 30).requires_grad_(False)
            self.adapter = nn.Linear(30, 30, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.base(x) + self.adapter(x)

    front = nn.Sequential(nn.Linear(10, 20), nn.Sigmoid(), nn.Linear(20, 30), nn.Sigmoid())
    model = nn.Sequential(front.requires_grad_(False), Adapted(), nn.Sigmoid(), nn.Linear(30, 5))
    example = torch.randn(4, 10), torch.zeros(4, dtype=torch.int64)
    return capture(model, cross_entropy, example, evaluation=False).description


def test_what_takes_gradients_is_counted_apart_and_in_front_of_it_is_no_backward() -> None:
    description = adapted()
    result = measure_units(description, batch_sizes=[4], budget_seconds=0.0, clock=ticking())
    first = next(i for i, unit in enumerate(result.units) if unit.trainable_bytes)
    assert first >= 2
    assert sum(u.trainable_bytes for u in result.units) == 4 * (30 * 30 + 30 * 5 + 5)
    assert sum(u.parameter_bytes for u in result.units) == 4 * (220 + 630 + 930 + 900 + 155)
    for unit, measured_unit in enumerate(result.units):
        times = result.times.at(4)
        assert times.forward[unit] > 0
        assert (times.backward[unit] > 0) == (measured_unit.activation_bytes > 0) == (unit >= first)
    assert result.units[first].activation_bytes >= 30 * 4, "what it reads is kept by itself"


def test_a_frozen_front_keeps_less_than_the_same_front_in_training() -> None:
    chain = UnitChain(described("frozen"))
    chain.begin(4)
    for unit in range(chain.unit_count):
        chain.forward(unit)
    assert chain.saved_bytes[4][0] == 0


def test_what_is_made_and_not_kept_is_counted_beside_what_is() -> None:
    """The last of 7 positions is read: the scores of all are made, and twice in the backward."""

    class Last(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.front, self.scores = nn.Linear(4, 8), nn.Linear(8, 1000, bias=False)
            self.scores.requires_grad_(False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.scores(self.front(x))[:, -1, :10]  # type: ignore[no-any-return]

    example = torch.randn(4, 7, 4), torch.zeros(4, dtype=torch.int64)
    description = capture(Last(), cross_entropy, example, evaluation=False).description
    result = measure_units(description, batch_sizes=[4], budget_seconds=0.0, clock=ticking())
    scores = 4 * 7 * 1000
    assert max(unit.passing_bytes for unit in result.units) == pytest.approx(2 * scores, rel=0.2)
    assert sum(unit.activation_bytes for unit in result.units) < scores


@pytest.mark.parametrize("split", [False, True])
def test_warming_up_counts_nothing(split: bool) -> None:
    plain, warm = UnitChain(described("cnn")), UnitChain(described("cnn"))
    warm.warm_up(4, split=split)
    for chain in (plain, warm):
        chain.begin(4, apart=True)
        for unit in range(chain.unit_count):
            chain.forward(unit)
            chain.backward(unit)
    assert warm.saved_bytes == plain.saved_bytes


def test_json_is_plain_and_complete() -> None:
    content = write_form(measured("mlp", 2, 4))
    assert json.loads(json.dumps(content)) == content
    assert set(content) >= {"input_bytes", "target_bytes", "units", "times"}
    assert set(content["times"]) == {"2", "4"}


def test_sizes_beyond_the_memory_are_left_out_for_smaller_ones() -> None:
    result = measure_units(
        described("cnn"), batch_sizes=[1, 1000], budget_seconds=1e9, memory_bytes=10**7
    )
    assert min(result.times.sizes) == 1
    assert max(result.times.sizes) < 1000
    kept = sum(unit.activation_bytes for unit in result.units)
    assert 2 * kept * max(result.times.sizes) <= 10**7


def test_a_model_that_does_not_fit_is_measured_unit_by_unit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    description = described("gpt")
    whole = measure_units(description, batch_sizes=[2], budget_seconds=0.0)
    built: list[weakref.ref[Stage]] = []
    most = 0

    def make(*args: Any, **kwargs: Any) -> Stage:
        nonlocal most
        stage = Stage(*args, **kwargs)
        built.append(weakref.ref(stage))
        most = max(most, sum(one() is not None for one in built))
        return stage

    monkeypatch.setattr(unit_chain, "Stage", make)
    apart = measure_units(description, batch_sizes=[2], budget_seconds=0.0, memory_bytes=1)
    assert most <= 2, "one, and the one before while autograd lets go of it"
    assert apart.units == whole.units
    assert all(min(*t.forward, *t.backward) > 0 for t in apart.times.times)


def test_made_up_values_neither_vanish_nor_explode() -> None:
    description = described("cnn")
    chain = UnitChain(description)
    chain.begin(8)
    for unit in range(chain.unit_count - 1):
        chain.forward(unit)
        for value in chain.values:
            assert 1e-3 < value.abs().mean() < 1e3


def test_what_is_kept_is_counted_with_small_batches_and_its_memory_taken_before_larger_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    taken: list[Any] = []
    zeros = torch.zeros

    def noted(size: Any, dtype: torch.dtype) -> torch.Tensor:
        taken.append(size)
        return zeros(size, dtype=dtype)

    chain = UnitChain(described("cnn"))
    for batch in (16, 64, 64):
        chain.begin(batch)
        for unit in range(chain.unit_count):
            chain.forward(unit)
        for unit in reversed(range(chain.unit_count)):
            chain.backward(unit)
        if batch == 16:
            monkeypatch.setattr(unit_chain, "_TOUCHED_BLOCK_BYTES", 64)
            monkeypatch.setattr(unit_chain.torch, "zeros", noted)
    assert list(chain.saved_bytes) == [16]
    blocks = [size for size in taken if size == 64]
    kept = sum(chain.saved_bytes[16]) * 64 / 16
    assert kept < 64 * len(blocks) < 1.5 * kept


def test_working_on_runs_one_unit_after_the_other_again_and_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run: list[tuple[str, int]] = []

    def noted(name: str, own: Callable[[UnitChain, int], None]) -> Callable[..., None]:
        def wrapped(chain: UnitChain, unit: int) -> None:
            run.append((name, unit))
            own(chain, unit)

        return wrapped

    for name in ("forward", "backward"):
        monkeypatch.setattr(UnitChain, name, noted(name, getattr(UnitChain, name)))
    steps = work_on(chain_of_three(), 4, None)
    for _ in range(7):
        next(steps)
    each = [[("forward", unit), ("backward", unit)] for unit in (0, 1, 2, 0, 1, 2, 0)]
    assert run == [one for unit in each for one in unit]


def test_measuring_leaves_the_global_generator_alone() -> None:
    before = torch.get_rng_state()
    measured("mlp", 2)
    assert torch.equal(before, torch.get_rng_state())
