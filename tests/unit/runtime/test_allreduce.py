"""Devices of a group over a memory mesh: sums, bits, overlap, hostile frames, broken numbers."""

from __future__ import annotations

import asyncio
import copy
import random
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from p2ptrain.aio.tasks import task_scope
from p2ptrain.errors import NotItsPart, ProtocolError
from p2ptrain.job.rounds import Round, RoundMode
from p2ptrain.messages.round_orders import GenerationKey, RoundOrder
from p2ptrain.messages.tensors import StreamId
from p2ptrain.model.capture.capture import capture
from p2ptrain.model.capture.captured import Captured
from p2ptrain.model.stage.stage import Stage
from p2ptrain.net.message import Message
from p2ptrain.plan.types.allocation import deal
from p2ptrain.runtime.allreduce import FLOW, WINDOW, RingAllReduce
from p2ptrain.runtime.io.tensor_router import TensorRouter
from p2ptrain.runtime.not_finite import MicroBatchNotFinite
from p2ptrain.runtime.reduced_tensors import ReducedTensors, gradient_order
from tests.support.memory_household import MemoryHousehold, MemoryMesh

torch.set_num_threads(1)
SAMPLES, MICRO_BATCH = 14, 3
BUCKET_BYTES = 512
LINE = StreamId(GenerationKey("job", 1), 0, FLOW)


class Net(nn.Module):
    """Frozen, unused and many-bucket parameters, strides of all kinds, running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last)
        self.norm = nn.BatchNorm2d(8)
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.wide = nn.Linear(8, 40)
        self.scale = nn.Parameter(torch.ones(()))
        self.head = nn.Linear(40, 4)
        self.only_evaluated = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.convolution(x)).relu().mean((2, 3))
        x = self.head(self.wide(self.frozen(x)).tanh() * self.scale)
        return x if self.training else self.only_evaluated(x)


def _data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(SAMPLES, 3, 6, 6, generator=generator, dtype=torch.float64)
    return x, torch.randint(0, 4, (SAMPLES,), generator=generator)


@dataclass(frozen=True)
class Prepared:
    """The model, captured, and what one round leaves in plain torch."""

    captured: Captured
    gradients: Mapping[str, Tensor | None]
    buffers: Mapping[str, Tensor]


@pytest.fixture(scope="module")
def prepared() -> Prepared:
    torch.manual_seed(0)
    model = Net().double()
    x, y = _data()
    captured = capture(model, cross_entropy, (x[:3], y[:3]))
    plain = copy.deepcopy(model).train()
    for inputs, target in zip(x.split(MICRO_BATCH), y.split(MICRO_BATCH), strict=True):
        (cross_entropy(plain(inputs), target) * (len(inputs) / SAMPLES)).backward()
    gradients = {name: parameter.grad for name, parameter in plain.named_parameters()}
    return Prepared(captured, gradients, dict(plain.named_buffers()))


class LoggedSwitchboard(TensorRouter):
    """Notes which buckets' chunks leave, after so many turns of the loop."""

    def __init__(self, mesh: MemoryMesh, log: list[str]) -> None:
        super().__init__(mesh)
        self.log = log
        self.turns: Callable[[], int] = lambda: 0

    async def send_frame(
        self, device: str, stream: StreamId, fields: Mapping[str, Any], parts: Sequence[memoryview]
    ) -> None:
        for _ in range(self.turns()):
            await asyncio.sleep(0)
        self.log.append(f"sent {fields['bucket']}")
        await super().send_frame(device, stream, fields, parts)


@dataclass
class Device:
    """One of the group.

    Attributes:
        log: what happened here, in order: "final NAME" and "sent BUCKET".
    """

    stage: Stage
    board: LoggedSwitchboard
    reduction: RingAllReduce
    log: list[str] = field(default_factory=list)


