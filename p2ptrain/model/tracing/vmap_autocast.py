"""`torch.vmap` and `torch.autocast` while a model is traced: what they make of each call.

torch does both between a call and autograd: a call on tensors with a hidden dimension becomes
others on plain tensors, one on float32 becomes casts and the same in bfloat16. torch.export records
calls before that. So the recording is taken off the stack for as long as one of the two is in
force, and whatever arrives beneath them is called once more where it is recorded, under autograd,
as plain torch has it.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import torch
from torch import Tensor, _ops
from torch._functorch import apis, eager_transforms
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from p2ptrain.errors import CaptureError
from p2ptrain.model.tracing.trace_patches import replaced_in_this_thread

_tls: Any = torch._C

_modes: Any = _ops

_Keys: TypeAlias = tuple[Any, Any]

_SWITCH: Any = _tls._set_grad_enabled

_DERIVATIVES = (
    "forward() or the loss takes a derivative of torch.func (grad, jacrev, jvp), which a trace "
    "cannot follow. Use torch.autograd.grad, outside of torch.vmap, or write the derivative out"
)


_OF_OTHERS = frozenset(
    {"einsum", "inner", "tensordot", "matrix_power", "linalg_matrix_power"}
    | {"gru_cell", "lstm_cell", "rnn_relu_cell", "rnn_tanh_cell"}
)
"""Operators that autocast leaves as they are, and which consist of others that it casts."""

_WHOLE = {
    **{"gru": "nn.GRU", "rnn_tanh": "nn.RNN", "rnn_relu": "nn.RNN"},
    **{"bilinear": "nn.Bilinear", "linalg_pinv": "torch.linalg.pinv"},
}
"""Such operators, too, and what calls them: these are not taken apart."""

_LSTM = "lstm"
"""It casts all that it is given, where it is one operation of oneDNN; the others sum in float32."""


class _CalledAgain(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Calls what arrives here in the surroundings that `recorded` enters."""

    def __init__(
        self, recorded: Callable[[], contextlib.AbstractContextManager[None]], casting: list[_Keys]
    ) -> None:
        """`casting`: what torch dispatches to within each autocast, the innermost last."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._recorded, self._casting = recorded, casting
        self._cast: dict[int, tuple[Tensor, Tensor]] = {}  # weights, once as autocast does it

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if self._casting and name in _OF_OTHERS | _WHOLE.keys() | {_LSTM}:
            with _tls._ForceDispatchKeyGuard(*self._casting[-1]), self:
                if name in _OF_OTHERS:
                    return func.decompose(*args, **(kwargs or {}))
                if torch.is_autocast_enabled("cpu") and name == _LSTM:
                    args = tree_map_only(Tensor, self._as_cast, args)
                elif torch.is_autocast_enabled("cpu"):
                    raise CaptureError(
                        f"the model calls {_WHOLE[name]} under torch.autocast, which is not "
                        "captured. Call it, with x.float(), inside of "
                        '`with torch.autocast("cpu", enabled=False):`'
                    )
        with self._recorded(), _gradients_as_they_are():
            return func(*args, **(kwargs or {}))

    def _as_cast(self, tensor: Tensor) -> Tensor:
        wanted = torch.get_autocast_dtype("cpu")
        if not tensor.is_floating_point() or tensor.dtype == wanted:
            return tensor
        if id(tensor) not in self._cast:
            self._cast[id(tensor)] = tensor, tensor.to(wanted)
        return self._cast[id(tensor)][1]


@contextlib.contextmanager
def _gradients_as_they_are() -> Iterator[None]:
    """Record that gradients are switched on where autocast does so: a weight is cast for later too.

    It does so beneath what is recorded.
    """
    recorder = _modes.mode_stack_state_for_pre_dispatch().get(0)
    switches = recorder.tracer.graph.find_nodes(op="call_function", target=_SWITCH)
    if not torch.is_grad_enabled() or not switches or switches[-1].args[0]:
        yield
        return
    recorder.tracer.create_node("call_function", _SWITCH, (True,), {})
    try:
        yield
    finally:
        recorder.tracer.create_node("call_function", _SWITCH, (False,), {})


class _Beneath:
    """The recording of one thread's trace, on and off the stack."""

    def __init__(self) -> None:
        self._thread = threading.get_ident()
        self._is_entered = False
        self.casting: list[_Keys] = []

    def applies(self) -> bool:
        """Whether a trace is under way here, so that `entered` has something to do."""
        return threading.get_ident() == self._thread and (self._is_entered or _recording() > 0)

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Record what comes out beneath vmap and autocast, instead of what goes in."""
        if self._is_entered:
            yield
            return
        keys = _dispatched()
        modes = [_modes._pop_mode_from_pre_dispatch() for _ in range(_recording())]

        @contextlib.contextmanager
        def recorded() -> Iterator[None]:
            for mode in reversed(modes):
                _modes._set_mode_pre_dispatch(mode)
            try:
                with _tls._ForceDispatchKeyGuard(*keys):
                    yield
            finally:
                for _ in modes:
                    _modes._pop_mode_from_pre_dispatch()

        self._is_entered = True
        try:
            # autograd is left to the second call: it must record each operation once
            with _CalledAgain(recorded, self.casting), _tls._AutoDispatchBelowADInplaceOrView():
                yield
        finally:
            self._is_entered = False
            for mode in reversed(modes):
                _modes._set_mode_pre_dispatch(mode)

    def refuse_derivatives(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Derivatives of torch.func would be zeros beneath, where there is no autograd.

        Elsewhere what they compute with would be taken for constants.
        """

        def begin() -> Any:
            if self.applies():
                raise CaptureError(_DERIVATIVES)
            return original()

        return begin


