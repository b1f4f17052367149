"""A stage's part of the optimizer: torch.optim over the parameters that live there.

torch's optimizers treat each parameter by itself, so the parts together do exactly what one
optimizer over the whole model would. Their state has names, parameter by parameter, so that it can
move to a stage that is cut elsewhere, into a replica or into a checkpoint.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from functools import lru_cache

import torch
from torch import Tensor

from p2ptrain.errors import InternalError
from p2ptrain.model.stage.optimizer_spec import OptimizerSpec

_SCALAR_DTYPE = torch.float32
"""Of counters such as Adam's "step", whatever the default dtype is on the device that counted."""


class StageOptimizer:
    """Updates a stage's parameters.

    Args:
        spec: the Job's optimizer.
        named_parameters: those of the stage, by their names in the model; frozen ones are skipped.
    """

    def __init__(
        self,
        spec: OptimizerSpec,
        named_parameters: Mapping[str, torch.nn.Parameter]
        | Iterable[tuple[str, torch.nn.Parameter]],
    ) -> None:
        named = dict(named_parameters)
        self._spec = spec
        self._parameters = {name: p for name, p in named.items() if p.requires_grad}
        trainable = list(self._parameters.values())
        self._optimizer = spec.build(trainable) if trainable else None

    @property
    def parameters(self) -> Mapping[str, torch.nn.Parameter]:
        """What is updated, by name."""
        return self._parameters

    def step(self, lr_factor: float = 1.0, names: Collection[str] | None = None) -> None:
        """Apply the gradients once, with the learning rate times `lr_factor`.

        A parameter whose gradient is None is left as it is.

        Args:
            names: of the parameters; None = all.
        """
        if self._optimizer is None:
            return
        (group,) = self._optimizer.param_groups
        group["lr"] = self._spec.lr * lr_factor
        every = group["params"]
        try:
            if names is not None:
                group["params"] = [self._parameters[name] for name in names]
            self._optimizer.step()
        finally:
            group["params"] = every

    def zero_grad(self, names: Collection[str] | None = None) -> None:
        """Set all gradients, or those of `names`, to None."""
        for name in self._parameters if names is None else names:
            self._parameters[name].grad = None

    def gradients(self) -> dict[str, Tensor | None]:
        """By parameter name; None where there is none."""
        return {name: parameter.grad for name, parameter in self._parameters.items()}

    @property
    def numbers(self) -> Mapping[str, object] | None:
        """By torch's names, the learning rate without a factor; None where nothing is trained."""
        if self._optimizer is None:
            return None
        return {**self._optimizer.param_groups[0], "lr": self._spec.lr}

    def tried(self, name: str, lr_factor: float, scale: float) -> tuple[Tensor, tuple[Tensor, ...]]:
        """What `step` would make of one parameter, and of its state: copies; nothing changes.

        Args:
            scale: of its gradient.
        """
        parameter = self._parameters[name]
        copy = torch.nn.Parameter(parameter.detach().clone())
        if parameter.grad is None or self._optimizer is None:
            return copy, ()
        copy.grad = parameter.grad.detach() * scale
        alone = self._spec.build([copy])
        alone.param_groups[0]["lr"] = self._spec.lr * lr_factor
        for slot, value in self._optimizer.state[parameter].items():
            alone.state[copy][slot] = value.clone() if isinstance(value, Tensor) else value
        alone.step()
        kept = alone.state[copy].values()
        return copy.detach(), tuple(value for value in kept if isinstance(value, Tensor))

    def state(self) -> dict[str, Tensor]:
        """ "<parameter>.<slot>" -> tensor, for the parameters that have been updated.

        The tensors are the optimizer's own: the next `step` changes them.
        """
        named: dict[str, Tensor] = {}
        if self._optimizer is not None:
            for name, parameter in self._parameters.items():
                kept = self._optimizer.state[parameter]
                for slot, is_shaped in state_slots(self._spec).items() if kept else ():
                    value = kept[slot]
                    named[f"{name}.{slot}"] = value if is_shaped else value.to(_SCALAR_DTYPE)
        return named

    def reserve(self) -> None:
        """See that the state which the next `step` creates will find memory.

        Raises:
            RuntimeError: torch's, where there is not enough.
        """
        if self._optimizer is not None:
            updated = [p for p in self._parameters.values() if p.grad is not None]
            new_bytes = sum(p.nbytes for p in updated if not self._optimizer.state.get(p))
            torch.empty(sum(state_slots(self._spec).values()) * new_bytes, dtype=torch.uint8)

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
        slots = state_slots(self._spec)
        for name, parameter in self._parameters.items():
            self._optimizer.state[parameter].clear()
            for slot in slots if any(f"{name}.{slot}" in state for slot in slots) else ():
                value = state[f"{name}.{slot}"].detach()
                self._optimizer.state[parameter][slot] = value.clone() if copy else value

    def _check(self, state: Mapping[str, Tensor]) -> None:
        expected = state_layout(self._spec, self._parameters)
        for name, tensor in state.items():
            if expected.get(name) != (tensor.dtype, tuple(tensor.shape)):
                raise InternalError(f"optimizer state {name!r} does not belong to this stage")
        for name in self._parameters:
            slots = [slot for slot in state_slots(self._spec) if f"{name}.{slot}" in state]
            if slots and len(slots) != len(state_slots(self._spec)):
                raise InternalError(f"optimizer state of {name!r} is incomplete: only {slots}")


@lru_cache
def state_slots(spec: OptimizerSpec) -> Mapping[str, bool]:
    """Names of what the optimizer keeps for a parameter -> whether it has the parameter's shape.

    Found by one update of a small parameter, so torch itself is the source.
    """
    parameter = torch.nn.Parameter(torch.zeros(2))
    parameter.grad = torch.zeros(2)
    optimizer = spec.build([parameter])
    optimizer.step()
    kept = optimizer.state[parameter].items()
    return {slot: value.dim() > 0 for slot, value in kept if isinstance(value, Tensor)}


def state_layout(
    spec: OptimizerSpec, parameters: Mapping[str, Tensor]
) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """ "<parameter>.<slot>" -> (dtype, shape) of everything `state()` may hold.

    `parameters` may be on the meta device: only dtype and shape are looked at.
    """
    return {
        f"{name}.{slot}": (p.dtype, tuple(p.shape)) if is_shaped else (_SCALAR_DTYPE, ())
        for name, p in parameters.items()
        for slot, is_shaped in state_slots(spec).items()
    }


def optimizer_state_ratio(spec: OptimizerSpec) -> float:
    """Optimizer bytes per parameter byte; counters of a few bytes a parameter are left out."""
    return float(sum(state_slots(spec).values()))