@asynccontextmanager
async def _group(
    captured: Captured, count: int, bucket_bytes: int = BUCKET_BYTES, turn: int | None = None
) -> AsyncIterator[list[Device]]:
    """Devices whose reductions run."""

    def size(*_: int) -> int:
        return bucket_bytes

    names = "abcdefgh"[:count]
    async with MemoryHousehold(names) as household, task_scope() as scope:
        ids = [household[name].self_id for name in names]
        units = len(captured.description.units)
        group = []
        for name in names:
            stage = Stage(captured.description, 0, units, captured.state(), shared=True)
            log: list[str] = []
            mesh = household[name]
            board = LoggedSwitchboard(mesh, log)
            summed = ReducedTensors(stage, size, turn=turn, turned_bytes=size)
            reduction = RingAllReduce(summed, LINE, ids, mesh.self_id, board)
            group.append(Device(stage, board, reduction, log))
        tasks = [scope.create_task(device.reduction.run()) for device in group]
        yield group
        for task in tasks:
            task.cancel()


def _order(index: int = 0) -> RoundOrder:
    return RoundOrder(Round(index, RoundMode.TRAIN, index, SAMPLES, MICRO_BATCH))


def _compute(device: Device, mine: Sequence[int], *, report: bool = True) -> None:
    """This device's micro-batches, as its compute thread would; the last backward reports."""
    x, y = _data()
    parts = list(zip(x.split(MICRO_BATCH), y.split(MICRO_BATCH), strict=True))

    def final(name: str) -> None:
        device.log.append(f"final {name}")
        device.reduction.final(name)

    assert device.stage.statistics is not None
    device.stage.statistics.begin(len(parts))
    for number in mine:
        inputs, target = parts[number]
        device.stage.forward(number, [inputs], [target], weight=len(inputs) / SAMPLES)
    for number in mine:
        last = report and number == mine[-1]
        device.stage.backward(number, final=final if last else None)


async def _round(group: Sequence[Device], shares: tuple[int, ...], index: int = 0) -> None:
    dealt = deal(shares)
    for place, device in enumerate(group):
        device.reduction.begin(_order(index))
        mine = [number for number, taker in enumerate(dealt) if taker == place]
        await asyncio.to_thread(_compute, device, mine)
    async with task_scope() as scope:
        for device in group:
            scope.create_task(device.reduction.finish())


@pytest.mark.parametrize(
    ("shares", "turn"),
    [((3, 2), None), ((2, 1, 2), 1), ((2, 1, 2), 3), ((2, 1, 2), 99), ((1, 1, 1, 1, 1), None)],
)
async def test_gradients_and_statistics_are_plain_torchs(
    prepared: Prepared, shares: tuple[int, ...], turn: int | None
) -> None:
    async with _group(prepared.captured, len(shares), turn=turn) as group:
        before = [{n: t.clone() for n, t in d.stage.state().items()} for d in group]
        await _round(group, shares)
        for device, state in zip(group, before, strict=True):
            assert all(torch.equal(t, state[n]) for n, t in device.stage.state().items())
            _update_statistics(device.stage)
            _check_against(prepared, device.stage)
            for name, tensor in device.stage.state().items():
                first = group[0].stage.state()[name]
                assert torch.equal(tensor, first)
                if tensor.grad is not None and first.grad is not None:
                    assert torch.equal(tensor.grad, first.grad)
                    assert tensor.grad.stride() == tensor.stride()


@pytest.mark.parametrize("turn", [1, 3, 99])
def test_sums_turn_at_a_unit(prepared: Prepared, turn: int) -> None:
    """Those of the units from it on as a backward makes them, then a forward's first units'."""
    description = prepared.captured.description
    units = len(description.units)
    stage = Stage(description, 0, units, prepared.captured.state(), shared=True)
    summed = ReducedTensors(stage, lambda *_: BUCKET_BYTES, turn=turn, turned_bytes=lambda *_: 8)
    entries = [entry for bucket in summed.buckets for entry in bucket.entries]
    names = list(dict.fromkeys(e.name for e in entries if e.name not in summed.statistics_names))
    backward = gradient_order(description, 0, units)
    late = [name for name in names if summed.units[name] < turn]
    assert sorted(names) == sorted(backward)
    assert names == [n for n in backward if n not in late] + late
    assert [summed.units[name] for name in late] == sorted(summed.units[name] for name in late)
    ranks = [summed.rank(bucket.index) for bucket in summed.buckets]
    for bucket, rank in zip(summed.buckets, ranks, strict=True):
        assert rank == min(summed.units.get(name, units) for name in bucket.names)
        here = {summed.units[name] < turn for name in bucket.names & summed.units.keys()}
        assert len(here) < 2, "no bucket has some of both"
    in_backward_order = ReducedTensors(stage, lambda *_: BUCKET_BYTES)
    assert {in_backward_order.rank(b.index) for b in in_backward_order.buckets} == {units}


