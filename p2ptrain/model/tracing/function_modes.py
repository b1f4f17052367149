"""How torch's functions are called while a model is traced, so that the trace gets them right."""

from __future__ import annotations

import builtins
import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from p2ptrain.model.tracing.attention_masks import positions_as_counted
from p2ptrain.model.tracing.opaque_operators import StandIns
from p2ptrain.model.tracing.trace_patches import NoTensorHooks, replaced_in_this_thread
from p2ptrain.model.tracing.untraced_changes import DataAsDetached
from p2ptrain.model.tracing.value_decisions import ValueDecisions
from p2ptrain.model.tracing.vmap_autocast import mapped_and_cast_as_traced


@contextlib.contextmanager
def calls_as_traced(decisions: ValueDecisions) -> Iterator[None]:
    """All that stands between the model and torch, except for `reported_as_eager`."""
    modes = (
        NoTensorHooks(),
        _OutArguments(),
        _BatchLengths(),
        StandIns(),
        DataAsDetached(),
    )
    with contextlib.ExitStack() as stack:
        others = (
            mapped_and_cast_as_traced(),
            positions_as_counted(),
            _lengths_as_sizes(),
            *(
                replaced_in_this_thread(kind, "check_forward_args", _unless_packed(kind))
                for kind in (nn.RNNBase, nn.LSTM)
            ),
            decisions.answered(),
        )
        for mode in (*modes, *others):
            stack.enter_context(mode)
        yield


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


@contextlib.contextmanager
def _lengths_as_sizes() -> Iterator[None]:
    """`len(x)` of a batch as `x.shape[0]`; Python itself would make a plain number of it.

    So the name is given another meaning, in this thread. torch.compile, by which torch.cond looks
    at its branches, follows a call that begins as this one does.
    """
    thread = threading.get_ident()
    measure = builtins.len

    def length(value: Any, /) -> Any:
        if isinstance(value, Tensor) and _is_batch(value) and threading.get_ident() == thread:
            return value.shape[0]
        return measure(value)

    builtins.len = length
    try:
        yield
    finally:
        builtins.len = measure


def _unless_packed(kind: type[nn.RNNBase]) -> Callable[..., None]:
    """A recurrent layer does not compare its states with a packed batch's size."""
    original = kind.check_forward_args

    def check(self: Any, x: Tensor, hidden: Any, batch_sizes: Tensor | None) -> None:
        if batch_sizes is None:
            original(self, x, hidden, batch_sizes)

    return check


def _is_batch(x: Tensor) -> bool:
    """Whether the first size of `x` is one of a trace, that stands for many."""
    return x.dim() > 0 and isinstance(x.shape[0], torch.SymInt)


class _BatchLengths(TorchFunctionMode):
    """Find `for row in x` on a batch: it fixes its size, and export names no line."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        loops = func is Tensor.unbind and args[1:] in ((), (0,)) and not kwargs
        if (func is Tensor.__len__ or loops) and _is_batch(args[0]):
            raise BatchLength("the batch size is no plain number")
        return func(*args, **(kwargs or {}))


class BatchLength(TypeError):
    """The number of samples was asked for as a plain number."""
