"""How torch's functions are called while a model is traced, so that the trace gets them right.

Some ask for values, which a trace has not. `nn.TransformerEncoder` and `nn.TransformerDecoder`
compare a mask's values with a causal one unless `is_causal` is given, and then call another kernel.
Hugging Face's models look at the values of `position_ids`, which may pack several sequences into a
row: where they only count upwards, attention takes the causal kernel, without a mask. A trace would
get a mask, and keys repeated for each head, whose gradients add up in another order. So numbers
that follow from no input are computed while tracing; what follows from others is decided as the
first samples have it (`value_decisions`).
"""

from __future__ import annotations

import builtins
import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, _ops, fx, nn
from torch.nn.modules import transformer
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes

from p2ptrain.model.tracing.autograd_graph import storages, written_storages
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
            questions_answered(),
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


_modes: Any = _ops

_MODULE, _FUNCTION = "transformers.masking_utils", "find_packed_sequence_indices"


class _UnknownError(Exception):
    """A tensor's values follow from the data, from weights or from random numbers."""


@contextlib.contextmanager
def questions_answered() -> Iterator[None]:
    """For one trace, of transformers where it is loaded."""
    asked: list[tuple[Any, str]] = [(transformer, "_detect_is_causal_mask")]
    packing: Any = sys.modules.get(_MODULE)
    if hasattr(packing, _FUNCTION):
        asked.append((packing, _FUNCTION))
    with contextlib.ExitStack() as stack:
        for module, name in asked:
            answer = _answered(getattr(module, name))
            stack.enter_context(replaced_in_this_thread(module, name, answer))
        yield


def _answered(original: Callable[..., Any]) -> Callable[..., Any]:
    """Its answer for the values of its first argument, where they are known and it is no tensor."""

    def find(asked: Tensor | None, *args: Any, **kwargs: Any) -> Any:
        values = None if asked is None else _values(asked)
        if values is not None:
            sizes = [a.node.hint if isinstance(a, torch.SymInt) else a for a in args]
            with _disable_current_modes():
                answer = original(values, *sizes, **kwargs)
            if not isinstance(answer, Tensor):
                return answer
        return original(asked, *args, **kwargs)

    return find


def _values(tensor: Tensor) -> Tensor | None:
    """A traced tensor's values, for the number of samples traced with; None if unknown."""
    recorder = _modes.mode_stack_state_for_pre_dispatch().get(0)
    known = None if recorder is None else recorder.tracer.tensor_tracker.get(tensor)
    if known is None:
        return None
    node = known.proxy.node
    try:
        with _disable_current_modes():
            result = _computed(node, written_storages([node.graph]), {})
    except _UnknownError:
        return None
    return result if isinstance(result, Tensor) else None


def _computed(node: fx.Node, written: frozenset[int], done: dict[fx.Node, Any]) -> Any:
    """What `node` gives; raises `_UnknownError`. `written`: memory that something writes to."""
    value = node.meta.get("val")
    if isinstance(value, torch.SymInt):
        return value.node.hint
    if node not in done:
        target: Any = node.target
        if not isinstance(target, _ops.OpOverload) or not storages(value).isdisjoint(written):
            raise _UnknownError
        if torch.Tag.nondeterministic_seeded in target.tags:
            raise _UnknownError
        args, kwargs = fx.map_arg(
            (node.args, node.kwargs), lambda used: _computed(used, written, done)
        )
        done[node] = target(*args, **kwargs)
    return done[node]
