"""A model's units on one device, one behind the other, with made-up weights and samples.

Weights are drawn so that activations keep their size: numbers that die away to denormals are many
times slower than those of a real model. Nothing of the user's data is needed. On a device that
cannot hold the whole model each unit is made when its turn comes, and forgotten after it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from p2ptrain.devices.interface import ComputeDevice
from p2ptrain.devices.processor import HOST
from p2ptrain.model.graph.description import ModelDescription, TensorDescription
from p2ptrain.model.graph.values import ValueDescription
from p2ptrain.model.stage.memory_ledger import tensors_in
from p2ptrain.model.stage.stage import Stage

_KEY = 0
"""Of the one micro-batch that is under way at a time."""

_COUNTED = 16
"""Samples, after which a larger batch is not counted again: that costs a third of a forward."""

_TOUCHED_PART = 1.25
"""Memory that a pass takes, by what is kept for its backward. Taking it costs a quarter of one."""

_TOUCHED_BLOCK_BYTES = 16 << 20
"""Small enough to come from the C library's heap, and to be cut into others afterwards."""

_DEVIATES = 65521
"""Random numbers drawn; a prime, so that rows of a matrix do not repeat."""

WHOLE = -2
"""Marked where all units run as one stage."""


def unmarked(_unit: int) -> None:
    """Ignore where it is."""


