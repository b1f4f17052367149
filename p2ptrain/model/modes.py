"""How torch's functions are called while a model is traced, so that the trace gets them right."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from p2ptrain.model.export_errors import BatchLength
from p2ptrain.model.packed import unchecked_states
from p2ptrain.model.stand_ins import StandIns
from p2ptrain.model.tracing import NoSwitchedParameters, NoTensorHooks
from p2ptrain.model.unseen import DataAsDetached


@contextlib.contextmanager
def calls_as_traced() -> Iterator[None]:
    """Everything here that stands between the model and torch, except for `told_eager`."""
    modes = (
        NoTensorHooks(),
        NoSwitchedParameters(),
        _OutArguments(),
        _BatchLengths(),
        StandIns(),
        DataAsDetached(),
    )
    with contextlib.ExitStack() as stack:
        for mode in (*modes, unchecked_states()):
            stack.enter_context(mode)
        yield


@contextlib.contextmanager
def told_eager() -> Iterator[None]:
    """`torch.compiler.is_exporting()` and `is_compiling()` say no."""
    compiler: Any = torch.compiler
    before = compiler._is_exporting_flag, compiler._is_compiling_flag
    compiler._is_exporting_flag = compiler._is_compiling_flag = False
    try:
        yield
    finally:
        compiler._is_exporting_flag, compiler._is_compiling_flag = before


class _OutArguments(TorchFunctionMode):
    """`f(x, out=buffer)` as `buffer.copy_(f(x))`: the same numbers, and the write is seen."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        out = kwargs.get("out")
        if not isinstance(out, Tensor):
            return func(*args, **kwargs)
        del kwargs["out"]
        with torch.no_grad():
            return out.copy_(func(*args, **kwargs))


class _BatchLengths(TorchFunctionMode):
    """Find `len(x)` and `for row in x` on a batch: they fix its size, and export names no line."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        loops = func is Tensor.unbind and args[1:] in ((), (0,)) and not kwargs
        if (
            (func is Tensor.__len__ or loops)
            and args[0].dim()
            and isinstance(args[0].shape[0], torch.SymInt)
        ):
            raise BatchLength("the batch size is no plain number")
        return func(*args, **(kwargs or {}))
