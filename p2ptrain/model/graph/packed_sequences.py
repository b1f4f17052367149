"""Sequences of different lengths, packed for recurrent layers (`torch.nn.utils.rnn`).

How long a packed sequence is depends on values, so torch.export looks into nothing of it: each
operator is traced as a stand-in that says so. Packed values never cross a cut, because their shape
is no polynomial of the batch; they are padded again, or only the last states are used, before the
next one. ATen's own operators trust the lengths and the weights that they get, so devices look at
them first.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from p2ptrain.model.graph.custom_operators import stand_in

_must_hold: Any = torch._check

_ELEMENTS = 1 << 38
"""Most elements of a padded sequence, as of any tensor that a model makes."""


@stand_in(
    "_pack_padded_sequence(Tensor input, Tensor lengths, bool batch_first) -> (Tensor, Tensor)"
)
def _pack(x: Tensor, lengths: Tensor, batch_first: bool) -> tuple[Tensor, Tensor]:
    """(batch, steps, ...) or (steps, batch, ...) -> (all steps, ...), (steps of the longest,)."""
    context = torch.library.get_ctx()
    rows, steps = context.new_dynamic_size(), context.new_dynamic_size()
    return x.new_empty((rows, *x.shape[2:])), lengths.new_empty((steps,))


@stand_in(
    "_pad_packed_sequence(Tensor data, Tensor batch_sizes, bool batch_first, Scalar padding_value,"
    " SymInt total_length) -> (Tensor, Tensor)"
)
def _pad(
    data: Tensor, batch_sizes: Tensor, batch_first: bool, padding_value: float, total_length: int
) -> tuple[Tensor, Tensor]:
    """The other direction; and the lengths."""
    batch = torch.library.get_ctx().new_dynamic_size()
    shape = (batch, total_length) if batch_first else (total_length, batch)
    return data.new_empty((*shape, *data.shape[1:])), batch_sizes.new_empty((batch,))


_SETTINGS = "bool has_biases, int num_layers, float dropout, bool train, bool bidirectional"


@stand_in(
    f"lstm.data(Tensor data, Tensor batch_sizes, Tensor[] hx, Tensor[] params, {_SETTINGS})"
    " -> (Tensor, Tensor, Tensor)"
)
def _lstm(
    data: Tensor, batch_sizes: Tensor, hx: list[Tensor], params: list[Tensor], *settings: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """(all steps, in) -> (all steps, directions * out), and both states."""
    return _results(data, hx[0], settings), torch.empty_like(hx[0]), torch.empty_like(hx[1])


def _simple(
    data: Tensor, batch_sizes: Tensor, hx: Tensor, params: list[Tensor], *settings: Any
) -> tuple[Tensor, Tensor]:
    """(all steps, in) -> (all steps, directions * out), and the state."""
    return _results(data, hx, settings), torch.empty_like(hx)


def _results(data: Tensor, state: Tensor, settings: tuple[Any, ...]) -> Tensor:
    return data.new_empty((data.shape[0], state.shape[-1] * (2 if settings[-1] else 1)))


_SIMPLE: dict[str, Callable[..., Any]] = {
    name: stand_in(
        f"{name}.data(Tensor data, Tensor batch_sizes, Tensor hx, Tensor[] params, {_SETTINGS})"
        " -> (Tensor, Tensor)"
    )(_simple)
    for name in ("gru", "rnn_tanh", "rnn_relu")
}


@stand_in(
    f"lstm.input(Tensor input, Tensor[] hx, Tensor[] params, {_SETTINGS}, bool batch_first)"
    " -> (Tensor, Tensor, Tensor)"
)
def _lstm_of_steps(
    x: Tensor, hx: list[Tensor], params: list[Tensor], *settings: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """(samples, steps, in), or steps first, -> the same with directions * out, and both states."""
    return _steps(x, hx[0], settings), torch.empty_like(hx[0]), torch.empty_like(hx[1])


def _simple_of_steps(
    x: Tensor, hx: Tensor, params: list[Tensor], *settings: Any
) -> tuple[Tensor, Tensor]:
    """(samples, steps, in), or steps first, -> the same with directions * out, and the state."""
    return _steps(x, hx, settings), torch.empty_like(hx)


def _steps(x: Tensor, state: Tensor, settings: tuple[Any, ...]) -> Tensor:
    return x.new_empty((*x.shape[:2], state.shape[-1] * (2 if settings[-2] else 1)))


_OF_STEPS: dict[str, Callable[..., Any]] = {
    name: stand_in(
        f"{name}.input(Tensor input, Tensor hx, Tensor[] params, {_SETTINGS}, bool batch_first)"
        " -> (Tensor, Tensor)"
    )(_simple_of_steps)
    for name in ("gru", "rnn_tanh", "rnn_relu")
}
"""Of any number of steps: torch's own rule takes a layer apart, step by step."""


