"""Tensors of a twin: in memory of the processor, but not for torch, which takes them for "twin:0".

torch lets one backend per process be written in Python. Its tensors are wrappers; every operator on
one comes to `TwinTensor.__torch_dispatch__`, which computes on what is inside. As on CUDA, tensors
of different memories do not mix, and backwards run in a thread of autograd's own. That thread is
made by the first backward of a process if the backend is there by then: so import this where tests
are collected, not in a test.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from types import SimpleNamespace
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils import backend_registration

from tests.support.twin_copies import Span

PLACE = torch.device("cpu")  # replaced below

_SPACE = "tests.twin.space"
"""Under which a thread knows its twin; autograd's thread takes it over for each backward."""


class Misused(Exception):
    """No accelerator would have complained, and some would have computed nonsense."""


class Space(Protocol):
    """The memory of one twin, as its tensors see it."""

    name: str
    generator: torch.Generator

    def calls(self, operator: str) -> None:
        """An operator is about to run."""

    def fills(self) -> None:
        """It reads."""

    def changes(self, span: Span) -> None:
        """It writes there."""

    def waits(self, operator: str, shape: tuple[int, ...]) -> None:
        """The host wants its result at once."""

    def takes(self, nbytes: int, shape: tuple[int, ...]) -> Allocation:
        """New memory."""

    def gives_back(self, allocation: Allocation) -> None:
        """Nothing uses it any more."""

    def results(self, operator: str, results: Sequence[Tensor]) -> None:
        """What it has computed, which may be changed."""


class Allocation:
    """Memory of a space, until the last tensor that lies in it is gone."""

    def __init__(self, space: Space, nbytes: int, shape: tuple[int, ...]) -> None:
        self.space, self.nbytes, self.shape = space, nbytes, shape

    def __del__(self) -> None:
        self.space.gives_back(self)


def enter(space: Space) -> None:
    """This thread computes for that twin."""
    torch._C._stash_obj_in_tls(_SPACE, space)


def entered(what: str) -> Space:
    """The twin for which this thread computes."""
    if not torch._C._is_key_in_tls(_SPACE):
        raise Misused(f"{what} of a twin in a thread that computes for none")
    space: Space = torch._C._get_obj_in_tls(_SPACE)
    return space


class TwinTensor(Tensor):
    """A tensor in the memory of a twin.

    Attributes:
        inner: where its numbers are.
        allocation: what its memory is part of.
    """

    inner: Tensor
    allocation: Allocation

    @staticmethod
    def __new__(cls, inner: Tensor, allocation: Allocation) -> TwinTensor:
        made: TwinTensor = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            inner.shape,
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=PLACE,
        )
        made.inner, made.allocation = inner, allocation
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(
        cls,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Compute `func` on what is inside."""
        return _dispatched(func, args, dict(kwargs or {}))

    @property
    def data(self) -> Tensor:
        """As torch's."""
        return Tensor.data.__get__(self)  # type: ignore[attr-defined]

    @data.setter
    def data(self, new: Tensor) -> None:
        if not isinstance(new, TwinTensor):
            raise RuntimeError(f"incompatible tensor type: {new.device} for {self.device}")
        _become(self, new)
        self.inner, self.allocation = new.inner, new.allocation

    def data_ptr(self) -> int:
        """An address, good for comparing."""
        return self.inner.data_ptr()

    def untyped_storage(self) -> Any:
        """As much of it as is asked for without reading."""
        storage = self.inner.untyped_storage()
        return SimpleNamespace(
            data_ptr=storage.data_ptr, nbytes=storage.nbytes, _cdata=storage._cdata, device=PLACE
        )

    def numpy(self, *, force: bool = False) -> Any:
        """As CUDA's."""
        raise TypeError(
            f"can't convert {self.device} device type tensor to numpy. Use Tensor.cpu() to copy "
            "the tensor to host memory first."
        )

    def tolist(self) -> Any:
        """Waits."""
        return self.cpu().tolist()

    def __repr__(self) -> str:  # type: ignore[override]
        return f"TwinTensor({tuple(self.shape)}, {self.dtype}, of {self.allocation.space.name})"

    @property
    def span(self) -> Span:
        """The bytes that it has."""
        size, first = self.inner.itemsize, self.inner.storage_offset()
        pairs = zip(self.inner.shape, self.inner.stride(), strict=True)
        extent = 1 + sum((n - 1) * stride for n, stride in pairs) if self.inner.numel() else 0
        return Span(self.allocation, first * size, (first + extent) * size)


@dataclass(frozen=True, slots=True)
class _Form:
    """What an operator's schema says of it.

    Attributes:
        written: (position, name) of the arguments that it writes to.
        returned: for each result the argument that it is, or None.
        is_view: it computes nothing.
        draws: it draws random numbers; `takes_generator`: of a generator that may be given.
    """

    name: str
    written: tuple[tuple[int, str], ...]
    returned: tuple[tuple[int, str] | None, ...]
    is_view: bool
    draws: bool
    takes_generator: bool


_HIDDEN_WRITES = {
    "aten.native_batch_norm.default": ((3, "running_mean"), (4, "running_var")),
    "aten._batch_norm_with_update_functional.default": (),
}
_MIXES = {"aten.copy_.default", "aten._to_copy.default", "aten._copy_from.default"}
_HOST_INDICES = {
    "aten.index.Tensor",
    "aten._unsafe_index.Tensor",
    "aten.index_put_.default",
    "aten.index_put.default",
    "aten._index_put_impl_.default",
}
_UNFLAGGED = {
    torch.ops.aten._conj.default: torch.ops.aten.conj_physical.default,
    torch.ops.aten._neg_view.default: torch.ops.aten.neg.default,
}
"""Views that are a flag to torch, which nothing looks at here, below its dispatcher."""

_WAITS = {
    "aten._local_scalar_dense.default",
    "aten.equal.default",
    "aten.nonzero.default",
    "aten.masked_select.default",
    "aten._unique2.default",
    "aten.unique_dim.default",
    "aten.unique_consecutive.default",
}
"""Operators whose result, or its size, the host needs at once."""


@cache
def _form(func: Any) -> _Form:
    schema = func._schema
    numbered = list(enumerate(schema.arguments))
    written = [(k, a.name) for k, a in numbered if a.alias_info and a.alias_info.is_write]
    returned: list[tuple[int, str] | None] = []
    views = False
    for result in schema.returns:
        alias = result.alias_info
        views |= alias is not None and not alias.is_write
        same = [
            (k, a.name)
            for k, a in numbered
            if alias is not None and alias.is_write and a.alias_info == alias
        ]
        same = same or [
            (k, a.name)
            for k, a in numbered
            if alias is not None
            and alias.is_write
            and a.alias_info is not None
            and a.alias_info.before_set & alias.before_set
        ]
        returned.append(same[0] if same else None)
    name = str(func)
    return _Form(
        name,
        (*written, *_HIDDEN_WRITES.get(name, ())),
        tuple(returned),
        views and not written,
        torch.Tag.nondeterministic_seeded in func.tags,
        any(a.name == "generator" for a in schema.arguments),
    )


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)


