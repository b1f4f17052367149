"""A stage in training: what counts of a round, and when; against plain torch, bit for bit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from p2ptrain.errors import InternalError
from p2ptrain.job.rounds import Round, RoundMode
from p2ptrain.messages.round_orders import RoundOrder
from p2ptrain.model.capture.capture import capture
from p2ptrain.model.capture.captured import Captured
from p2ptrain.model.stage import cross_stage_gradients
from p2ptrain.model.stage.mutated_state import written_names
from p2ptrain.model.stage.optimizer import StageOptimizer
from p2ptrain.model.stage.optimizer_spec import SGD, Adam
from p2ptrain.model.stage.stage import Stage
from p2ptrain.recovery.version import Version
from p2ptrain.runtime import live_stage
from p2ptrain.runtime.live_stage import LiveStage
from tests.support.twin_device import TwinDevice
from tests.support.twin_tensor import TwinTensor

torch.set_num_threads(1)
MICRO_BATCHES, MICRO_BATCH = 3, 4
SAMPLES = MICRO_BATCHES * MICRO_BATCH
GENERATION = 7


class Net(nn.Module):
    """Written: running statistics, a counter, and a buffer through a view of it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6)
        self.head = nn.Linear(6, 3)
        self.register_buffer("table", torch.zeros(2, 3))
        self.register_buffer("constant", torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.table[1].add_(1.0)
        return self.head(self.norm(x * self.constant))


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(SAMPLES, 6, generator=generator)
    return x, torch.randint(0, 3, (SAMPLES,), generator=generator)


@pytest.fixture(scope="module")
def captured() -> Captured:
    torch.manual_seed(0)
    x, y = data()
    return capture(Net(), cross_entropy, (x[:MICRO_BATCH], y[:MICRO_BATCH]), evaluation=False)


def make_live(
    captured: Captured, state: Mapping[str, Tensor] | None = None, step: int = 0, **options: Any
) -> LiveStage:
    """The whole model as one stage, from the first weights or from `named` tensors."""
    model, slots = captured.state(), {}
    if state is not None:
        parts = {kind: {} for kind in ("model", "optimizer")}
        for name, tensor in state.items():
            kind, _, rest = name.partition(":")
            parts[kind][rest] = tensor
        model, slots = parts["model"], parts["optimizer"]
    units = len(captured.description.units)
    copy = state is None
    stage = Stage(captured.description, 0, units, model, copy=copy, **options)
    optimizer = StageOptimizer(SGD(lr=0.1, momentum=0.9), stage.parameters())
    optimizer.load_state(slots, copy=False)
    return LiveStage(stage, optimizer, Version(step, 0), GENERATION)


def make_order(step: int = 0) -> RoundOrder:
    return RoundOrder(Round(step, RoundMode.TRAIN, step, SAMPLES, MICRO_BATCH))


def compute_round(
    live: LiveStage, micro_batches: int = MICRO_BATCHES, *, split: bool = False
) -> None:
    x, y = data()
    live.save(MICRO_BATCHES)
    for number in range(micro_batches):
        part = slice(number * MICRO_BATCH, (number + 1) * MICRO_BATCH)
        weight = MICRO_BATCH / SAMPLES
        live.stage.forward(number, [x[part]], [y[part]], weight=weight, split=split)
        if split:
            live.stage.backward_inputs(number)
        else:
            live.stage.backward(number)


def copies(live: LiveStage) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in live.named().items()}


def assert_equal(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(found[name], tensor), name


def test_what_training_writes_is_found_through_views_too(captured: Captured) -> None:
    description = captured.description
    written = written_names(description, 0, len(description.units))
    statistics = ("running_mean", "running_var", "num_batches_tracked")
    assert written == {"table", *(f"norm.{name}" for name in statistics)}


def test_a_round_given_up_leaves_the_version_it_began_with(captured: Captured) -> None:
    """Done again by a stage that takes over the tensors: the same bits, nothing counted twice."""
    undisturbed = make_live(captured)
    for step in range(2):
        compute_round(undisturbed)
        undisturbed.get_ready(make_order(step))
        undisturbed.apply(None)
    live = make_live(captured)
    compute_round(live)
    live.get_ready(make_order())
    live.apply(None)
    after_one = copies(live)
    compute_round(live, micro_batches=2)
    assert not torch.equal(live.present()["model:table"], after_one["model:table"])
    assert_equal(live.named(), after_one)
    assert live.version == Version(1, GENERATION)
    again = make_live(captured, live.named(), step=1)
    own = again.present()
    assert all(own[n].data_ptr() == t.data_ptr() for n, t in live.named().items()), "no copies"
    compute_round(again)
    again.get_ready(make_order(1))
    again.apply(None)
    assert_equal(again.named(), undisturbed.named())


def test_ready_has_both_the_version_before_and_the_one_after(captured: Captured) -> None:
    live = make_live(captured)
    before = copies(live)
    compute_round(live)
    live.get_ready(make_order())
    assert (live.version, live.ready) == (Version(0, 0), Version(1, GENERATION))
    assert_equal(live.named(), before)
    live.apply(None)
    assert (live.version, live.ready) == (Version(1, GENERATION), None)
    after = live.named()
    assert after["model:table"][1].tolist() == [MICRO_BATCHES] * 3
    assert after["model:norm.num_batches_tracked"] == MICRO_BATCHES
    assert "optimizer:head.weight.momentum_buffer" in after
    assert all(p.grad is None for p in live.stage.parameters().values())


def test_a_groups_statistics_change_with_the_update_only() -> None:
    x, y = data()
    model = nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 3))  # nothing but sums is written
    simple = capture(model, cross_entropy, (x[:MICRO_BATCH], y[:MICRO_BATCH]), evaluation=False)
    live = make_live(simple, shared=True)
    before = copies(live)
    assert live.stage.statistics is not None
    live.stage.statistics.begin(MICRO_BATCHES)
    compute_round(live)
    live.get_ready(make_order())
    assert_equal(live.named(), before)
    live.apply(None)
    alone = make_live(simple)
    compute_round(alone)
    alone.get_ready(make_order())
    alone.apply(None)
    for name, tensor in alone.named().items():
        torch.testing.assert_close(live.named()[name], tensor)
    assert not torch.equal(live.named()["model:0.running_mean"], before["model:0.running_mean"])