class _MadeValues(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts what operators have made that is still there.

    Attributes:
        peak_bytes: the most of it at once.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak_bytes = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """torch would load its compiler for it: a second, and 100 MiB."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        known = {_address(tensor) for tensor in tensors_in(args)}
        self._alive = {k: one for k, one in self._alive.items() if not one[0].expired()}  # type: ignore[no-untyped-call]
        for tensor in tensors_in(result):
            if _address(tensor) not in known:
                storage = tensor.untyped_storage()
                reference = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
                self._alive[_address(tensor)] = reference, storage.nbytes()
        self.peak_bytes = max(self.peak_bytes, sum(size for _, size in self._alive.values()))
        return result

    def leave(self, addresses: Iterable[int]) -> None:
        """The next unit has these: they are no longer this one's."""
        for address in addresses:
            self._alive.pop(address, None)


class UnitChain:
    """Runs the units of `description`, one at a time with real values flowing between them.

    The first pass by units of a small batch size also finds out what autograd keeps for the
    backward. Before the first pass as one stage, and before a larger size, as much memory is taken
    and given back: who finds it page by page seems slow, be it units that keep much, or whichever
    way of running them comes later, as each has gradients of its own.

    Args:
        keep: units stay in memory after a pass in which they ran apart.
        whole: what whole numbers of the inputs are.
        mark: called with the number of each unit that is about to run.
        device: what they run on.

    Attributes:
        saved_bytes: batch size -> bytes kept by each unit. What shares memory counts once, what
            crosses a cut with the unit before it, where that has a backward; parameters and buffers
            are not counted.
        made_bytes: batch size -> what each unit's forward, and the first part of a split backward,
            have made, at most at once; of the same passes, on the host.
        values: what the next unit takes.
    """

    def __init__(
        self,
        description: ModelDescription,
        seed: int = 0,
        *,
        keep: bool = True,
        whole: int = 0,
        mark: Callable[[int], None] = unmarked,
        device: ComputeDevice = HOST,
        hashes: bool = False,
    ) -> None:
        self._description, self._mark, self._device = description, mark, device
        self._hashes = hashes
        self._deviates = torch.randn(_DEVIATES, generator=torch.Generator().manual_seed(seed))
        self._inside: Tensor | None = None
        self._keep, self._whole_number = keep, whole
        self._state: dict[str, Tensor] = {}
        self._stages: dict[int, Stage] = {}
        self._whole: Stage | None = None
        self._batch, self._split, self._apart = 0, False, False
        self._touched = 0
        self.values: list[Tensor] = []
        self._targets: list[Tensor] = []
        self._gradients: list[Tensor | None] = []
        self.saved_bytes: dict[int, list[int]] = {}
        self.made_bytes: dict[int, dict[int, int]] = {}
        self._made: dict[int, _MadeValues] = {}  # from a unit's counted forward to its backward
        self._counted: set[int] = set()  # what crosses to the next unit and is counted already

    @property
    def unit_count(self) -> int:
        """How many units."""
        return len(self._description.units)

    def warm_up(self, batch: int, *, split: bool = False) -> None:
        """Run the first unit by itself, forward and back, without counting what it keeps."""
        self.begin(batch, split=split, apart=True)
        self.prepare(0)
        self._forward(0)
        if split:
            self.backward_inputs(0)
            self.backward_weights(0)
        else:
            self.backward(0)

    def begin(self, batch: int, *, split: bool = False, apart: bool = False) -> None:
        """Make inputs and targets for `batch` samples; forwards in order, then backwards follow.

        Args:
            split: the backwards will come in two parts.
            apart: each unit's backward will follow its forward at once, from made-up gradients.
        """
        self._batch, self._split, self._apart = batch, split, apart
        if apart and self._inside is None:
            self._inside = self._device.copy_in(self._deviates)
        if not apart:
            self._touch(batch)
        self._made = {}
        self._draw(batch)

    def begin_whole(self, batch: int) -> None:
        """Make the model as one stage, and inputs and targets for `batch` samples."""
        self._mark(WHOLE)
        if self._whole is None:
            self._whole = self._stage(0, self.unit_count)
        self._touch(batch)
        self._draw(batch)

    def forward_whole(self) -> None:
        """Run all units as one stage."""
        assert self._whole is not None
        self._whole.forward(_KEY, self.values, self._targets, weight=1.0)

    def backward_whole(self) -> None:
        """Run the backward of `forward_whole`."""
        assert self._whole is not None
        self._whole.backward(_KEY)

    def _touch(self, batch: int) -> None:
        """Have the kernel give the memory that passes with `batch` samples are expected to take."""
        if batch <= self._touched or not self.saved_bytes or not self._device.is_host:
            return
        self._touched, known = batch, max(self.saved_bytes)
        needed = _TOUCHED_PART * sum(self.saved_bytes[known]) * batch / known
        needed += sum(tensor.nbytes for tensor in self._state.values())  # another's gradients
        blocks = int(needed) // _TOUCHED_BLOCK_BYTES
        held = [torch.zeros(_TOUCHED_BLOCK_BYTES, dtype=torch.uint8) for _ in range(blocks)]
        held.clear()

    def _draw(self, batch: int) -> None:
        inputs, longest = self._description.crossing(0, "train"), self._description.longest
        copy_in, targets = self._device.copy_in, self._description.targets
        self.values = [copy_in(self._draw_value(value, batch)) for value in inputs]
        zeros = [torch.zeros(t.shape(batch, *longest), dtype=t.dtype) for t in targets]
        self._targets = [copy_in(target) for target in zeros]
        self._gradients = []

    def prepare(self, unit: int) -> None:
        """Make the unit's weights, if they are not there."""
        self._mark(unit)
        if unit in self._stages:
            return
        if self._apart and not self._keep:
            self._stages.clear()
            self._state.clear()
        self._stages[unit] = self._stage(unit, unit + 1)

    def _stage(self, first: int, end: int) -> Stage:
        """With gradients to add to, as all micro-batches of a round find them but the first."""
        names = self._description.state_names(first, end)
        state = {name: self._tensor(name) for name in names}
        stage = Stage(
            *(self._description, first, end, state),
            copy=False,
            device=self._device,
            hashes=self._hashes,
        )
        for parameter in stage.parameters().values():
            if parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter)
        return stage

    def forward(self, unit: int) -> None:
        """Run one unit's forward; the units must come in order."""
        self.prepare(unit)
        if not self._counts():
            self._forward(unit)
            return
        known = self.saved_bytes.setdefault(self._batch, [])
        if len(known) == unit:
            self._forward_counting(unit, known)
        else:
            self._forward(unit)

    def backward(self, unit: int) -> None:
        """Run one unit's backward; the units must come in reverse order, after all forwards."""
        self._mark(unit)
        self._gradients = self._stages[unit].backward(_KEY, self._gradients)

    def gradients(self, unit: int) -> list[Tensor | None]:
        """Of the unit's inputs, then of its parameters, after its backward."""
        parameters = self._stages[unit].parameters().values()
        return [*self._gradients, *(parameter.grad for parameter in parameters)]

    def backward_inputs(self, unit: int) -> None:
        """As `backward`, of a split pass: the first part."""
        self._mark(unit)
        made = self._made.pop(unit, None)
        with made or nullcontext():
            self._gradients = self._stages[unit].backward_inputs(_KEY, self._gradients)
        if made is not None:
            self.made_bytes.setdefault(self._batch, {})[unit] = made.peak_bytes

    def backward_weights(self, unit: int) -> None:
        """The second part; it must follow the unit's first at once."""
        self._stages[unit].backward_weights(_KEY)

    def forget(self) -> None:
        """Drop a pass that could not end, with all weights."""
        if len(self.saved_bytes.get(self._batch, ())) < self.unit_count:
            self.saved_bytes.pop(self._batch, None)
        self._stages.clear()
        self._state.clear()
        self._made = {}
        self._whole, self.values, self._targets, self._gradients = None, [], [], []
        self._device.release_cached()

    def _counts(self) -> bool:
        """Whether what is kept of the present batch size is known, or is to be."""
        known = self.saved_bytes
        return self._batch in known or max(known, default=0) < _COUNTED

    def _forward(self, unit: int) -> None:
        uses_targets = self._description.target_uses(unit, unit + 1, "train")
        targets = self._targets if uses_targets else []
        with self._made.get(unit) or nullcontext():
            self.values = self._stages[unit].forward(_KEY, self.values, targets, split=self._split)
        if self._apart:
            self._gradients = self._made_up_gradients(unit)

    def _made_up_gradients(self, unit: int) -> list[Tensor | None]:
        """As if they came from the next unit."""
        deviates = self._inside
        if unit == self.unit_count - 1 or deviates is None:
            return []
        return [
            torch.empty_like(value).copy_(_repeated(deviates, value.shape))
            if value.is_floating_point()
            else None
            for value in self.values
        ]

    def _forward_counting(self, unit: int, known: list[int]) -> None:
        """As `_forward`; adds what autograd keeps to `known`."""
        if unit == 0:
            self._counted = set()
        entering = {_address(value) for value in self.values} if unit else set()
        saved: dict[int, int] = {}
        if self._device.is_host:
            self._made[unit] = _MadeValues()
        with self._counting(saved):
            self._forward(unit)
        new = {address: size for address, size in saved.items() if address not in self._counted}
        known.append(sum(size for address, size in new.items() if address not in entering))
        if unit:
            keeper = unit if self._description.is_forward_only(unit - 1) else unit - 1
            known[keeper] += sum(size for address, size in new.items() if address in entering)
        leaving = {_address(value) for value in self.values}
        if unit in self._made:
            self._made[unit].leave(leaving - saved.keys())
        self._counted = leaving.intersection(self._counted.union(saved))

    @contextmanager
    def _counting(self, saved: dict[int, int]) -> Iterator[None]:
        """Collects the storages that autograd keeps: address -> bytes."""
        own = {_address(tensor) for tensor in self._state.values()}

        def keep(tensor: Tensor) -> Tensor:
            if _address(tensor) not in own:
                saved[_address(tensor)] = tensor.untyped_storage().nbytes()
            return tensor.detach()  # a result that holds its own graph is there for ever

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            yield

    def _tensor(self, name: str) -> Tensor:
        if name not in self._state:
            drawn = self._draw_state(self._description.tensors_by_name[name])
            self._state[name] = self._device.copy_in(drawn)
        return self._state[name]

    def _draw_state(self, tensor: TensorDescription) -> Tensor:
        """Matrices and filters by fan-in (He et al. 2015), vectors near 1, whole numbers 0."""
        made = torch.empty_strided(tensor.shape, tensor.strides, dtype=tensor.dtype)
        if not made.is_floating_point():
            return made.fill_(tensor.dtype == torch.bool)
        if made.dim() < 2:
            return made.copy_(1.0 + 0.1 * self._noise(tensor.shape))
        return made.copy_(self._noise(tensor.shape) * _he_deviation(tensor.shape))

    def _draw_value(self, value: ValueDescription, batch: int) -> Tensor:
        made = torch.full(
            value.shape(batch, *self._description.longest), self._whole_number, dtype=value.dtype
        )
        return made.copy_(self._noise(made.shape)) if made.is_floating_point() else made

    def _noise(self, shape: Sequence[int]) -> Tensor:
        return _repeated(self._deviates, shape)


def _repeated(deviates: Tensor, shape: Sequence[int]) -> Tensor:
    """Normal deviates: drawing them all takes seconds for a large model."""
    elements = math.prod(shape)
    repeated = deviates.repeat(elements // _DEVIATES + 1)
    return repeated[:elements].view(tuple(shape))


def _address(tensor: Tensor) -> int:
    """Of its memory: tensors that share memory have the same."""
    return tensor.untyped_storage().data_ptr()


def _he_deviation(shape: Sequence[int]) -> float:
    return math.sqrt(2 / max(1, math.prod(shape[1:])))
