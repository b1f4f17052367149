"""How torch's functions are called while a model is traced, so that the trace gets them right.

Some ask for values, which a trace has not. `nn.TransformerEncoder` and `nn.TransformerDecoder`
compare a mask's values with a causal one unless `is_causal` is given, and then call another kernel.
Hugging Face's models look at the values of `position_ids`, which may pack several sequences into a
row: where they only count upwards, attention takes the causal kernel, without a mask. A trace would
get a mask, and keys repeated for each head, whose gradients add up in another order. So numbers
that follow from no input are computed while tracing; what follows from others is decided as the
first samples have it (`value_decisions`).

What opaque operators do inside depends on values, or differs for large batches, so a trace of their
insides would be refused or fit one batch size. Each is traced as an operator of ours, which has a
rule for its result's shape and nothing else; in the graph it is ATen's again, and devices run that.
"""

from __future__ import annotations

import builtins
import contextlib
import math
import re
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, _ops, fx, nn
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.nn import functional
from torch.nn.modules import transformer
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes

from p2ptrain.model.graph.custom_operators import NAMESPACE, stand_in
from p2ptrain.model.graph.packed_sequences import PackedCalls
from p2ptrain.model.tracing.autograd_graph import storages, written_storages
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


_broadcast_shapes: Any = torch.broadcast_shapes

_PARTS = 16
"""Most views of each sample that a batch is divided into."""


@stand_in("cdist(Tensor x1, Tensor x2, float p=2.0, int? compute_mode=None) -> Tensor")
def _cdist(x1: Tensor, x2: Tensor, p: float = 2.0, compute_mode: int | None = None) -> Tensor:
    """(..., P, M) and (..., R, M) -> (..., P, R); torch computes otherwise where P or R > 25."""
    batch = _broadcast_shapes(x1.shape[:-2], x2.shape[:-2])
    return x1.new_empty((*batch, x1.shape[-2], x2.shape[-2]))


@stand_in("take_along_dim(Tensor self, Tensor indices, int? dim=None) -> Tensor")
def _take_along_dim(x: Tensor, indices: Tensor, dim: int | None = None) -> Tensor:
    """Shapes are broadcast but for `dim`, where the result is as long as `indices`."""
    if dim is None:
        return x.new_empty((indices.numel(),))
    dim %= x.dim()
    shape = list(_broadcast_shapes(_without(x, dim), _without(indices, dim)))
    return x.new_empty((*shape[:dim], indices.shape[dim], *shape[dim:]))


def _without(x: Tensor, dim: int) -> Sequence[int]:
    return (*x.shape[:dim], *x.shape[dim + 1 :])


_COMPUTE_MODES = {
    "use_mm_for_euclid_dist_if_necessary": None,
    "use_mm_for_euclid_dist": 1,
    "donot_use_mm_for_euclid_dist": 2,
}


def _call_cdist(
    x1: Tensor,
    x2: Tensor,
    p: float = 2.0,
    compute_mode: str = "use_mm_for_euclid_dist_if_necessary",
) -> Any:
    return _cdist(x1, x2, float(p), _COMPUTE_MODES[compute_mode])


@stand_in("chunk(Tensor self, int chunks, int dim=0) -> Tensor[]")
def _chunk(x: Tensor, chunks: int, dim: int = 0) -> list[Tensor]:
    """Equal parts along `dim`."""
    shape = list(x.shape)
    shape[dim] //= chunks
    return [x.new_empty(shape) for _ in range(chunks)]


def _call_chunk(x: Tensor, chunks: int, dim: int = 0) -> Any:
    """torch would fix the batch size where a batch of two views of each sample is divided."""
    parts = x.shape[dim] % chunks
    if isinstance(x.shape[dim], torch.SymInt) and statically_known_true(parts == 0):
        return tuple(_chunk(x, chunks, dim % x.dim()))
    return x.chunk(chunks, dim)


def _call_split(x: Tensor, split_size_or_sections: Any = None, dim: int = 0, **named: Any) -> Any:
    """The same, for parts as long as the batch."""
    part = named.get("split_size", split_size_or_sections)
    if isinstance(part, torch.SymInt):
        for parts in range(1, _PARTS + 1):
            if statically_known_true(part * parts == x.shape[dim]):
                return torch.split_with_sizes(x, [part] * parts, dim)
    return x.split(part, dim)  # type: ignore[no-untyped-call]


def _call_gaussian_nll_loss(
    input: Tensor,
    target: Tensor,
    var: Tensor | float,
    full: bool = False,
    eps: float = 1e-6,
    reduction: str = "mean",
) -> Tensor:
    """torch's, which looks for variances below zero only to refuse them."""
    var = var * torch.ones_like(input) if isinstance(var, float) else var
    if var.size() != input.size() and input.size()[:-1] == var.size():
        var = var.unsqueeze(-1)
    var = var.clone()
    with torch.no_grad():
        var.clamp_(min=eps)
    loss = 0.5 * (torch.log(var) + (input - target) ** 2 / var)
    if full:
        loss += 0.5 * math.log(2 * math.pi)
    return loss if reduction == "none" else loss.mean() if reduction == "mean" else loss.sum()


_INSTEAD: dict[object, Callable[..., Any]] = {
    torch.cdist: _call_cdist,
    torch.chunk: _call_chunk,
    Tensor.chunk: _call_chunk,
    torch.split: _call_split,
    Tensor.split: _call_split,
    functional.gaussian_nll_loss: _call_gaussian_nll_loss,
    torch.take_along_dim: _take_along_dim,
    Tensor.take_along_dim: _take_along_dim,
}


class StandIns(TorchFunctionMode):
    """Call ours where the model calls torch's."""

    def __init__(self) -> None:
        super().__init__()
        self._instead = {**_INSTEAD, **PackedCalls().instead}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._instead.get(func, func)(*args, **(kwargs or {}))


def aten_name(name: str | None) -> str | None:
    """The operator that devices run for a traced one.

    It is ATen's for one of ours, and for one that takes a generator the same without: devices draw
    by seeds of their own (`stage/random_operators.py`).
    """
    if name is not None and name.startswith(f"{NAMESPACE}."):
        return "aten." + name.removeprefix(f"{NAMESPACE}.")
    return name if name is None else _GENERATOR.sub(_without_generator, name)


_GENERATOR = re.compile(r"\.(?:(\w+)_)?generator$")


def _without_generator(overload: re.Match[str]) -> str:
    return "." + (overload[1] or "default")
