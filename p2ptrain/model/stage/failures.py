"""Why a stage could not compute: values that are no longer finite, or an error of torch's."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from p2ptrain.devices.interface import ComputeDevice
from p2ptrain.devices.processor import HOST
from p2ptrain.model.graph.checked_operators import UNLIKE
from p2ptrain.model.graph.description import ModelDescription
from p2ptrain.model.graph.values import ValueDescription
from p2ptrain.model.stage.program import Program, Seed
from p2ptrain.process.memory_budget import is_out_of_memory


@dataclass(frozen=True, slots=True)
class NonFiniteUnit:
    """What was found.

    Attributes:
        unit: index of the first unit with a result that is not finite; None where the units'
            inputs already were not.
        parameters: whether a parameter of that unit (of any here, where `unit` is None) is not
            finite, so that an earlier update is to blame.
    """

    unit: int | None
    parameters: bool


def find_non_finite(
    description: ModelDescription,
    units: range,
    state: Mapping[str, Tensor],
    inputs: Sequence[Tensor],
    targets: Sequence[Tensor],
    seed: Seed,
    device: ComputeDevice = HOST,
    *,
    hashes: bool = False,
) -> NonFiniteUnit | None:
    """Run `units` one by one without gradients; None where all that crosses is finite.

    All tensors are on `device`; `hashes` as `Program` has it. Buffers are copied first, so that
    running statistics do not move.
    """
    private = {n: t if isinstance(t, nn.Parameter) else t.clone() for n, t in state.items()}
    values = list(inputs)
    if not all_finite(description.crossing(units.start, "train"), values):
        return NonFiniteUnit(None, _any_broken(private.values()))
    for unit in units:
        program = Program(
            description, unit, unit + 1, "train", private, device=device, hashes=hashes
        )
        needed = targets if description.target_uses(unit, unit + 1, "train") else ()
        with torch.no_grad():
            values = program.run(values, needed, seed)
        if not all_finite(program.outputs, values):
            names = description.state_names(unit, unit + 1)
            return NonFiniteUnit(unit, _any_broken(private[name] for name in names))
    return None


def all_finite(described: Sequence[ValueDescription], values: Sequence[Tensor]) -> bool:
    """An infinity counts only where gradients flow: attention masks are made of them."""
    for value, tensor in zip(described, values, strict=True):
        if not tensor.is_floating_point():
            continue
        if tensor.isnan().any() or (value.may_require_grad and not tensor.isfinite().all()):
            return False
    return True


def _any_broken(tensors: Iterable[Tensor]) -> bool:
    """Whether a parameter among them is not finite."""
    return any(isinstance(t, nn.Parameter) and not bool(t.isfinite().all()) for t in tensors)


OPERATORS_RAISE = (IndexError, RuntimeError, ValueError)


def of_samples(error: Exception, advice: str) -> str:
    """Why samples cannot be computed; `advice` where the error gives none."""
    why = first_line(error).rstrip(".")
    return why if why.startswith(UNLIKE) else f"{why}. {advice}"


def failing_unit(error: BaseException) -> str | None:
    """The unit whose forward raised it (`model.program` notes its name); None: something else did.

    Where memory was short it is no unit's fault.
    """
    if is_out_of_memory(error):
        return None
    return next(iter(getattr(error, "__notes__", ())), None)


def first_line(error: BaseException) -> str:
    """Torch explains itself at length behind it."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def failure_text(error: BaseException) -> str:
    """Of a model that fails as it does in plain torch."""
    unit = failing_unit(error)
    where = "its backward" if unit is None else f"layer {unit}"
    return f"the model fails in {where}: {first_line(error)}"
