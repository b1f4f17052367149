"""What forward() and the loss change besides tensors that a trace follows.

Buffers that forward() assigns to (`self.ema = ...`) are written back, `x.data` is followed, and
tensors in plain attributes get back what a trace has overwritten.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode

from p2ptrain.errors import CaptureError
from p2ptrain.model.tracing.autograd_graph import kept_memory, recorder, storage_of
from p2ptrain.model.tracing.python_state import PythonState, joined_path

_COPIED_BYTES = 256 * 2**20
"""Tensors outside buffers are copied, to be put back, up to this size: more may be a data set."""

_READ: Any = Tensor.data.__get__  # type: ignore[attr-defined]

_WRITE: Any = Tensor.data.__set__  # type: ignore[attr-defined]


class HeldTensors:
    """Tensors that module and loss keep beside parameters and buffers, as they were before.

    A trace writes to them, and what it writes is no number.
    """

    def __init__(self, module: nn.Module, kept: PythonState) -> None:
        """Note them; to be called before tensors of `module` are replaced by a trace's.

        Args:
            module: its parameters and buffers are followed.
            kept: by the user's module and loss.

        Raises:
            CaptureError: they keep a sparse tensor.
        """
        registered = {id(t) for t in (*module.parameters(), *module.buffers())}
        tensors = ((path, t) for path, *_, t in kept.values() if isinstance(t, Tensor))
        held = [(path, tensor) for path, tensor in tensors if id(tensor) not in registered]
        for path, tensor in held:
            _refuse_sparse(path, tensor)
        self._values = {
            id(t): (t, t.detach().clone()) for _, t in held if t.nbytes <= _COPIED_BYTES
        }

    def put_back(self) -> None:
        """Give them their values again."""
        with torch.no_grad():
            for tensor, value in self._values.values():
                if tensor._version:
                    tensor.copy_(value)


class DataAsDetached(TorchFunctionMode):
    """`x.data` as `x.detach()`, `x.data = y` as a copy into x: a trace loses sight of the first."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == _READ:
            return args[0].detach()
        if func == _WRITE and _alike(*args):
            with torch.no_grad():
                return args[0].copy_(args[1])
        return func(*args, **(kwargs or {}))


def _alike(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype


def refuse_unready(module: nn.Module) -> None:
    """CaptureError where a tensor of `module` has no shape or no values yet, or is sparse."""
    tensors = (*module.named_parameters(), *module.named_buffers())
    for name, tensor in tensors:
        if is_lazy(tensor):
            raise CaptureError(
                f"{name!r} has no shape yet (a lazy module). Run the model once on a batch before"
            )
        if tensor.is_meta:
            raise CaptureError(
                f"{name!r} has a shape but no values: it is on the meta device. Give it some: "
                'model.to_empty(device="cpu"), then initialise its layers or load a state_dict. '
                "A model that only lends its architecture to torch.func belongs in no module: "
                'self.__dict__["shape"] = model'
            )
        _refuse_sparse(name, tensor)


def _refuse_sparse(path: str, tensor: Tensor) -> None:
    if tensor.layout is not torch.strided:
        raise CaptureError(f"{path!r} is sparse, which cannot travel. Use tensor.to_dense()")


class KeptBuffersError(Exception):
    """forward() replaces buffers of which the backward needs what was there before."""

    def __init__(self, paths: frozenset[str]) -> None:
        super().__init__(f"the backward needs {sorted(paths)} as they were")
        self.paths = paths


class ReassignedBuffers:
    """Buffers as they were before forward(), to find those that it reassigned."""

    def __init__(self, held: PythonState, copied: Collection[str]) -> None:
        """`copied`: paths of those of which forward() is given a copy."""
        self._copied = copied
        self._before = [
            (path, owner, name, tensor)
            for path, owner in held.modules()
            for name, tensor in owner._buffers.items()
            if tensor is not None
        ]
        for path, owner, name, tensor in self._before:
            if joined_path(path, name) in copied:
                owner._buffers[name] = tensor.clone()

    def check(self, loss: Tensor) -> None:
        """Look whether the backward of `loss` needs what was there before, while it is traced.

        Raises:
            KeptBuffersError: the buffers of which it does.
            CaptureError: it does, and a copy was not enough.
        """
        if recorder() is None:
            return
        assigned = [b for b in self._before if b[1]._buffers.get(b[2]) is not b[3]]
        kept = kept_memory(loss) if assigned else frozenset[int]()
        paths = frozenset(
            joined_path(p, name) for p, _, name, b in assigned if storage_of(b) in kept
        )
        for path in sorted(paths.intersection(self._copied)):
            raise CaptureError(
                f"forward() replaces the buffer {path!r} after it has computed with it, and the "
                "backward needs what was there before. Compute with a copy: buffer.clone()"
            )
        if paths:
            raise KeptBuffersError(paths)

    def write_back(self) -> None:
        """Write what was assigned into the buffers themselves, as part of the graph.

        What has another shape or type is no value of theirs: nothing may compute with it.
        """
        for _, owner, name, before in self._before:
            after = owner._buffers.get(name)
            if after is before:
                continue
            if after is not None and _alike(after, before):
                with torch.no_grad():
                    before.copy_(after)
            owner._buffers[name] = before
