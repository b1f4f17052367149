"""Calls every operator that a received model may apply, with hostile arguments.

Each call takes the way that a node of a model takes on a device: its arguments against the schema
(`argument_types`), its sizes on tensors without memory (`result_sizes`), then the operator, and
sometimes its backward. Each tensor ends, or begins, at a page that may not be touched, so that
reading or writing beside it ends the process. Calls run in child processes, chunk by chunk; a chunk
is its seed and its number, so that a run can go on where it was, and a fault can be had again.

    python tools/fuzz_operators.py --calls 1000000 --seed 1
    python tools/fuzz_operators.py --seed 1 --first 37 --calls 2000      # chunk 37 again
    python tools/fuzz_operators.py --only aten.embedding_bag.default --calls 20000
"""

from __future__ import annotations

import argparse
import collections
import ctypes
import importlib
import json
import mmap
import os
import random
import resource
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from p2ptrain.errors import ProtocolError, TooLarge
from p2ptrain.model.graph import operators
from p2ptrain.model.graph.decoding import check_arguments
from p2ptrain.model.graph.nodes import GraphNode, InputRef
from p2ptrain.model.stage.instructions import call_of
from p2ptrain.model.stage.result_sizes import node_needs

CHUNK = 2_000
ALARM_SECONDS = 5
_WITH_OTHER_VALUES = 3
"""Times that a call which could be computed is made again: shapes take most of the time."""
MEMORY_BYTES = 64 << 20
WORK = 1e9
_MOST_GROWTH = 5
"""Times what a call was said to take: what is kept, the backward, and the C library's holes."""
_TOOK_MEMORY, _FOREIGN = 99, 98
_TOGETHER = 24
"""Operators of one chunk, so that what could be computed is found again."""
_PAGE = 4096
_SPACE_BYTES = 6 << 30

_TYPES = (
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
)
_WILD = (
    *(-1, -2, -3, 16, 100, 1000, -1000, 65_535, 65_536, 2**31 - 1, 2**31, -(2**31), 2**32, 2**40),
    *(2**62, 1 - 2**63, 2**63 - 1),
)
_TAME = (0, 1, 1, 1, 2, 2, 2, 3, 4, 5, 8, -1)
_FLOATS = (0.0, 1.0, -1.0, 0.5, 2.0, 1e-5, 1e18, -1e18, 1e300, -1e300, float("inf"), float("nan"))
_TEXTS = (
    *("none", "tanh", "mean", "sum", "prod", "max", "min", "amax", "amin", "floor", "trunc", "fro"),
    *("nuc", "linear", "reflect", "constant", "circular", "replicate", "xy", "ij", "L", "U", "r"),
    *("reduced", "complete", "ij->ji", "i,i->", "i,j->ij", "...i->i", "", "bilinear", "valid"),
    *("same", "left", "right", "ortho", "forward", "gesvd", "%99999999d", "x" * 500),
)
_ODD = (torch.channels_last, torch.channels_last_3d, torch.preserve_format, torch.strided)


@dataclass(frozen=True)
class Spec:
    """A tensor to be made."""

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    turned: int = 0
    learns: bool = False


def _f(*shape: int) -> Spec:
    return Spec(shape)


def _w(*shape: int) -> Spec:
    return Spec(shape, torch.int64)