class PackedCalls:
    """The stand-ins for calls of one forward(), which remember the batch sizes that they made."""

    def __init__(self) -> None:
        functions: Any = torch._C._VariableFunctions
        self._made: list[tuple[Tensor, Any]] = []
        self.instead: Mapping[object, Callable[..., Any]] = {
            functions._pack_padded_sequence: self._pack,
            functions._pad_packed_sequence: self._pad,
            Tensor.__getitem__: self._item,
            functions.lstm: self._recurrent(_lstm, _lstm_of_steps, functions.lstm),
            **{
                getattr(functions, name): self._recurrent(
                    _SIMPLE[name], of_steps, getattr(functions, name)
                )
                for name, of_steps in _OF_STEPS.items()
            },
        }

    def _pack(self, x: Tensor, lengths: Tensor, batch_first: bool) -> Any:
        data, batch_sizes = _pack(x, lengths, batch_first)
        _must_hold(batch_sizes.shape[0] <= x.shape[1 if batch_first else 0])
        self._made.append((batch_sizes, x.shape[0 if batch_first else 1]))
        return data, batch_sizes

    def _pad(
        self, data: Tensor, batch_sizes: Tensor, batch_first: bool, value: float, length: int
    ) -> Any:
        padded, lengths = _pad(data, batch_sizes, batch_first, value, length)
        for made, batch in self._made:
            if made is batch_sizes:
                _must_hold(padded.shape[0 if batch_first else 1] == batch)
        return padded, lengths

    def _item(self, x: Tensor, index: Any) -> Any:
        """The first of the batch sizes is all samples."""
        if type(index) is int and index == 0:
            for made, batch in self._made:
                if made is x:
                    return batch
        return x[index]

    def _recurrent(
        self, packed: Callable[..., Any], of_steps: Callable[..., Any], theirs: Any
    ) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if len(args) == 9 and isinstance(args[3], list | tuple):
                return packed(*args, **kwargs)
            is_plain = len(args) == 9 and args[0].dim() == 3
            if is_plain and isinstance(args[0].shape[1 if args[8] else 0], torch.SymInt):
                return of_steps(*args)
            return theirs(*args, **kwargs)

        return call


_made_up = threading.local()


@contextlib.contextmanager
def full_lengths(most: int | None = None) -> Iterator[None]:
    """In this thread every sequence is as long as it can be: samples are made up.

    Args:
        most: longest that any of them is, so that what a loss packs has as many rows as what the
            model has packed; None = as long as each can be.
    """
    _made_up.full, _made_up.most = True, most
    try:
        yield
    finally:
        _made_up.full, _made_up.most = False, None


@contextlib.contextmanager
def noted_steps() -> Iterator[set[int]]:
    """Of all sequences that this thread packs within, how long they can be."""
    _made_up.noted = noted = set[int]()
    try:
        yield noted
    finally:
        _made_up.noted = None


def full_length(steps: int) -> int:
    """How long a sequence of `steps` at most is made up to be."""
    noted, most = getattr(_made_up, "noted", None), getattr(_made_up, "most", None)
    if noted is not None:
        noted.add(steps)
    return steps if most is None else min(steps, most)


def are_made_up() -> bool:
    """Whether samples, and what is computed from them, are made up in this thread."""
    return bool(getattr(_made_up, "full", False))


def pack_padded_sequence(
    input: Tensor,
    lengths: Tensor,
    batch_first: bool,
) -> tuple[Tensor, Tensor]:
    """ATen's, for lengths that fit.

    Raises:
        IndexError: a length is below one or longer than the sequence.
    """
    steps = input.shape[1 if batch_first else 0]
    if are_made_up():
        lengths = torch.full_like(lengths, full_length(steps))
    if lengths.dim() != 1 or not lengths.numel() or not 1 <= int(lengths.min()) <= steps:
        raise IndexError("a packed sequence has no length")
    if int(lengths.max()) > steps:
        raise IndexError("a packed sequence is longer than what it is made of")
    result: tuple[Tensor, Tensor] = _aten("_pack_padded_sequence")(input, lengths, batch_first)
    return result