async def test_of_what_waits_to_be_sent_the_first_units_go_first(prepared: Prepared) -> None:
    """Of the window: it is full before its first chunk is gone."""
    async with _group(prepared.captured, 2, turn=1) as group:
        first, second = group
        for device in group:
            device.board.turns = lambda: 20
            device.reduction.begin(_order())
        await asyncio.to_thread(_compute, first, (0, 2, 4), report=False)
        await asyncio.to_thread(_compute, second, (1, 3), report=False)
        await asyncio.gather(*(device.reduction.finish() for device in group))
        sent = [int(stream.split()[1]) for stream in second.log if stream.startswith("sent")]
        begun = list(dict.fromkeys(sent))[:WINDOW]
        assert begun[0] == 0
        rank = second.reduction.summed.rank
        assert begun[1:] == sorted(range(1, WINDOW), key=rank)
        assert begun[1:] != [*range(1, WINDOW)], "in which they were begun"


async def test_gradients_that_are_whole_in_a_bucket_lie_there(prepared: Prepared) -> None:
    async with _group(prepared.captured, 2) as group:
        await _round(group, (3, 2))
        for device in group:
            parameters = device.stage.parameters()
            for bucket in device.reduction.summed.buckets:
                whole = [
                    parameters[entry.name].grad
                    for entry in bucket.entries
                    if entry.name in parameters and entry.elements == parameters[entry.name].numel()
                ]
                memory = {g.untyped_storage().data_ptr() for g in whole if g is not None}
                assert len(memory) <= 1


def _update_statistics(stage: Stage) -> None:
    """As the update does once it counts; until then the buffers are as before the round."""
    assert stage.statistics is not None
    stage.statistics.merge()


