"""The optimizer that a user gives: read as plain data, and never stepped.

It is one of torch.optim's objects over the model's parameters, or one of p2ptrain's forms of the
same name, which have one group of all of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from p2ptrain.errors import OptionError
from p2ptrain.model.stage.optimizer import Layout
from p2ptrain.model.stage.optimizer_form import GROUPS_LIMIT, OptimizerSpec, Value, plain_value
from p2ptrain.model.stage.optimizer_spec import (
    NAMES,
    arguments_of,
    check,
    over,
)

Optimizer: TypeAlias = OptimizerSpec | torch.optim.Optimizer

_INSTEAD = {
    "LBFGS": "it computes the loss several times for one update of all parameters together; the "
    "nearest that works is torch.optim.SGD(..., momentum=0.9) or torch.optim.Adam",
    "SparseAdam": "it is for sparse gradients, which are dense here; use torch.optim.Adam",
}

_SWITCHED_OFF = ("capturable", "differentiable")

_ALL = ", ".join(NAMES)


def check_optimizer(model: nn.Module, optimizer: object, loss: object = None) -> None:
    """Whether devices can do what it does.

    Raises:
        OptionError: says why not, and the nearest that works.
    """
    if isinstance(optimizer, OptimizerSpec):
        _check_shapes(optimizer, model)
        return
    if isinstance(optimizer, tuple | list):
        raise OptionError(
            f"Job: optimizer is a {type(optimizer).__name__} of {len(optimizer)}, and a job has "
            "one. Give it a group for each part; steps that alternate, as a GAN's, cannot be taken"
        )
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise OptionError(
            f"Job: optimizer must be a torch.optim object over the model's parameters, or "
            f"p2ptrain.SGD(...), Adam(...), AdamW(...), not {_shown(optimizer)}"
        )
    _check_class(optimizer)
    _check_groups(optimizer)
    _check_parameters(model, optimizer, loss)
    for number, group in enumerate(optimizer.param_groups):
        try:
            check(OptimizerSpec.of(type(optimizer).__name__, [_numbers(optimizer, group)], ()))
        except OptionError as error:
            why = str(error).removeprefix(f"p2ptrain.{type(optimizer).__name__}: ")
            raise OptionError(f"Job: optimizer, group {number}: {why}") from error


def group_numbers(optimizer: Optimizer) -> list[dict[str, Value]]:
    """The numbers of every group, as they are now."""
    if isinstance(optimizer, OptimizerSpec):
        return [optimizer.group(number) for number in range(optimizer.count)]
    return [_numbers(optimizer, group) for group in optimizer.param_groups]


@contextmanager
def untrained_frozen(model: nn.Module, optimizer: Optimizer) -> Iterator[list[str]]:
    """Meanwhile the model's parameters of no group are what they are to devices: frozen.

    Gives their names.
    """
    groups = _groups_by_parameter(optimizer)
    frozen = {
        name: parameter
        for name, parameter in model.named_parameters()
        if groups is not None and parameter.requires_grad and id(parameter) not in groups
    }
    for parameter in frozen.values():
        parameter.requires_grad_(False)
    try:
        yield list(frozen)
    finally:
        for parameter in frozen.values():
            parameter.requires_grad_(True)


def with_gradients(model: nn.Module) -> list[str]:
    """Names of trained parameters that have one already, and not of zeros."""
    named = ((name, p.grad) for name, p in model.named_parameters() if p.requires_grad)
    return [name for name, gradient in named if gradient is not None and bool(gradient.any())]


def optimizer_spec(
    model: nn.Module,
    optimizer: Optimizer,
    groups: list[dict[str, Value]],
    trained: Sequence[str],
) -> OptimizerSpec:
    """What travels of it.

    Args:
        groups: the numbers that training begins with.
        trained: names of the model's trained tensors, in the order of its description.
    """
    of_parameter = _groups_by_parameter(optimizer)
    if of_parameter is None:
        assert isinstance(optimizer, OptimizerSpec)
        return OptimizerSpec(optimizer.name, optimizer.columns)
    named = _by_name(model)
    members = [of_parameter[id(named[name])] for name in trained]
    return OptimizerSpec.of(type(optimizer).__name__, groups, members)


def optimizer_state(
    model: nn.Module, optimizer: Optimizer, layouts: Mapping[str, Mapping[str, Layout]]
) -> dict[str, Tensor]:
    """Copies of the state that it has from training before, by "<parameter>.<slot>".

    Args:
        layouts: by name of a trained parameter, what torch keeps of it.

    Raises:
        OptionError: it cannot be taken over as it is.
    """
    if isinstance(optimizer, OptimizerSpec):
        return {}
    named = _by_name(model)
    found: dict[str, Tensor] = {}
    for name, layout in layouts.items():
        kept: Mapping[str, Any] = optimizer.state.get(named[name], {})
        if not kept or _is_fresh(kept):
            continue
        for slot, (dtype, shape) in layout.items():
            value = kept.get(slot)
            fits = isinstance(value, Tensor) and tuple(value.shape) == shape
            if not isinstance(value, Tensor) or not fits or value.dtype is not dtype:
                raise OptionError(
                    f"Job: the optimizer's state of {name!r} cannot be taken over: its {slot!r} is "
                    f"not what torch.optim.{type(optimizer).__name__} keeps. Give a new optimizer"
                )
            found[f"{name}.{slot}"] = value.detach().cpu().clone()
    return found


def _is_fresh(kept: Mapping[str, Any]) -> bool:
    """Whether it is of before the first update, as Adagrad has it."""
    step = kept.get("step")
    return isinstance(step, Tensor) and not step.item()


def _groups_by_parameter(optimizer: Optimizer) -> dict[int, int] | None:
    """The group of each parameter, by its id; None: there is one group of all."""
    if isinstance(optimizer, OptimizerSpec):
        return None
    return {
        id(parameter): number
        for number, group in enumerate(optimizer.param_groups)
        for parameter in group["params"]
    }


def _by_name(model: nn.Module) -> dict[str, nn.Parameter]:
    return dict(model.named_parameters(remove_duplicate=False))


def _numbers(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> dict[str, Value]:
    numbers: dict[str, Any] = {}
    for key in arguments_of(type(optimizer).__name__):
        # torch.optim.Adagrad reads this one once, for all groups
        source = optimizer.defaults if key == "initial_accumulator_value" else group
        try:
            numbers[key] = plain_value(source.get(key))
        except ValueError:
            numbers[key] = source.get(key)
    return numbers


def _check_class(optimizer: torch.optim.Optimizer) -> None:
    cls = type(optimizer)
    name = cls.__name__
    if getattr(torch.optim, name, None) is not cls:
        near = next((c.__name__ for c in cls.__mro__ if _is_ours(c)), name if name in NAMES else "")
        advice = f"torch.optim.{near}" if near else "torch.optim.AdamW"
        raise OptionError(
            f"Job: optimizer is {cls.__module__}.{name}, which is none of torch.optim's: other "
            f"devices get an optimizer as a name and numbers, and no code of others. The nearest "
            f"that works is {advice}"
        )
    if name not in NAMES:
        why = _INSTEAD.get(name, "devices update each parameter by itself, which it does not do")
        raise OptionError(f"Job: optimizer is torch.optim.{name}: {why}. Taken are {_ALL}")
    patched = optimizer.__dict__.get("step")
    if patched is not None and not hasattr(patched, "_wrapped_by_lr_sched"):
        raise OptionError(
            "Job: the optimizer's step() was replaced by a function of yours, or of a library: "
            "devices use torch's own. Give the optimizer as torch made it"
        )
    hooks = (optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks)
    if any(hooks):
        raise OptionError(
            "Job: the optimizer has hooks on its step(), which is never called: each device makes "
            "its own. Remove them; clip_grad_norm and callbacks are the Job's"
        )


def _is_ours(cls: type) -> bool:
    return cls.__name__ in NAMES and getattr(torch.optim, cls.__name__, None) is cls


def _check_groups(optimizer: torch.optim.Optimizer) -> None:
    count = len(optimizer.param_groups)
    if count > GROUPS_LIMIT:
        raise OptionError(f"Job: optimizer has {count} groups, of at most {GROUPS_LIMIT}")
    for number, group in enumerate(optimizer.param_groups):
        where = f"Job: optimizer, group {number}"
        for key in _SWITCHED_OFF:
            if group.get(key):
                raise OptionError(
                    f"{where}: {key}=True is for captured graphs and gradients of the "
                    f"optimizer itself, which devices do not make: leave it out"
                )
        for key, value in group.items():
            items = value if isinstance(value, (tuple, list)) and key != "params" else (value,)
            if any(isinstance(item, Tensor) for item in items):
                raise OptionError(
                    f"{where}: {key} is a tensor: give a number, {key}=float(...), which a "
                    "scheduler may change too"
                )


def _check_parameters(model: nn.Module, optimizer: torch.optim.Optimizer, loss: object) -> None:
    """Raises OptionError: one is none of the model's, or none is trained."""
    own = {id(parameter): name for name, parameter in _by_name(model).items()}
    losses = {id(p): n for n, p in loss.named_parameters()} if isinstance(loss, nn.Module) else {}
    is_trained = False
    for number, group in enumerate(optimizer.param_groups):
        for place, parameter in enumerate(group["params"]):
            if (name := losses.get(id(parameter))) is not None and id(parameter) not in own:
                raise OptionError(
                    f"Job: optimizer, group {number}: {name} is the loss's own. What is trained is "
                    "the model's: put the loss into the model, as a module whose forward computes "
                    "it from the batch, and give loss=None"
                )
            if id(parameter) not in own:
                raise OptionError(
                    f"Job: optimizer, group {number}: parameter {place} of shape "
                    f"{tuple(parameter.shape)} is none of the model's. Make the optimizer from "
                    "model.parameters() of the model that the Job gets, after whatever wraps, "
                    "copies or replaces it"
                )
            is_trained |= parameter.requires_grad
    if not is_trained:
        raise OptionError(
            "Job: optimizer has no parameter of the model that requires a gradient: nothing would "
            "be trained"
        )


def _check_shapes(spec: OptimizerSpec, model: nn.Module) -> None:
    """Raises OptionError: its class does not take a parameter's shape."""
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    try:
        over(spec, [(spec.group(0), [_shape_of(p) for p in trained.values()])])
    except ValueError as error:
        raise OptionError(
            f"Job: p2ptrain.{spec.name} is for all parameters of the model: {error}. Give the Job "
            f"torch.optim.{spec.name}(...) over those that it takes; the others are not trained"
        ) from error


def _shape_of(parameter: nn.Parameter) -> nn.Parameter:
    return nn.Parameter(torch.empty_like(parameter, device="meta"))


def _shown(value: object) -> str:
    if isinstance(value, type):
        return f"the class {value.__name__}: call it with the model's parameters"
    module = type(value).__module__.partition(".")[0]
    return f"{module}.{type(value).__name__}"
