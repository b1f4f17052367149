"""A stage's part of the optimizer: torch.optim over the parameters that live there.

The optimizers of `optimizer_spec.NAMES` treat each parameter by itself, so the parts together do
exactly what one optimizer over the whole model would. Their state has names, parameter by
parameter, so that it can move to a stage that is cut elsewhere, into a replica or into a
checkpoint. What they keep is found by an update of a small parameter: torch itself is the source.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from functools import lru_cache

import torch
from torch import Tensor, nn

from p2ptrain.devices.interface import ComputeDevice
from p2ptrain.devices.processor import HOST
from p2ptrain.errors import InternalError, ProtocolError
from p2ptrain.model.graph.description import ModelDescription
from p2ptrain.model.stage.optimizer_form import AS_GIVEN, LOOPS, OptimizerSpec, PlainColumns, Value
from p2ptrain.model.stage.optimizer_spec import arguments_of, over

_SCALAR_DTYPE = torch.float32
"""Of counters such as Adam's "step", whatever the default dtype is on the device that counted."""

_SIZES = (2, 3, 5, 7)
"""Of the small parameter, so that it shows which of its dimensions a slot has."""

AVERAGE = "ema"
"""The slot of the average of a weight, which no optimizer of torch has."""

Layout = tuple[torch.dtype, tuple[int, ...]]