def pad_packed_sequence(
    data: Tensor, batch_sizes: Tensor, batch_first: bool, padding_value: float, total_length: int
) -> tuple[Tensor, Tensor]:
    """ATen's, for batch sizes that fit.

    Raises:
        IndexError: they do not ascend from one, or are not those of `data`.
    """
    sizes = batch_sizes.tolist()
    descending = all(after <= before for before, after in pairwise(sizes))
    if batch_sizes.dim() != 1 or not sizes or not descending or sizes[-1] < 1:
        raise IndexError("a packed sequence is malformed")
    if sum(sizes) != data.shape[0]:
        raise IndexError("a packed sequence has other batch sizes")
    if sizes[0] * total_length * data[0].numel() > _ELEMENTS:
        raise IndexError("a padded sequence would be too large")
    pad = _aten("_pad_packed_sequence")
    result: tuple[Tensor, Tensor] = pad(data, batch_sizes, batch_first, padding_value, total_length)
    return result


def checked_recurrent(name: str, gates: int, states: int, packed: bool) -> Callable[..., Any]:
    """ATen's, for weights of the layer's own sizes; IndexError: others."""
    computes = _of_its_states(name, states) if packed else getattr(torch.ops.aten, name).input

    def checked(x: Tensor, *args: Any) -> Any:
        hx, params = args[1:3] if packed else args[:2]
        biases, layers, _, _, both, *_ = args[3 if packed else 2 :]
        given = [*hx] if states > 1 else [hx]
        same = {x.dtype, *(s.dtype for s in given), *(p.dtype for p in params)}
        fits = len(given) == states and len(same) == 1 and x.is_floating_point()
        fits = fits and x.dim() == (2 if packed else 3) and all(s.dim() == 3 for s in given)
        if not fits or layers < 1 or len(params) != weight_count(hx, layers, biases, both):
            raise IndexError("a recurrent layer gets other weights than it has layers")
        directions, out, size = 2 if both else 1, given[0].shape[2], given[-1].shape[2]
        each = len(params) // (layers * directions)
        for place, weight in enumerate(params):
            layer, kind = place // (directions * each), place % each
            width = (x.shape[-1] if layer == 0 else out * directions) if kind == 0 else out
            wanted = (gates * size, width) if kind < 2 else (gates * size,)
            if out != size and kind == each - 1:
                wanted = (out, size)
            if tuple(weight.shape) != wanted:
                raise IndexError("a weight of a recurrent layer has another shape")
        batch = given[0].shape[1] if packed else x.shape[0 if args[-1] else 1]
        shapes = [(layers * directions, batch, width) for width in (out, size)]
        if any(tuple(s.shape) != shape for s, shape in zip(given, shapes, strict=False)):
            raise IndexError("a state of a recurrent layer has another shape")
        if not all((out, size, batch, *x.shape)):
            raise IndexError("a recurrent layer has nothing to compute with")
        return computes(x, *args)

    return checked


def weight_count(hx: Any, layers: int, biases: bool, both: bool) -> int:
    """Of a recurrent layer; one whose two states differ in size (`proj_size`) has one more each."""
    projected = not isinstance(hx, Tensor) and len({s.shape[-1] for s in hx}) > 1
    return layers * (2 if both else 1) * ((4 if biases else 2) + projected)


def _of_its_states(name: str, states: int) -> Callable[..., Any]:
    """ATen's, for a packed sequence whose samples are those of the state; IndexError: others."""
    computes = getattr(torch.ops.aten, name).data

    def checked(data: Tensor, batch_sizes: Tensor, hx: Any, *args: Any) -> Any:
        sizes = batch_sizes.tolist() if batch_sizes.dim() == 1 else []
        states_given = [*hx] if states > 1 else [hx]
        descending = all(after <= before for before, after in pairwise(sizes))
        fits = sizes and descending and sizes[-1] >= 1 and sum(sizes) == data.shape[0]
        fits = fits and batch_sizes.dtype == torch.int64 and len(states_given) == states
        if not fits or any(s.dim() != 3 or s.shape[1] != sizes[0] for s in states_given):
            raise IndexError("a recurrent layer gets other sequences than it has states for")
        return computes(data, batch_sizes, hx, *args)

    return checked


def _aten(name: str) -> Any:
    return getattr(torch.ops.aten, name).default


CHECKED: Mapping[str, Callable[..., Any]] = {
    "aten._pack_padded_sequence.default": pack_padded_sequence,
    "aten._pad_packed_sequence.default": pad_packed_sequence,
}
