"""What a stage's executor is connected to: its inputs, and where its results go."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from p2ptrain.devices.interface import HostCopies
from p2ptrain.messages.round_orders import RoundOrder, RoundReport
from p2ptrain.messages.tensors import MicroBatchSlice, Value
from p2ptrain.runtime.allreduce_buckets import ArrivedSums
from p2ptrain.runtime.io.tensor_receiver import TensorReceiver
from p2ptrain.runtime.reduced_tensors import ReducedTensors
from p2ptrain.runtime.spans import SILENT, SpanRecorder


class StageSender(Protocol):
    """Where a stage's results go, besides its output queues."""

    async def send_output(self, piece: MicroBatchSlice, values: Sequence[Value]) -> None:
        """The model's outputs of an evaluated piece, to the holder."""

    async def send_started(self, piece: MicroBatchSlice, targets: bool) -> None:
        """Credit: the feeder of activations (or targets) may send one more slice."""

    async def exchange_gradients(self, order: RoundOrder) -> bool:
        """Sum the gradients of tied tensors over the stages that share them; False: none are."""

    async def send_norms(self, order: RoundOrder) -> None:
        """Where the job clips: what the holder makes the clipping coefficient of."""

    async def report(self, report: RoundReport) -> None:
        """Report to the holder that the round is done here."""


class OutputQueue(Protocol):
    """Takes a stage's finished values in one direction: `OutputQueues`, or a sink."""

    async def put(self, piece: MicroBatchSlice, values: HostCopies) -> None:
        """A piece is finished."""

    async def run(self) -> None:
        """Hand on what was put, until cancelled or nothing can come."""


class DiscardedOutput:
    """Implements `OutputQueue` for a stage whose results others have already."""

    async def put(self, piece: MicroBatchSlice, values: HostCopies) -> None:
        """Forget it."""

    async def run(self) -> None:
        """There is nothing to do."""


class AllReduce(Protocol):
    """The all-reduce inside a group, as a stage uses it."""

    def begin(self, order: RoundOrder) -> None:
        """A round of training starts."""

    @property
    def summed(self) -> ReducedTensors:
        """What is summed."""

    @property
    def arrived(self) -> ArrivedSums:
        """Which sums of the round that was begun last are there."""

    def final(self, name: str) -> None:
        """That parameter's gradient will not change any more; called from the compute thread."""

    def all_final(self) -> None:
        """Nor will any other."""

    async def finish(self) -> None:
        """Wait until every gradient is the group's sum."""

    async def run(self) -> None:
        """Exchange until cancelled."""


@dataclass(frozen=True, slots=True)
class StageIo:
    """What a stage on this device is connected to.

    Attributes:
        activations, targets, gradients: what comes in; no gradients at the last stage, and in front
            of the first trained weight.
        forward: to the next stage; None at the last.
        backward: to the stage before; None where that receives no gradients.
        reduction: with the other devices of the stage; None where this one is alone.
        spans: where it is noted what the stage does.
    """

    activations: TensorReceiver
    targets: TensorReceiver
    gradients: TensorReceiver | None
    forward: OutputQueue | None
    backward: OutputQueue | None
    reduction: AllReduce | None
    spans: SpanRecorder = SILENT