class StageOptimizer:
    """Updates a stage's parameters.

    Args:
        spec: the Job's optimizer.
        named_parameters: those of the stage, by their names in the model; frozen ones are skipped.
        group_of: the group of each trained parameter of the model; None = all are in the first.
        device: where the parameters are.
    """

    def __init__(
        self,
        spec: OptimizerSpec,
        named_parameters: Mapping[str, nn.Parameter] | Iterable[tuple[str, nn.Parameter]],
        group_of: Mapping[str, int] | None = None,
        device: ComputeDevice = HOST,
    ) -> None:
        named = dict(named_parameters)
        self._spec = spec
        self._device = device
        self._parameters = {name: p for name, p in named.items() if p.requires_grad}
        self._group_of = {n: group_of[n] if group_of else 0 for n in self._parameters}
        self._numbers = sorted({*self._group_of.values()})
        self._layouts = {
            n: slots_of(spec, self._group_of[n], p) for n, p in self._parameters.items()
        }
        self._averages: dict[str, Tensor] = {}
        self._optimizer: torch.optim.Optimizer | None = None
        if self._numbers:
            parts = [(spec.group(number), self._members(number)) for number in self._numbers]
            self._optimizer = over(spec, parts)

    @property
    def parameters(self) -> Mapping[str, nn.Parameter]:
        """What is updated, by name."""
        return self._parameters

    def step(self, changes: PlainColumns = AS_GIVEN, names: Collection[str] | None = None) -> None:
        """Apply the gradients once.

        A parameter whose gradient is None is left as it is.

        Args:
            changes: numbers that a schedule gives for this update.
            names: of the parameters; None = all.
        """
        optimizer = self._optimizer
        if optimizer is None:
            return
        groups = optimizer.param_groups
        for group, number in zip(groups, self._numbers, strict=True):
            group.update(self._spec.group(number, changes))
        every = [group["params"] for group in groups]
        try:
            if names is not None:
                for group, number in zip(groups, self._numbers, strict=True):
                    group["params"] = self._members(number, names)
                optimizer.param_groups = [group for group in groups if group["params"]]
            optimizer.step()
        finally:
            optimizer.param_groups = groups
            for group, parameters in zip(groups, every, strict=True):
                group["params"] = parameters
        if self._spec.ema is not None:
            self._average(self._parameters if names is None else names, 1 - self._spec.ema)

    @torch.no_grad()
    def _average(self, names: Collection[str], share: float) -> None:
        """As `AveragedModel` with `get_ema_multi_avg_fn`: the first update's weights are copied."""
        by_dtype: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
        for name in names:
            now = self._parameters[name].detach()
            if name not in self._averages:
                self._averages[name] = now.clone()
                continue
            averages, weights = by_dtype.setdefault(now.dtype, ([], []))
            averages.append(self._averages[name])
            weights.append(now)
        for averages, weights in by_dtype.values():
            torch._foreach_lerp_(averages, weights, share)

    def averages(self) -> Mapping[str, Tensor]:
        """Of the parameters that have been updated, where averages are kept; the tensors
        themselves."""
        return self._averages

    def skip(self) -> None:
        """An update that is skipped: only averages of the weights go on."""
        if self._optimizer is not None and self._spec.ema is not None:
            self._average(self._parameters, 1 - self._spec.ema)

    @torch.no_grad()
    def unscale(self, scale: float) -> None:
        """Divide the gradients by what their loss was multiplied with, a power of two."""
        given = [p.grad for p in self._parameters.values() if p.grad is not None]
        dense = [g if g.layout is torch.strided else g._values() for g in given]
        if dense:
            torch._foreach_mul_(dense, 1.0 / scale)

    def zero_grad(self, names: Collection[str] | None = None) -> None:
        """Set all gradients, or those of `names`, to None."""
        for name in self._parameters if names is None else names:
            self._parameters[name].grad = None

    def gradients(self) -> dict[str, Tensor | None]:
        """By parameter name; None where there is none."""
        return {name: parameter.grad for name, parameter in self._parameters.items()}

    @property
    def name(self) -> str:
        """Of torch's class."""
        return self._spec.name

    def numbers(self, changes: PlainColumns = AS_GIVEN) -> list[dict[str, Value]]:
        """Of every group that has parameters here."""
        return [self._spec.group(number, changes) for number in self._numbers]

    def tried(
        self, name: str, changes: PlainColumns, scale: float
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """What `step` would make of one parameter, and of its state: copies; nothing changes.

        Args:
            scale: of its gradient.
        """
        parameter = self._parameters[name]
        copy = nn.Parameter(parameter.detach().clone())
        if parameter.grad is None or self._optimizer is None:
            return copy, ()
        copy.grad = parameter.grad.detach() * scale
        alone = over(self._spec, [(self._spec.group(self._group_of[name], changes), [copy])])
        for slot, value in self._optimizer.state[parameter].items():
            alone.state[copy][slot] = value.clone() if isinstance(value, Tensor) else value
        alone.step()
        kept = alone.state[copy].values()
        return copy.detach(), tuple(value for value in kept if isinstance(value, Tensor))

    def state(self) -> dict[str, Tensor]:
        """ "<parameter>.<slot>" -> tensor, for the parameters that have been updated.

        The tensors are the optimizer's own: the next `step` changes them.
        """
        averages = {f"{name}.{AVERAGE}": tensor for name, tensor in self._averages.items()}
        return self.own_state() | averages

    def own_state(self) -> dict[str, Tensor]:
        """The same without the averages of the weights."""
        named: dict[str, Tensor] = {}
        if self._optimizer is not None:
            for name, parameter in self._parameters.items():
                kept = self._optimizer.state[parameter]
                for slot, (dtype, _) in self._layouts[name].items() if kept else ():
                    named[f"{name}.{slot}"] = kept[slot].to(dtype)
        return named

    def reserve(self) -> None:
        """See that the state which the next `step` creates will find memory.

        Raises:
            RuntimeError: torch's, where there is not enough.
        """
        if self._optimizer is not None:
            new = [
                name
                for name, p in self._parameters.items()
                if p.grad is not None and not self._optimizer.state.get(p)
            ]
            new_bytes = sum(layout_bytes(self._layouts[name]) for name in new)
            if self._spec.ema is not None:
                every = self._parameters.items()
                new_bytes += sum(p.nbytes for name, p in every if name not in self._averages)
            torch.empty(new_bytes, dtype=torch.uint8, device=self._device.place)

    def load_state(self, state: Mapping[str, Tensor], *, copy: bool = True) -> None:
        """Replace the whole state by what `state()` gave, here or elsewhere.

        Args:
            state: names to tensors; as many parameters as were updated.
            copy: False takes the tensors themselves: `step` writes to them.

        Raises:
            InternalError: a name, shape or dtype that does not belong here, or half of a
                parameter's slots. Nothing has been changed then.
        """
        self._check(state)
        if self._optimizer is None:
            return
        kept = ((name, state.get(f"{name}.{AVERAGE}")) for name in self._parameters)
        self._averages = {
            name: self._device.copy_in(tensor.detach().clone() if copy else tensor.detach())
            for name, tensor in kept
            if tensor is not None
        }
        parts = [(self._spec.group(number), self._members(number)) for number in self._numbers]
        self._optimizer = over(self._spec, parts)  # some have a state before their first update
        for name, parameter in self._parameters.items():
            for slot in self._layouts[name]:
                value = state.get(f"{name}.{slot}")
                if value is not None:
                    taken = value.detach().clone() if copy else value.detach()
                    if taken.dim() or slot in self._counters(name):
                        taken = self._device.copy_in(taken)
                    self._optimizer.state[parameter][slot] = taken

    def _counters(self, name: str) -> frozenset[str]:
        """Slots of one number that torch keeps on the parameter's device, not on the host."""
        if self._device.is_host:
            return frozenset()
        group = self._group_of[name]
        numbers = tuple((key, value) for key, value in self._spec.group(group).items())
        return _counters_inside(self._spec.name, numbers, self._device)

    def _members(self, number: int, names: Iterable[str] | None = None) -> list[nn.Parameter]:
        every = self._group_of if names is None else names
        return [self._parameters[name] for name in every if self._group_of[name] == number]

    def _check(self, state: Mapping[str, Tensor]) -> None:
        expected = state_layout(self._spec, self._parameters, self._group_of)
        for name, tensor in state.items():
            if expected.get(name) != (tensor.dtype, tuple(tensor.shape)):
                raise InternalError(f"optimizer state {name!r} does not belong to this stage")
        for name in self._parameters:
            slots = self._layouts[name]
            there = [slot for slot in slots if f"{name}.{slot}" in state]
            if there and len(there) != len(slots):
                raise InternalError(f"optimizer state of {name!r} is incomplete: only {there}")


def slots_of(spec: OptimizerSpec, group: int, parameter: Tensor) -> dict[str, Layout]:
    """What the optimizer keeps for a parameter: slot -> (dtype, shape).

    `parameter` may be on the meta device: only dtype and shape are looked at.
    """
    numbers = spec.group(group).items()
    deciding = tuple((k, v) for k, v in numbers if k == "momentum" or _is_switch(k, v))
    shape = tuple(parameter.shape)
    return {
        slot: (_SCALAR_DTYPE, ())
        if kept is None
        else (parameter.dtype, tuple(size if k else 1 for size, k in zip(shape, kept, strict=True)))
        for slot, kept in _slots(spec.name, deciding, len(shape)).items()
    }


def _is_switch(key: str, value: Value) -> bool:
    return isinstance(value, bool) and key not in LOOPS


@lru_cache(maxsize=256)
def _slots(
    name: str, deciding: tuple[tuple[str, Value], ...], dimensions: int
) -> Mapping[str, tuple[bool, ...] | None]:
    """By slot, which of the parameter's dimensions it has; None: it is a counter.

    Args:
        deciding: the group's numbers that decide on it; the others are torch's own.
    """
    sizes = tuple(_SIZES[k % len(_SIZES)] for k in range(max(dimensions, 1)))
    parameter = nn.Parameter(torch.zeros(sizes))
    parameter.grad = torch.zeros(sizes)
    numbers = {key: given.default for key, given in arguments_of(name).items()} | dict(deciding)
    spec = OptimizerSpec(name, {key: (value,) for key, value in numbers.items()})
    try:
        optimizer = over(spec, [(spec.group(0), [parameter])])
        optimizer.step()
    except (ValueError, RuntimeError) as error:
        raise ProtocolError(f"{name} cannot train a tensor of {dimensions} dimensions") from error
    kept = optimizer.state[parameter].items()
    return {
        slot: _dimensions(tuple(value.shape), sizes)[:dimensions] if value.dim() else None
        for slot, value in kept
        if isinstance(value, Tensor)
    }


@lru_cache(maxsize=64)
def _counters_inside(
    name: str, numbers: tuple[tuple[str, Value], ...], device: ComputeDevice
) -> frozenset[str]:
    """As `StageOptimizer._counters`, by an update of a small parameter."""
    parameter = nn.Parameter(device.copy_in(torch.zeros(2, 3)))
    parameter.grad = device.copy_in(torch.zeros(2, 3))
    spec = OptimizerSpec(name, {key: (value,) for key, value in numbers})
    optimizer = over(spec, [(spec.group(0), [parameter])])
    optimizer.step()
    kept = optimizer.state[parameter].items()
    return frozenset(
        slot for slot, value in kept if isinstance(value, Tensor) and value.device == device.place
    )


def _dimensions(shape: tuple[int, ...], sizes: tuple[int, ...]) -> tuple[bool, ...]:
    if len(shape) != len(sizes) or any(
        s not in (1, size) for s, size in zip(shape, sizes, strict=True)
    ):
        raise InternalError(f"an optimizer keeps {shape} of {sizes}")
    return tuple(s == size for s, size in zip(shape, sizes, strict=True))


def state_layout(
    spec: OptimizerSpec, parameters: Mapping[str, Tensor], group_of: Mapping[str, int] | None = None
) -> dict[str, Layout]:
    """ "<parameter>.<slot>" -> (dtype, shape) of everything `state()` may hold.

    Args:
        parameters: may be on the meta device: only dtype and shape are looked at.
        group_of: the group of each; None = all are in the first.
    """
    layouts = {
        f"{name}.{slot}": layout
        for name, p in parameters.items()
        for slot, layout in slots_of(spec, group_of[name] if group_of else 0, p).items()
    }
    if spec.ema is not None:
        layouts |= {f"{n}.{AVERAGE}": (p.dtype, tuple(p.shape)) for n, p in parameters.items()}
    return layouts


def layout_bytes(layout: Mapping[str, Layout]) -> int:
    """Of a state, without counters of a few bytes a parameter."""
    return sum(dtype.itemsize * math.prod(shape) for dtype, shape in layout.values() if shape)


def trained_parameters(description: ModelDescription) -> dict[str, Tensor]:
    """What an optimizer of the model updates, in its order, on the meta device."""
    return {
        tensor.name: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        for tensor in description.tensors
        if tensor.trainable
    }


def optimizer_state_ratio(spec: OptimizerSpec, trained: Mapping[str, Tensor]) -> float:
    """Optimizer bytes per byte of a trained parameter, over the whole model.

    Counters of a few bytes a parameter are left out.

    Args:
        trained: as `trained_parameters` gives them.
    """
    whole_bytes = sum(parameter.nbytes for parameter in trained.values())
    if not whole_bytes:
        return 0.0
    layout = state_layout(spec, trained, spec.group_of(list(trained)))
    return layout_bytes(layout) / whole_bytes
