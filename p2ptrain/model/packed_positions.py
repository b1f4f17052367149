"""Whether transformers' position numbers pack several sequences into a row, answered while tracing.

Its models look at the values of `position_ids`: where they only count upwards, attention takes the
causal kernel, without a mask. A trace has no values, so it would get a mask and keys repeated for
each head, whose gradients add up in another order. Numbers that follow from no input are computed.
Seen with transformers 5.23.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, _ops, fx
from torch.utils._python_dispatch import _disable_current_modes

from p2ptrain.model.replaced import replaced_in_this_thread
from p2ptrain.model.translate import storages, written_storages

_modes: Any = _ops
_MODULE, _FUNCTION = "transformers.masking_utils", "find_packed_sequence_indices"


class _UnknownError(Exception):
    """A tensor's values follow from the data, from weights or from random numbers."""


@contextlib.contextmanager
def positions_as_counted() -> Iterator[None]:
    """For one trace, where transformers is loaded."""
    module: Any = sys.modules.get(_MODULE)
    original: Callable[[Tensor], Any] | None = getattr(module, _FUNCTION, None)
    if original is None:
        yield
        return

    def find(position_ids: Tensor) -> Any:
        values = _values(position_ids)
        if values is not None:
            with _disable_current_modes():
                if original(values) is None:
                    return None
        return original(position_ids)

    with replaced_in_this_thread(module, _FUNCTION, find):
        yield


def _values(tensor: Tensor) -> Tensor | None:
    """Those of a traced tensor, for the number of samples traced with; None: nobody knows them."""
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