_LSTM = ((_f(1, 2, 5), _f(1, 2, 5)), (_f(20, 4), _f(20, 5), _f(20), _f(20)))
_GRU = (_f(1, 2, 5), (_f(15, 4), _f(15, 5), _f(15), _f(15)))
_RNN = (_f(1, 2, 5), (_f(5, 4), _f(5, 5), _f(5), _f(5)))
_CELL = (_f(2, 5), _f(20, 4), _f(20, 5), _f(20), _f(20))
_HOW = (True, 1, 0.0, True, False)
_BAG = (_f(6, 4), _w(5), _w(3), False, 0, False, None, False)
_MAPS, _FILTERS = _f(2, 3, 6, 6), _f(4, 3, 3, 3)
_CONV = ((1, 1), (0, 0), (1, 1))
_FITTING: dict[str, tuple[Any, ...]] = {
    "lstm.input": (_f(3, 2, 4), *_LSTM, *_HOW, False),
    "gru.input": (_f(3, 2, 4), *_GRU, *_HOW, False),
    "rnn_tanh.input": (_f(3, 2, 4), *_RNN, *_HOW, False),
    "rnn_relu.input": (_f(3, 2, 4), *_RNN, *_HOW, False),
    "lstm.data": (_f(4, 4), _w(2), *_LSTM, *_HOW),
    "gru.data": (_f(4, 4), _w(2), *_GRU, *_HOW),
    "rnn_tanh.data": (_f(4, 4), _w(2), *_RNN, *_HOW),
    "rnn_relu.data": (_f(4, 4), _w(2), *_RNN, *_HOW),
    "lstm_cell.default": (_f(2, 4), (_f(2, 5), _f(2, 5)), *_CELL[1:]),
    "_pack_padded_sequence.default": (_f(2, 3, 4), _w(2), True),
    "_pad_packed_sequence.default": (_f(4, 4), _w(2), True, 0.0, 3),
    "embedding_bag.default": _BAG,
    "embedding_bag.padding_idx": (*_BAG, 1),
    "embedding.default": (_f(6, 4), _w(2, 3)),
    "_weight_norm.default": (_f(4, 3), _f(4, 1), 0),
    "convolution.default": (_MAPS, _FILTERS, _f(4), *_CONV, False, (0, 0), 1),
    "convolution_backward.default": (
        *(_f(2, 4, 4, 4), _MAPS, _FILTERS, (4,), *_CONV, False, (0, 0), 1, (True, True, True)),
    ),
    "conv2d.default": (_MAPS, _FILTERS, _f(4)),
    "conv_transpose2d.input": (_MAPS, _f(3, 4, 3, 3), _f(4)),
    "conv_tbc.default": (_f(5, 2, 3), _f(3, 3, 4), _f(4)),
    "batch_norm.default": (_MAPS, _f(3), _f(3), _f(3), _f(3), True, 0.1, 1e-5, False),
    "instance_norm.default": (_MAPS, _f(3), _f(3), _f(3), _f(3), True, 0.1, 1e-5, False),
    "group_norm.default": (_f(2, 4, 3), 2, _f(4), _f(4)),
    "native_group_norm.default": (_f(2, 4, 3), _f(4), _f(4), 2, 4, 3, 2, 1e-5),
    "layer_norm.default": (_f(2, 4), (4,), _f(4), _f(4)),
    "native_layer_norm.default": (_f(2, 4), (4,), _f(4), _f(4), 1e-5),
    "native_layer_norm_backward.default": (
        *(_f(2, 4), _f(2, 4), (4,), _f(2, 1), _f(2, 1), _f(4), _f(4), (True, True, True)),
    ),
    "_fused_rms_norm.default": (_f(2, 4), (4,), _f(4), 1e-5),
    "scaled_dot_product_attention.default": (_f(2, 2, 3, 4), _f(2, 2, 3, 4), _f(2, 2, 3, 4)),
    "max_unpool2d.default": (_f(2, 3, 2, 2), _w(2, 3, 2, 2), (4, 4)),
    "max_unpool3d.default": (
        *(_f(1, 2, 2, 2, 2), _w(1, 2, 2, 2, 2), (4, 4, 4), (2, 2, 2), (0, 0, 0)),
    ),
    "fractional_max_pool2d.default": (_f(2, 3, 6, 6), (2, 2), (3, 3), _f(2, 3, 2)),
    "grid_sampler_2d.default": (_f(2, 3, 4, 4), _f(2, 5, 5, 2), 0, 0, False),
    "grid_sampler_3d.default": (_f(1, 2, 3, 3, 3), _f(1, 4, 4, 4, 3), 0, 0, False),
    "grid_sampler.default": (_f(2, 3, 4, 4), _f(2, 5, 5, 2), 0, 0, False),
    "_upsample_bilinear2d_aa.default": (_MAPS, (4, 9), False, None, None),
    "_upsample_bicubic2d_aa.default": (_MAPS, (4, 9), False, None, None),
    "ctc_loss.Tensor": (_f(5, 2, 4), _w(2, 3), _w(2), _w(2), 0, 1, False),
    "ctc_loss.IntList": (_f(5, 2, 4), _w(2, 3), (5, 5), (3, 2), 0, 1, False),
    "nll_loss_forward.default": (_f(3, 5), _w(3), _f(5), 1, -100),
    "nll_loss_backward.default": (_f(), _f(3, 5), _w(3), _f(5), 1, -100, _f()),
    "nll_loss2d_forward.default": (_f(2, 5, 3, 3), _w(2, 3, 3), _f(5), 1, -100),
    "cross_entropy_loss.default": (_f(3, 5), _w(3), _f(5), 1, -100, 0.0),
    "multi_margin_loss.default": (_f(3, 5), _w(3), 1, 1.0, _f(5), 1),
    "multilabel_margin_loss.default": (_f(3, 5), _w(3, 5), 1),
    "_softmax_backward_data.default": (_f(2, 3), _f(2, 3), 1, torch.float32),
    "_log_softmax_backward_data.default": (_f(2, 3), _f(2, 3), 1, torch.float32),
    "index_reduce.default": (_f(4, 3), 0, _w(5), _f(5, 3), "prod"),
    "segment_reduce.default": (_f(6, 2), "sum"),
    "_grouped_mm.default": (_f(6, 8), _f(2, 8, 8), Spec((2,), torch.int32)),
    "lu_unpack.default": (_f(3, 3), Spec((3,), torch.int32)),
    "linalg_lu_solve.default": (_f(3, 3), Spec((3,), torch.int32), _f(3, 2)),
    "ormqr.default": (_f(4, 3), _f(3), _f(4, 2)),
    "linalg_householder_product.default": (_f(4, 3), _f(3)),
    "col2im.default": (_f(2, 12, 9), (4, 4), (2, 2), (1, 1), (0, 0), (1, 1)),
    "im2col.default": (_MAPS, (2, 2), (1, 1), (0, 0), (1, 1)),
    "fake_quantize_per_channel_affine.default": (
        *(_f(2, 3), _f(3), Spec((3,), torch.int32), 1, 0, 255),
    ),
    "istft.default": (Spec((5, 4), torch.complex64), 8, 2, 8, _f(8)),
    "stft.default": (_f(2, 32), 8, 2, 8, _f(8), False, None, True),
    "affine_grid_generator.default": (_f(2, 2, 3), (2, 3, 4, 4), False),
    "renorm.default": (_f(3, 4), 2.0, 0, 1.0),
    "histc.default": (_f(8), 5, 0.0, 4.0),
    "repeat_interleave.self_Tensor": (_f(3, 2), _w(3), 0),
    "as_strided_scatter.default": (_f(4, 4), _f(2, 2), (2, 2), (4, 1), 0),
    "bilinear.default": (_f(2, 3), _f(2, 4), _f(5, 3, 4), _f(5)),
}
"""Calls that can be computed, to change one thing in at a time: others than by luck seldom can."""