@pytest.mark.parametrize("split", [False, True])
def test_ready_only_when_nothing_is_left_to_compute(captured: Captured, split: bool) -> None:
    live = make_live(captured)
    compute_round(live, split=split)
    if split:  # weight gradients still wait
        with pytest.raises(InternalError, match="not ready for update 0"):
            live.get_ready(make_order())
        live.stage.backward_weights(*range(MICRO_BATCHES))
    with pytest.raises(InternalError, match="not ready for update 1"):
        live.get_ready(make_order(1))
    live.get_ready(make_order())
    assert live.ready is not None


def test_no_update_without_gradients(captured: Captured) -> None:
    live = make_live(captured)
    with pytest.raises(InternalError, match="without gradients"):
        live.apply(None)
    assert live.version == Version(0, 0)
    assert not live.torn


def test_clipping_is_part_of_the_update(captured: Captured) -> None:
    live, plain = make_live(captured), make_live(captured)
    for stage in (live, plain):
        compute_round(stage)
    parameters = plain.stage.parameters().values()
    gradients = {name: p.grad for name, p in live.stage.parameters().items()}
    norms = list(cross_stage_gradients.tensor_norms(gradients).values())
    coefficient = cross_stage_gradients.to_number(
        cross_stage_gradients.clip_coefficient(norms, 0.01)
    )
    torch.nn.utils.clip_grad_norm_(parameters, 0.01)
    for stage, number in ((live, coefficient), (plain, None)):
        stage.get_ready(make_order())
        stage.apply(number)
    assert_equal(live.named(), plain.named())
    assert live.coefficient == coefficient
    assert coefficient[1] == "float32"


def make_whole(live: LiveStage, step: int, *, ahead: bool = False) -> None:
    compute_round(live)
    live.get_ready(make_order(step))
    if ahead:
        live.advance()
    live.apply(None)


@pytest.mark.parametrize("shared", [False, True])
def test_ahead_of_the_word_both_versions_are_there(captured: Captured, shared: bool) -> None:
    """At the first update, which makes the optimizer's state, and at the second."""
    x, y = data()
    if shared:
        model = nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 3))  # nothing but sums is written
        captured = capture(
            model, cross_entropy, (x[:MICRO_BATCH], y[:MICRO_BATCH]), evaluation=False
        )
    live, plain = (make_live(captured, shared=shared) for _ in range(2))
    for step in range(3):
        for one in (live, plain):
            if one.stage.statistics is not None:
                one.stage.statistics.begin(MICRO_BATCHES)
            compute_round(one)
            one.get_ready(make_order(step))
        before, version = copies(live), live.version
        live.advance()
        plain.apply(None)
        assert (live.version, live.ready) == (version, Version(step + 1, GENERATION))
        assert_equal(live.named(), before)
        assert_equal(live.copied({}), plain.named())
        with pytest.raises(InternalError, match="not ready"):
            live.get_ready(make_order(step))
        live.apply(None)
        assert (live.version, live.ready) == (Version(step + 1, GENERATION), None)
        assert_equal(live.named(), plain.named())


def test_ahead_of_the_word_a_stage_whose_layers_are_all_frozen_has_nothing_to_keep() -> None:
    x, y = data()
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 3)).requires_grad_(False)
    whole = nn.Sequential(model, nn.Linear(3, 3))
    captured = capture(whole, cross_entropy, (x[:MICRO_BATCH], y[:MICRO_BATCH]), evaluation=False)
    description, state = captured.description, captured.state()
    stage = Stage(description, 0, 1, state)
    live = LiveStage(stage, StageOptimizer(SGD(lr=0.1), {}), Version(0, GENERATION), GENERATION)
    before = copies(live)
    for step in range(2):
        live.save(MICRO_BATCHES)
        live.get_ready(make_order(step))
        live.advance()
        live.apply(None)
    assert live.version == Version(2, GENERATION)
    assert_equal(live.named(), before)