def _check_against(prepared: Prepared, stage: Stage) -> None:
    for name, parameter in stage.parameters().items():
        expected = prepared.gradients[name]
        assert (parameter.grad is None) == (expected is None), name
        if expected is not None:
            torch.testing.assert_close(parameter.grad, expected, rtol=1e-12, atol=1e-12)
    for name, buffer in prepared.buffers.items():
        torch.testing.assert_close(stage.state()[name], buffer, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("seed", range(3))
async def test_no_interleaving_changes_a_bit(prepared: Prepared, seed: int) -> None:
    draw = random.Random(seed)
    states = []
    for slowest in (0, 30):
        async with _group(prepared.captured, 3, bucket_bytes=256) as group:
            for device in group:
                device.board.turns = partial(draw.randint, 0, slowest)
            await _round(group, (2, 1, 2))
            states += [
                [p.grad for p in device.stage.parameters().values() if p.grad is not None]
                for device in group
            ]
    for state in states:
        assert all(torch.equal(a, b) for a, b in zip(state, states[0], strict=True))


async def test_rounds_follow_each_other(prepared: Prepared) -> None:
    """A fast device's next round reaches a slow one before that has begun it."""
    shares = (3, 2)
    async with _group(prepared.captured, 2) as group:
        fast, slow = group
        await _round(group, shares, index=0)
        for device in group:
            for parameter in device.stage.parameters().values():
                parameter.grad = None
        fast.reduction.begin(_order(2))  # an evaluation was in between
        await asyncio.to_thread(_compute, fast, [0, 2, 4])
        await _settled(group)
        assert len(slow.reduction._arriving.held) == WINDOW
        slow.reduction.begin(_order(2))
        await asyncio.to_thread(_compute, slow, [1, 3])
        await asyncio.gather(*(device.reduction.finish() for device in group))
        for name, expected in prepared.gradients.items():
            for device in group:
                found = device.stage.state().get(name)
                if found is not None and expected is not None:
                    torch.testing.assert_close(found.grad, expected, rtol=1e-12, atol=1e-12)


async def test_buckets_leave_before_the_last_gradient_is_final(prepared: Prepared) -> None:
    async with _group(prepared.captured, 2) as group:
        for place, device in enumerate(group):
            device.reduction.begin(_order())
            _compute(device, (0, 2, 4) if place == 0 else (1, 3), report=False)
        names = gradient_order(group[0].stage.description, 0, len(_units(prepared)))
        for name in names[:-1]:
            for device in group:
                device.log.append(f"final {name}")
                device.reduction.final(name)
            await _settled(group)
        for device in group:
            device.log.append("final of all")
        await asyncio.gather(*(device.reduction.finish() for device in group))
        for device in group:
            _update_statistics(device.stage)
            _check_against(prepared, device.stage)
            before = device.log[: device.log.index("final of all")]
            # All buckets but the last had gone round by then: a chunk in each of two steps.
            sent = {entry for entry in before if entry.startswith("sent")}
            assert len(sent) == len(device.reduction.summed.buckets) - 1 > 5


def _units(prepared: Prepared) -> Sequence[object]:
    return prepared.captured.description.units


async def _settled(group: Sequence[Device]) -> None:
    """Let the loop run until nothing more is sent."""
    before = -1
    while (now := sum(len(device.log) for device in group)) != before:
        before = now
        for _ in range(20):
            await asyncio.sleep(0)


async def test_at_most_a_window_is_under_way(prepared: Prepared) -> None:
    """A device alone in its round begins a window of buckets and then waits."""
    async with _group(prepared.captured, 2, bucket_bytes=64) as group:
        first, second = group
        first.reduction.begin(_order())
        _compute(first, (0, 2, 4))
        await _settled(group)
        assert first.log.count("sent 0") == 1
        assert len([entry for entry in first.log if entry.startswith("sent")]) == WINDOW
        second.reduction.begin(_order())
        _compute(second, (1, 3))
        await asyncio.gather(*(device.reduction.finish() for device in group))
        for device in group:
            _update_statistics(device.stage)
            _check_against(prepared, device.stage)


def test_a_running_statistic_that_is_not_finite_is_called_one(prepared: Prepared) -> None:
    description, units = prepared.captured.description, len(_units(prepared))
    stage = Stage(description, 0, units, prepared.captured.state(), shared=True)
    summed = ReducedTensors(stage)
    name = sorted(summed.statistics_names)[0]
    assert stage.statistics is not None
    stage.statistics.sums[name].fill_(torch.nan)
    bucket = next(bucket for bucket in summed.buckets if name in bucket.names)
    with pytest.raises(
        MicroBatchNotFinite, match=rf"the running statistic {name} \(layer .* step 8"
    ):
        summed.pack(bucket, 8)


@pytest.mark.parametrize("broken", ["wide.weight", "convolution.bias"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
async def test_a_nan_names_step_and_parameter_and_stays_here(
    prepared: Prepared, broken: str, value: float
) -> None:
    stages: list[Stage] = []

    async def broken_round() -> None:
        async with _group(prepared.captured, 2) as group:
            stages.extend(device.stage for device in group)
            for place, device in enumerate(group):
                device.reduction.begin(_order(7))
                _compute(device, (0, 2, 4) if place == 0 else (1, 3), report=False)
            gradient = stages[0].parameters()[broken].grad
            assert gradient is not None
            gradient.view(-1)[1] = value
            await asyncio.gather(*(device.reduction.finish() for device in group))

    with pytest.raises(MicroBatchNotFinite, match=rf"{broken} .* step 8") as caught:
        await broken_round()
    assert caught.value.step == 8
    other = stages[1].parameters()[broken].grad
    assert other is not None
    assert other.isfinite().all()


async def test_a_tensor_cut_into_many_buckets_may_be_missing_on_one_device(
    prepared: Prepared,
) -> None:
    """Its first sums are complete, and written there, before its last part is packed."""
    async with _group(prepared.captured, 2, bucket_bytes=64) as group:
        for step in range(2):
            for device in group:
                device.reduction.begin(_order(step))
                for parameter in device.stage.parameters().values():
                    parameter.grad = torch.full_like(parameter, 3.0)
            group[1 - step].stage.parameters()["wide.weight"].grad = None
            await asyncio.gather(*(device.reduction.finish() for device in group))
            for device in group:
                gradient = device.stage.parameters()["wide.weight"].grad
                assert gradient is not None
                assert (gradient == 3.0).all()


async def test_large_finite_gradients_pass(prepared: Prepared) -> None:
    """Their sum in the check overflows; they are finite all the same."""
    async with _group(prepared.captured, 2) as group:
        for device in group:
            device.reduction.begin(_order())
            for parameter in device.stage.parameters().values():
                parameter.grad = torch.full_like(parameter, 8e307)
            group[1].stage.parameters()["wide.weight"].grad = None
        await asyncio.gather(*(device.reduction.finish() for device in group))
        for device in group:
            gradient = device.stage.parameters()["wide.weight"].grad
            assert gradient is not None
            assert (gradient == 8e307).all()  # missing on one device, present on the other


async def test_cancelling_in_the_middle_leaves_nothing_behind(prepared: Prepared) -> None:
    async with _group(prepared.captured, 3) as group:
        group[0].reduction.begin(_order())
        _compute(group[0], (0, 3))
        finishing = asyncio.create_task(group[0].reduction.finish())
        await _settled(group)
        finishing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await finishing
    assert len(asyncio.all_tasks()) == 1


def _fields(**changes: object) -> dict[str, Any]:
    fields = {"round": 0, "bucket": 0, "step": 0, "present": b"\x01"}
    return fields | changes


@pytest.mark.parametrize(
    "changes",
    [
        {"bucket": 10**6},
        {"bucket": -1},
        {"step": 2},
        {"step": None},
        {"round": 1},  # the next round, while all buckets of this one are to come
        {"round": -1},
        {"present": b""},
        {"present": b"\x03\x00"},
        {"bucket": 2 * WINDOW},  # too far ahead
    ],
)
async def test_frames_that_do_not_fit_are_refused(
    prepared: Prepared, changes: dict[str, object]
) -> None:
    async with _group(prepared.captured, 2, bucket_bytes=64) as group:
        reduction = group[0].reduction
        reduction.begin(_order())
        half = [8 * 4]
        reduction.open("b", _fields(), half)
        reduction.open("b", _fields(bucket=2 * WINDOW - 1), half)
        with pytest.raises(ProtocolError):
            reduction.open("b", _fields(**{"bucket": 1} | changes), half)


async def test_a_neighbour_names_one_next_round(prepared: Prepared) -> None:
    async with _group(prepared.captured, 2, bucket_bytes=64) as group:
        reduction = group[0].reduction
        reduction.open("b", _fields(round=3), [32])
        with pytest.raises(ProtocolError, match="round 4"):
            reduction.open("b", _fields(round=4), [32])
        with pytest.raises(ProtocolError, match="round 3"):
            reduction.begin(_order(2))


async def test_sizes_repetitions_and_strangers_are_refused(prepared: Prepared) -> None:
    async with _group(prepared.captured, 3, bucket_bytes=96) as group:
        reduction = group[1].reduction
        reduction.begin(_order())
        for sizes in ([], [31], [33], [32, 32], [1 << 40]):
            with pytest.raises(ProtocolError, match="bytes instead of"):
                reduction.open("a", _fields(), sizes)
        reduction.open("a", _fields(), [32])
        with pytest.raises(ProtocolError, match="twice"):
            reduction.open("a", _fields(), [32])
        reduction.deliver("a", _fields())
        with pytest.raises(ProtocolError, match="twice"):
            reduction.open("a", _fields(), [32])
        with pytest.raises(ProtocolError, match="never opened"):
            reduction.deliver("a", _fields(step=1))


async def test_only_the_neighbour_before_is_heard(prepared: Prepared) -> None:
    async with MemoryHousehold("abc") as household:
        ids = [household[name].self_id for name in "abc"]
        captured = prepared.captured
        stage = Stage(captured.description, 0, len(_units(prepared)), captured.state(), shared=True)
        board = TensorRouter(household["a"])
        RingAllReduce(ReducedTensors(stage), LINE, ids, ids[0], board)
        message = Message("train.values", {**LINE.fields(), **_fields()})
        with pytest.raises(NotItsPart, match="not its to send"):
            await household["b"].call(ids[0], message, timeout_seconds=5)