def _inside(value: Any) -> Any:
    if isinstance(value, TwinTensor):
        return value.inner
    if isinstance(value, (list, tuple)):
        return type(value)(_inside(item) for item in value)
    return value


def _dispatched(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    form = _form(func)
    given = list(itertools.chain(_tensors(args), _tensors(kwargs)))
    own = [tensor for tensor in given if isinstance(tensor, TwinTensor)]
    space = own[0].allocation.space
    _refuse_mixture(form, given, space)
    leaves = kwargs.get("device") is not None and kwargs["device"].type != PLACE.type
    computes = not form.is_view and not (leaves and kwargs["device"].type == "meta")
    if computes:
        _begin(form, args, kwargs, own, space)
    if kwargs.get("device") is not None and not leaves:
        kwargs["device"] = torch.device("cpu")
    kwargs.pop("pin_memory", None)
    inner_kwargs = {name: _inside(value) for name, value in kwargs.items()}
    call = _UNFLAGGED.get(func, func)
    out = _drawing(call, form, space, _inside(tuple(args)), inner_kwargs)
    results = out if isinstance(out, tuple) else (out,)
    if computes:
        space.results(form.name, list(_tensors(results)))
    if leaves:
        return out
    known = {tensor.inner.untyped_storage()._cdata: tensor.allocation for tensor in own}
    wrapped: list[Any] = []
    same = form.returned if len(form.returned) == len(results) else (None,) * len(results)
    for result, argument in zip(results, same, strict=True):
        if argument is not None:
            wrapped.append(_argument(argument, args, kwargs))
        else:
            wrapped.append(_wrapped(result, space, known))
    for tensor in own:
        if tensor.shape != tensor.inner.shape or tensor.stride() != tensor.inner.stride():
            _reshape(tensor)
    return tuple(wrapped) if isinstance(out, tuple) else wrapped[0]


def _refuse_mixture(form: _Form, given: Sequence[Tensor], space: Space) -> None:
    for tensor in given:
        if isinstance(tensor, TwinTensor):
            if tensor.allocation.space is not space:
                raise RuntimeError(_mixture(form, space.name, tensor.allocation.space.name))
        elif tensor.dim() and form.name not in _MIXES and form.name not in _HOST_INDICES:
            raise RuntimeError(_mixture(form, space.name, str(tensor.device)))


def _mixture(form: _Form, one: str, other: str) -> str:
    return (
        "Expected all tensors to be on the same device, but found at least two devices, "
        f"{one} and {other}! (when checking the arguments of {form.name})"
    )


def _begin(
    form: _Form, args: Sequence[Any], kwargs: Mapping[str, Any], own: list[Any], space: Space
) -> None:
    if entered(f"{form.name} on a tensor {tuple(own[0].shape)}") is not space:
        raise Misused(f"{form.name} on a tensor of {space.name} in another device's thread")
    space.calls(form.name)
    space.fills()
    to_host = form.name == "aten._to_copy.default" and (
        kwargs.get("device") is not None and kwargs["device"].type == "cpu"
    )
    mixes = form.name == "aten.copy_.default" and not all(
        isinstance(tensor, TwinTensor) for tensor in args[:2]
    )
    if to_host or mixes or form.name in _WAITS:
        space.waits(form.name, tuple(own[0].shape))
    for argument in form.written:
        for tensor in _tensors(_argument(argument, args, kwargs)):
            if isinstance(tensor, TwinTensor):
                space.changes(tensor.span)


def _argument(argument: tuple[int, str], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    position, name = argument
    return args[position] if position < len(args) else kwargs.get(name)


def _drawing(
    func: Any, form: _Form, space: Space, args: Sequence[Any], kwargs: dict[str, Any]
) -> Any:
    """Random numbers are the twin's own, as an accelerator's are."""
    if not form.draws:
        return func(*args, **kwargs)
    if form.takes_generator and not any(isinstance(a, torch.Generator) for a in args):
        given = kwargs.get("generator")
        if given is not None:
            raise RuntimeError(f"Expected a {PLACE.type} generator, but found {given.device.type}")
        return func(*args, **{**kwargs, "generator": space.generator})
    before = torch.get_rng_state()
    torch.set_rng_state(space.generator.get_state())
    try:
        return func(*args, **kwargs)
    finally:
        space.generator.set_state(torch.get_rng_state())
        torch.set_rng_state(before)


def _wrapped(value: Any, space: Space, known: Mapping[int, Allocation]) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value)(_wrapped(item, space, known) for item in value)
    if not isinstance(value, Tensor) or value.device.type != "cpu":
        return value
    storage = value.untyped_storage()
    allocation = known.get(storage._cdata)
    if allocation is None:
        allocation = space.takes(storage.nbytes(), tuple(value.shape))
    return TwinTensor(value, allocation)


def _reshape(tensor: TwinTensor) -> None:
    """What torch knows of the wrapper becomes what is inside."""
    _become(tensor, TwinTensor(tensor.inner, tensor.allocation))


def _become(tensor: TwinTensor, new: TwinTensor) -> None:
    with torch._C._DisableTorchDispatch():
        Tensor.data.__set__(tensor, new)  # type: ignore[attr-defined]


def placed(inner: Tensor, space: Space) -> TwinTensor:
    """A tensor of the twin with this inside."""
    nbytes = inner.untyped_storage().nbytes()
    return TwinTensor(inner, space.takes(nbytes, tuple(inner.shape)))


def _factory(func: Any) -> Callable[..., Any]:
    form = _form(func)

    def make(*args: Any, **kwargs: Any) -> Any:
        kwargs = {name: value for name, value in kwargs.items() if value is not None}
        kwargs.pop("pin_memory", None)
        space = entered(form.name)
        space.calls(form.name)
        kwargs["device"] = torch.device("cpu")
        inner = _drawing(func, form, space, args, kwargs)
        return placed(inner, space)

    return make


def _copy_from(source: Any, target: Any, non_blocking: bool = False) -> Any:
    """Where torch makes a tensor of a Python number."""
    target.inner.copy_(_inside(source))
    return target


_FACTORIES = (
    *("empty.memory_format", "empty_strided", "arange", "arange.start", "arange.start_step"),
    *("linspace", "eye", "eye.m", "randperm", "randint", "randint.low", "full", "zeros", "ones"),
)


class _Hook(torch._C._acc.PrivateUse1Hooks):
    def is_available(self) -> bool:
        return False  # nobody shall choose it

    def has_primary_context(self, dev_id: int) -> bool:
        return False

    def is_built(self) -> bool:
        return True


class _Module(backend_registration._DummyBackendModule):
    def is_available(self) -> bool:
        return False

    def device_count(self) -> int:
        return 0


def _register() -> torch.library.Library:
    backend_registration._setup_privateuseone_for_python_backend(
        "twin", backend_module=_Module(), hook=_Hook()
    )
    library = torch.library.Library("aten", "IMPL")
    for name in _FACTORIES:
        operator, _, overload = name.partition(".")
        func = getattr(getattr(torch.ops.aten, operator), overload or "default")
        library.impl(name, _factory(func), "PrivateUse1")
    library.impl("_copy_from", _copy_from, "PrivateUse1")
    return library


_LIBRARY = _register()
PLACE = torch.device("twin", 0)
