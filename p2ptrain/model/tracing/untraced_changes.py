"""What forward() and the loss change besides tensors that a trace follows.

Tensors that the module keeps outside its buffers and that forward() replaces, parameters that it
replaces, and random numbers that do not come from torch would stay as they were: training would
silently differ from plain torch. So they are refused, unless nothing is computed with them. Buffers
that forward() assigns to (`self.ema = ...`) are written back instead.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.export.graph_signature import InputKind
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode

from p2ptrain.errors import CaptureError
from p2ptrain.model.tracing.autograd_graph import kept_memory, storage_of
from p2ptrain.model.tracing.derivatives import recorder
from p2ptrain.model.tracing.python_state import PythonState, current, joined_path

_COPIED_BYTES = 256 * 2**20
"""Tensors outside buffers are copied, to be put back, up to this size: more may be a data set."""

_READ: Any = Tensor.data.__get__  # type: ignore[attr-defined]

_WRITE: Any = Tensor.data.__set__  # type: ignore[attr-defined]


class UntracedChanges:
    """What a module keeps where a trace does not look, as it was before."""

    def __init__(self, module: nn.Module, roots: Mapping[str, object]) -> None:
        """Note it; to be called before tensors of `module` are replaced by a trace's.

        Args:
            module: what is traced. Its parameters and buffers are followed.
            roots: the user's module and loss, by the name that paths begin with.

        Raises:
            CaptureError: they keep a sparse tensor.
        """
        self._held = list(_held_tensors(module, roots))
        for path, _, _, tensor in self._held:
            _refuse_sparse(path, tensor)
        self._values = {
            id(t): (t, t.detach().clone()) for *_, t in self._held if t.nbytes <= _COPIED_BYTES
        }
        self._versions = {id(t): t._version for *_, t in self._held}
        self.replaced: dict[str, Tensor] = {}

    def begin(self, held: PythonState) -> None:
        """forward() begins, with what is held then."""
        self._now = held
        self._parameters = dict(_parameters(held))
        self._random = _random_states(held)

    def end(self) -> None:
        """forward() is over: look what it has changed.

        Raises:
            CaptureError: it drew random numbers or replaced a parameter.
        """
        if _random_states(self._now) != self._random:
            raise CaptureError(
                "forward() or the loss draws random numbers of Python's or NumPy's, which would be "
                "the same for every batch. Take torch's, such as torch.rand(()), and torch.where "
                "instead of `if`"
            )
        for path, parameter in _parameters(self._now):
            if self._parameters.get(path, parameter) is not parameter:
                raise CaptureError(
                    f"forward() or the loss puts another parameter in place of {path!r}, which no "
                    "optimizer would know. Write into it: with torch.no_grad(): "
                    "parameter.copy_(value)"
                )
        self.replaced = {
            path: before
            for path, holder, key, before in self._held
            if current(holder, key) is not before
        }

    def put_back(self) -> None:
        """Give tensors in plain attributes their values again: a trace writes to them."""
        with torch.no_grad():
            for tensor, value in self._values.values():
                if tensor._version:
                    tensor.copy_(value)

    def check(self, program: torch.export.ExportedProgram) -> None:
        """Refuse a program that computes with what forward() replaces.

        Raises:
            CaptureError: it does, or writes to a tensor that is too large to be put back.
        """
        for path, _, _, tensor in self._held:
            if id(tensor) not in self._values and tensor._version != self._versions[id(tensor)]:
                raise CaptureError(
                    f"forward() or the loss writes to the large tensor {path!r}. Keep it in a "
                    "buffer: self.register_buffer(name, tensor)"
                )
        used = {id(constant) for constant in _constants_used(program)}
        for path, before in self.replaced.items():
            if id(before) in used:
                raise CaptureError(
                    f"forward() or the loss computes with the tensor {path!r} and replaces it, "
                    "but devices get the model once. Keep it in a buffer: "
                    "self.register_buffer(name, tensor)"
                )


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


def uses_buffer(program: torch.export.ExportedProgram, path: str, buffer: Tensor) -> bool:
    """Whether `program` reads that buffer of the module or the loss."""
    placeholders = program.graph.find_nodes(op="placeholder")
    specs = zip(program.graph_signature.input_specs, placeholders, strict=True)
    return any(
        (
            spec.target in (f"module.{path}", path)
            or program.constants.get(str(spec.target)) is buffer
        )
        and node.users
        for spec, node in specs
    )


def _constants_used(program: torch.export.ExportedProgram) -> Iterator[object]:
    for spec in program.graph_signature.input_specs:
        if spec.kind is InputKind.CONSTANT_TENSOR:
            yield program.constants.get(str(spec.target))


def _parameters(held: PythonState) -> Iterator[tuple[str, nn.Parameter]]:
    for path, part in held.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None:
                yield joined_path(path, name), parameter


def _held_tensors(
    module: nn.Module, roots: Mapping[str, object]
) -> Iterator[tuple[str, Any, Any, Tensor]]:
    """(path, container, key, tensor) of tensors that are no parameters or buffers of `module`."""
    registered = {id(t) for t in (*module.parameters(), *module.buffers())}
    for path, holder, key, value in PythonState(roots).values():
        if isinstance(value, Tensor) and id(value) not in registered:
            yield path, holder, key, value


def _random_states(held: PythonState) -> list[str]:
    """Of Python's and NumPy's generators: the global ones and those that are held."""
    numpy = sys.modules.get("numpy")
    states = [repr(random.getstate())]
    if numpy is not None:
        states.append(repr(numpy.random.get_state()))
    others = (_random_state(value, numpy) for *_, value in held.values())
    return states + [state for state in others if state is not None]


def _random_state(value: object, numpy: Any) -> str | None:
    """None if it is no generator."""
    if isinstance(value, random.Random):
        return repr(value.getstate())
    if numpy is None:
        return None
    if isinstance(value, numpy.random.Generator):
        return repr(value.bit_generator.state)
    if isinstance(value, numpy.random.RandomState):
        return repr(value.get_state())
    return None


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

    def write_back(self) -> list[tuple[str, Tensor]]:
        """Write what was assigned into the buffers themselves, as part of the graph.

        Returns:
            Paths of those that got another shape or type, and what they keep.
        """
        regrown = []
        for path, owner, name, before in self._before:
            after = owner._buffers.get(name)
            if after is before:
                continue
            if after is None or after.shape != before.shape or after.dtype != before.dtype:
                regrown.append((joined_path(path, name), before))
            else:
                with torch.no_grad():
                    before.copy_(after)
            owner._buffers[name] = before
        return regrown