class Maker:
    """Makes arguments from a seed."""

    def __init__(self, seed: str) -> None:
        self._random = random.Random(seed)
        torch.manual_seed(self._random.randrange(2**31))
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._maps: dict[int, list[mmap.mmap]] = {}  # by bytes between the guards
        self._taken: list[tuple[int, mmap.mmap]] = []
        self._places: list[int] = []  # of the tensors, in memory; 0 for those without elements
        self._dim, self._type = 2, torch.float32
        self._specs: list[Spec] = []
        self.tensors: list[Tensor] = []
        self._known: dict[str, list[tuple[GraphNode, list[Spec]]]] = {}

    def choice(self, of: Sequence[Any]) -> Any:
        """One of them."""
        return self._random.choice(of)

    def chance(self, part: float) -> bool:
        """True in that part of the cases."""
        return self._random.random() < part

    def call(self, operator: operators.Operator) -> GraphNode:
        """A node that applies it; `tensors` are its inputs."""
        self._specs = []
        known = self._known.setdefault(operator.name, self._fitting(operator))
        if known and self.chance(0.75):
            node = self._changed(operator, *self.choice(known))
        else:
            node = self._invented(operator)
        for body, pages in self._taken:
            self._maps.setdefault(body, []).append(pages)
        self._taken = []
        self._places = [self._guarded(spec) for spec in self._specs]
        self.refill()
        return node

    def refill(self) -> None:
        """Make the tensors new, in the same places, with other values."""
        self.tensors = list(map(self._tensor, self._specs, self._places))

    def accepted(self, node: GraphNode) -> None:
        """It was computed: others are made of it."""
        known = self._known[node.operator]
        if len(known) < 40 and self.chance(0.3):
            known.append((node, list(self._specs)))

    def _fitting(self, operator: operators.Operator) -> list[tuple[GraphNode, list[Spec]]]:
        given = _FITTING.get(operator.name.removeprefix("aten."))
        if given is None:
            return []
        specs: list[Spec] = []

        def placed(value: Any) -> Any:
            if isinstance(value, tuple):
                return tuple(placed(item) for item in value)
            if isinstance(value, Spec):
                specs.append(value)
                return InputRef(len(specs) - 1)
            return value

        return [(GraphNode("n", operator.name, placed(given), (), True), specs)]

    def _changed(
        self, operator: operators.Operator, node: GraphNode, specs: list[Spec]
    ) -> GraphNode:
        """One thing of it, or two: a size, a type, an argument; or only the values."""
        self._specs = list(specs)
        args = list(node.args)
        assert operator.overload is not None
        arguments = [a for a in operator.overload._schema.arguments if not a.kwarg_only]
        for _ in range(self.choice([0, 1, 1, 1, 2])):
            kind = self._random.random()
            if kind < 0.45 and args:
                place = self._random.randrange(len(args))
                args[place] = self._value(str(arguments[place].real_type), arguments[place].name)
            elif self._specs:
                place = self._random.randrange(len(self._specs))
                self._specs[place] = self._other(self._specs[place])
        return GraphNode("n", node.operator, tuple(args), node.kwargs, True)

    def _other(self, spec: Spec) -> Spec:
        if self.chance(0.25):
            return replace(spec, dtype=self.choice(_TYPES))
        if self.chance(0.2):
            return replace(spec, learns=not spec.learns)
        if not spec.shape or self.chance(0.2):
            return replace(spec, shape=(*spec.shape, self.choice([0, 1, 2, 3])))
        place = self._random.randrange(len(spec.shape))
        size = self.choice([0, 1, spec.shape[place] + 1, max(spec.shape[place] - 1, 0), 7])
        return replace(spec, shape=(*spec.shape[:place], size, *spec.shape[place + 1 :]))

    def _invented(self, operator: operators.Operator) -> GraphNode:
        self._dim = self.choice([1, 2, 2, 3, 3, 4, 4, 5])
        self._type = self.choice([torch.float32] * 4 + [torch.float64, torch.int64])
        args: list[Any] = []
        kwargs: list[tuple[str, Any]] = []
        assert operator.overload is not None
        for argument in operator.overload._schema.arguments:
            if argument.has_default_value() and self.chance(0.3):
                if argument.kwarg_only:
                    continue
                value: Any = argument.default_value
                value = tuple(value) if isinstance(value, list) else value
            else:
                value = self._value(str(argument.real_type), argument.name)
            if argument.kwarg_only:
                kwargs.append((argument.name, value))
            else:
                args.append(value)
        return GraphNode("n", operator.name, tuple(args), tuple(kwargs), True)

    def _value(self, kind: str, name: str) -> Any:
        if kind.startswith("Optional["):
            return None if self.chance(0.4) else self._value(kind[9:-1], name)
        if self.chance(0.01):  # of another type
            return self.choice([-1, 4, 100, "x", 1.5, None, True, (1,), torch.float32, *_ODD])
        if kind.startswith("List["):
            counts = [0, 1, 2, 2, 3, 3, 4, 6] if "Tensor" in kind else [0, 1, 1, 2, 2, 3, 3, 4]
            return tuple(self._value(kind[5:-1], name) for _ in range(self.choice(counts)))
        return self._single(kind)

    def _single(self, kind: str) -> Any:
        match kind:
            case "Tensor":
                self._specs.append(self._spec())
                return InputRef(len(self._specs) - 1)
            case "int" | "SymInt":
                return self._whole()
            case "float":
                return self.choice(_FLOATS)
            case "bool":
                return self.chance(0.5)
            case "number":
                return self.choice([self._whole(), self._whole(), self.choice(_FLOATS), True, 1j])
            case "str":
                return self.choice(_TEXTS)
            case "ScalarType":
                return self.choice(_TYPES)
            case "MemoryFormat":
                return self.choice(_ODD[:3])
            case "Layout":
                return torch.strided
            case "Device":
                return torch.device("cpu")
            case _:
                return None

    def _whole(self) -> int:
        return int(self.choice(_WILD if self.chance(0.12) else _TAME))

    def _spec(self) -> Spec:
        alike = self.chance(0.65)
        dim = self._dim if alike else self.choice([0, 1, 1, 2, 2, 3, 4, 5])
        dtype = self._type if alike else self.choice(_TYPES)
        sizes = [0, 1, 1, 2, 3, 4, 5, 8] if self.chance(0.3) else [2, 3, 4]
        shape = tuple(self.choice(sizes) for _ in range(dim))
        turned = self.choice(range(1, dim)) if dim >= 2 and self.chance(0.15) else 0
        return Spec(shape, dtype, turned, self.chance(0.25))

    def _tensor(self, spec: Spec, place: int) -> Tensor:
        count = torch.Size(spec.shape).numel()
        if count:
            memory = (ctypes.c_char * (count * spec.dtype.itemsize)).from_address(place)
            made = torch.frombuffer(memory, dtype=spec.dtype, count=count).view(spec.shape)
        else:
            made = torch.zeros(spec.shape, dtype=spec.dtype)
        self._fill(made)
        if 0 < spec.turned < made.dim():
            made = made.transpose(0, spec.turned)
        if spec.learns and made.is_floating_point():
            made = made.detach().requires_grad_(True)
        return made

    def _guarded(self, spec: Spec) -> int:
        """Where such a tensor lies: beside a page that may not be touched."""
        size = torch.Size(spec.shape).numel() * spec.dtype.itemsize
        if not size:
            return 0
        body = -(-size // _PAGE) * _PAGE
        free = self._maps.get(body)
        pages = free.pop() if free else self._between_guards(body)
        self._taken.append((body, pages))
        start = ctypes.addressof(ctypes.c_char.from_buffer(pages)) + _PAGE
        return start + (body - size if self.chance(0.8) else 0)

    def _between_guards(self, body: int) -> mmap.mmap:
        pages = mmap.mmap(-1, body + 2 * _PAGE)
        base = ctypes.addressof(ctypes.c_char.from_buffer(pages))
        for guard in (base, base + _PAGE + body):
            self._libc.mprotect(ctypes.c_void_p(guard), _PAGE, 0)
        return pages

    def _fill(self, made: Tensor) -> None:
        kind, shape = self._random.random(), made.shape
        if made.dtype == torch.bool:
            made.copy_(torch.rand(shape) > 0.5)
        elif made.is_floating_point() or made.is_complex():
            if kind < 0.6:
                made.copy_(torch.rand(shape) * 4 - 1)
            elif kind < 0.8:
                made.fill_(self.choice([float("nan"), float("inf"), -float("inf")]))
            else:
                made.copy_(torch.rand(shape) * 1e30)
        elif kind < 0.6:
            made.copy_(torch.randint(0, self.choice([1, 2, 3, 5]), shape))
        elif kind < 0.7 and made.dim() == 1:
            made.copy_(
                torch.arange(made.numel()).flip(0) if self.chance(0.5) else made.new_ones(())
            )
        elif kind < 0.8:
            made.copy_(torch.randint(-3, 12, shape))
        else:
            least, most = torch.iinfo(made.dtype).min, torch.iinfo(made.dtype).max
            made.fill_(max(least, min(most, self.choice(_WILD))))


def overloads(only: str = "") -> list[str]:
    """The names of all that a model may apply, of ATen's."""
    found = []
    for listed in torch._C._dispatch_get_all_op_names():
        name, _, overload = listed.removeprefix("aten::").partition(".")
        full = f"aten.{name}.{overload or 'default'}"
        if listed.startswith("aten::") and only in full and operators.is_allowed(full):
            found.append(full)
    return sorted(found)


def attempts(maker: Maker, name: str, say: Callable[[str], None]) -> Iterator[str]:
    """A call, and the same with other values where it could be computed; how each ended."""
    operator = operators.resolve(name)
    node = maker.call(operator)
    try:
        check_arguments(node, operator)
    except ProtocolError:
        yield "refused by the reader"
        return
    say(f"{name} {_described(node.args, maker)} {_described(node.kwargs, maker)}")
    try:
        needs = node_needs(node, maker.tensors)
    except (ProtocolError, TooLarge):
        yield "refused by size"
        return
    except (ValueError, RuntimeError, IndexError):
        yield "refused by shape"
        return
    if needs.peak_bytes > MEMORY_BYTES or needs.work > WORK:
        yield "refused by size"
        return
    yield (found := _outcome(node, maker))
    if found != "computed":
        return
    maker.accepted(node)
    for _ in range(_WITH_OTHER_VALUES if maker.tensors else 0):
        maker.refill()
        say(f"{name} {_described(node.args, maker)} {_described(node.kwargs, maker)}")
        yield _outcome(node, maker)


def _outcome(node: GraphNode, maker: Maker) -> str:
    try:
        _run(node, maker)
    except (RuntimeError, IndexError, ValueError, TypeError, MemoryError, ArithmeticError):
        return "refused by torch"
    return "computed"


def _run(node: GraphNode, maker: Maker) -> None:
    args = [_bound(argument, maker.tensors) for argument in node.args]
    kwargs = {key: _bound(argument, maker.tensors) for key, argument in node.kwargs}
    result = call_of(node)(*args, **kwargs)
    made = [t for t in _flat(result) if isinstance(t, Tensor)]
    for tensor in made:  # what lies beside its memory shows when it is read
        tensor.detach().abs().sum() if tensor.dtype != torch.bool else tensor.any()
    learned = [t for t in made if t.requires_grad]
    if learned and maker.chance(0.7):
        total: Any = sum(t.abs().sum() for t in learned)
        total.backward()


def _bound(argument: Any, tensors: Sequence[Tensor]) -> Any:
    if isinstance(argument, InputRef):
        return tensors[argument.index]
    if isinstance(argument, tuple):
        return [_bound(item, tensors) for item in argument]
    return argument


def _flat(value: Any) -> Iterator[Any]:
    if isinstance(value, list | tuple):
        for item in value:
            yield from _flat(item)
    else:
        yield value


def _described(argument: Any, maker: Maker) -> str:
    if isinstance(argument, InputRef):
        tensor = maker.tensors[argument.index]
        values = [] if tensor.is_complex() else tensor.detach().flatten()[:6].tolist()
        return f"T({str(tensor.dtype)[6:]}, {list(tensor.shape)}, {values})"
    if isinstance(argument, tuple):
        return "[" + ", ".join(_described(item, maker) for item in argument) + "]"
    return repr(argument)[:60]


class Note:
    """What a child is about to call, where its parent can read it."""

    def __init__(self) -> None:
        self._shared = mmap.mmap(-1, _PAGE)

    def write(self, text: str) -> None:
        """Remember it."""
        data = text.encode()[: _PAGE - 2]
        self._shared[: 2 + len(data)] = len(data).to_bytes(2, "big") + data

    def read(self) -> str:
        """What was written last."""
        size = int.from_bytes(self._shared[:2], "big")
        return bytes(self._shared[2 : 2 + size]).decode(errors="replace")


def chosen(names: Sequence[str], seed: int, number: int) -> list[str]:
    """The operators of a chunk; every so many chunks all of them have had their turn."""
    turn, place = divmod(number, -(-len(names) // _TOGETHER))
    order = random.Random(f"{seed}:{turn}").sample(names, len(names))
    return order[place * _TOGETHER : (place + 1) * _TOGETHER]


def run_chunk(
    names: Sequence[str], seed: int, number: int, calls: int, note: Note
) -> tuple[dict[str, int], int]:
    """In a child: (how calls ended, its exit status, below 0 for the signal that ended it).

    Args:
        names: operators to call.
        seed, number: of the chunk, from which its arguments follow.
    """
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        status = _FOREIGN
        try:
            found = _called(names, Maker(f"{seed}:{number}"), calls, note)
            os.write(writing, json.dumps(found).encode())
            status = 0
        except MemoryError:
            status = _TOOK_MEMORY
        finally:
            os._exit(status)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        content = pipe.read()
    _, ended = os.waitpid(child, 0)
    return (json.loads(content) if content else {}), os.waitstatus_to_exitcode(ended)


def _called(names: Sequence[str], maker: Maker, calls: int, note: Note) -> dict[str, int]:
    """Raises MemoryError: a call took more than it was said to."""
    for noisy in (1, 2):  # torch warns, and MKL prints its errors
        os.dup2(os.open(os.devnull, os.O_WRONLY), noisy)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (_SPACE_BYTES, _SPACE_BYTES))
    ended: collections.Counter[str] = collections.Counter()
    taken = _peak_bytes()
    while ended.total() < calls:
        signal.setitimer(signal.ITIMER_PROF, ALARM_SECONDS)  # of processor time
        for outcome in attempts(maker, maker.choice(names), note.write):
            ended[outcome] += 1
            signal.setitimer(signal.ITIMER_PROF, ALARM_SECONDS)
        before, taken = taken, _peak_bytes()
        if taken - before > _MOST_GROWTH * MEMORY_BYTES:
            raise MemoryError
    signal.setitimer(signal.ITIMER_PROF, 0)
    return ended


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def main() -> None:
    """Run chunks until there were as many calls as asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--calls", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--first", type=int, default=0, help="the first chunk's number")
    parser.add_argument("--only", default="", help="operators with this in their name")
    asked = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    importlib.import_module("torch._dynamo")  # which shapes in Python load when first asked for
    names, note = overloads(asked.only) or sys.exit("no such operator"), Note()
    print(f"{len(names)} overloads", flush=True)
    total: collections.Counter[str] = collections.Counter()
    faults: collections.Counter[str] = collections.Counter()
    began, chunk = time.monotonic(), asked.first
    while sum(total.values()) < asked.calls and len(faults) < len(names):
        live = [name for name in chosen(names, asked.seed, chunk) if faults[name] < 2]
        count = min(CHUNK, asked.calls - sum(total.values()))
        ended, by = run_chunk(live, asked.seed, chunk, count, note) if live else ({}, 0)
        total.update(ended)
        if by:
            faults[note.read().split(" ")[0]] += 1
            kinds = {-signal.SIGPROF: "alarm", _TOOK_MEMORY: "memory", _FOREIGN: "foreign"}
            kind = kinds.get(by, f"signal {-by}")
            print(f"chunk {chunk}: {kind}: {note.read()}", flush=True)
            total["ended by " + kind] += 1
        chunk += 1
        if chunk % 25 == 0:
            seconds = time.monotonic() - began
            print(f"chunk {chunk}, {seconds:.0f} s: {dict(total)}", flush=True)
    print(f"{sum(total.values())} calls: {dict(total)}; {len(faults)} operators failed")
    sys.exit(bool(faults))


if __name__ == "__main__":
    main()