def _dispatched() -> _Keys:
    """To what torch dispatches here, and to what it does not."""
    return _tls._dispatch_tls_local_include_set(), _tls._dispatch_tls_local_exclude_set()


def _recording() -> int:
    """How many modes record calls before vmap and autocast see them."""
    return int(_modes._len_torch_dispatch_stack_pre_dispatch())


@contextlib.contextmanager
def mapped_and_cast_as_traced() -> Iterator[None]:
    """For one trace in this thread."""
    beneath = _Beneath()
    with contextlib.ExitStack() as stack:
        for name in ("grad_increment_nesting", "jvp_increment_nesting"):
            refusing = beneath.refuse_derivatives(getattr(eager_transforms, name))
            stack.enter_context(replaced_in_this_thread(eager_transforms, name, refusing))
        mapped = _vmap(beneath, vars(apis)["vmap_impl"])
        stack.enter_context(replaced_in_this_thread(apis, "vmap_impl", mapped))
        stack.enter_context(_autocast(beneath))
        yield


def _vmap(beneath: _Beneath, original: Callable[..., Any]) -> Callable[..., Any]:
    def vmap(*args: Any, **kwargs: Any) -> Any:
        if not beneath.applies():
            return original(*args, **kwargs)
        with beneath.entered(), reported_as_eager():
            return original(*args, **kwargs)

    return vmap


@contextlib.contextmanager
def _autocast(beneath: _Beneath) -> Iterator[None]:
    """Enter and leave `torch.autocast` of the processor without telling the trace.

    One that is switched off, in none that is on, is left to the trace: it does nothing. A weight
    is cast once, as in plain torch, where what that cast gives gets the sum of the gradients;
    torch.export has switched that off.
    """
    autocast: Any = torch.autocast
    enter, leave = autocast.__enter__, autocast.__exit__
    inside: list[tuple[object, contextlib.ExitStack]] = []
    casts_once = torch.is_autocast_cache_enabled()

    def entered(mode: Any) -> Any:
        if mode.device != "cpu" or not beneath.applies() or not (mode._enabled or inside):
            return enter(mode)
        stack = contextlib.ExitStack()
        stack.enter_context(beneath.entered())
        inside.append((mode, stack))
        with _tls.DisableTorchFunction():
            within = enter(mode)
        beneath.casting.append(_dispatched())
        return within

    def left(mode: Any, *error: Any) -> Any:
        if not inside or inside[-1][0] is not mode:
            return leave(mode, *error)
        beneath.casting.pop()
        with inside.pop()[1], _tls.DisableTorchFunction():
            return leave(mode, *error)

    torch.set_autocast_cache_enabled(True)
    try:
        with (
            replaced_in_this_thread(autocast, "__enter__", entered),
            replaced_in_this_thread(autocast, "__exit__", left),
        ):
            yield
    finally:
        torch.set_autocast_cache_enabled(casts_once)


@contextlib.contextmanager
def reported_as_eager() -> Iterator[None]:
    """`torch.compiler.is_exporting()` and `is_compiling()` say no."""
    compiler: Any = torch.compiler
    before = compiler._is_exporting_flag, compiler._is_compiling_flag
    compiler._is_exporting_flag = compiler._is_compiling_flag = False
    try:
        yield
    finally:
        compiler._is_exporting_flag, compiler._is_compiling_flag = before