def test_forwards_after_an_update_that_does_not_count_change_nothing_of_before(
    captured: Captured,
) -> None:
    """Given up there, the round before is done again from its own bits; or it counts after all."""
    undisturbed = make_live(captured)
    for step in range(3):
        make_whole(undisturbed, step)
    live = make_live(captured)
    make_whole(live, 0, ahead=True)
    after_one = copies(live)
    compute_round(live)
    live.get_ready(make_order(1))
    live.advance()
    after_two = live.copied({})
    compute_round(live, micro_batches=2)
    assert not torch.equal(live.present()["model:table"], after_two["model:table"])
    assert_equal(live.named(), after_one)
    given_up = {name: tensor.clone() for name, tensor in live.named().items()}
    live.apply(None)
    assert_equal(live.named(), after_two)
    for state, step in ((given_up, 1), (live.named(), 2)):
        again = make_live(captured, state, step)
        for later in range(step, 3):
            make_whole(again, later)
        assert_equal(again.named(), undisturbed.named())


def test_without_memory_for_what_was_before_nothing_changes(
    captured: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    live = make_live(captured)
    before = copies(live)
    compute_round(live)
    live.get_ready(make_order())

    def no_memory(slot: object, tensor: object) -> None:
        raise MemoryError

    monkeypatch.setattr(live_stage, "copy_into", no_memory)
    with pytest.raises(MemoryError):
        live.advance()
    assert not live.torn
    assert not live.is_ahead
    assert_equal(live.named(), before)
    live.apply(None)
    assert live.version == Version(1, GENERATION)


def test_an_update_that_fails_half_way_counts_for_nothing(
    captured: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    live = make_live(captured)
    compute_round(live)
    live.get_ready(make_order())

    def fail() -> None:
        raise MemoryError

    monkeypatch.setattr(live.optimizer, "zero_grad", fail)  # weights have changed by then
    with pytest.raises(MemoryError):
        live.apply(None)
    assert live.torn
    assert live.version == Version(0, 0)


def test_copies_use_the_memory_they_are_given(captured: Captured) -> None:
    live = make_live(captured)
    first = live.copied({})
    compute_round(live)
    live.get_ready(make_order())
    live.apply(None)
    second = live.copied(first)
    assert_equal(second, live.named())
    own = live.named()
    for name, tensor in second.items():
        is_own = tensor.data_ptr() == own[name].data_ptr()
        assert is_own == (name == "model:constant"), "what never changes is not copied"
        assert name not in first or tensor.data_ptr() == first[name].data_ptr()


def test_the_first_update_finds_memory_or_is_not_promised(captured: Captured) -> None:
    """The optimizer makes its slots in the first update, when it is too late to say no."""
    stage = make_live(captured).stage
    huge = nn.Parameter(torch.empty(0).set_(torch.empty(1).untyped_storage(), 0, (1 << 50,), (0,)))
    optimizer = StageOptimizer(Adam(), {**stage.parameters(), "huge": huge})
    optimizer.reserve()
    huge.grad = huge.detach()
    with pytest.raises(RuntimeError, match="DefaultCPUAllocator"):
        optimizer.reserve()


@pytest.mark.parametrize("kept", [False, True])
def test_copies_of_a_stage_on_an_accelerator_stay_as_they_are(
    captured: Captured, kept: bool
) -> None:
    """The optimizer's counters are in host memory already, and change in place.

    `kept`: in the memory of an older copy.
    """
    device, units = TwinDevice(), len(captured.description.units)
    device.prepare_thread()
    stage = Stage(captured.description, 0, units, captured.state(), device=device)
    optimizer = StageOptimizer(Adam(lr=0.1), stage.parameters(), device=device)
    live = LiveStage(stage, optimizer, Version(0, 0), GENERATION)
    seen: list[dict[str, Tensor]] = []
    for step in range(3):
        live.save(MICRO_BATCHES)
        x, y = device.copied_in(data())
        live.stage.forward(0, [x], [y], weight=1.0)
        live.stage.backward(0)
        live.get_ready(make_order(step))
        live.apply(None)
        copy = live.copied(seen.pop(0) if kept and len(seen) == 2 else {})
        assert not any(isinstance(tensor, TwinTensor) for tensor in copy.values())
        assert float(copy["optimizer:head.weight.step"]) == step + 1
        seen.append(copy)
    before = seen[-2]
    assert float(before["optimizer:head.weight.step"]) == 2
    assert not torch.equal(before["model:head.weight"], seen[-1]["model:head.weight"])
