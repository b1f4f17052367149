"""`torch.autograd.Function` while a model is traced: its backward is recorded behind its forward.

torch.export calls the forward and forgets the backward. So here both are called:

    y  = forward(x)                                    without gradients, as autograd calls it
    g  = p2ptrain_trace.arriving([y], "Name")          stands for the gradients that will arrive
    h  = backward(g)
    y' = p2ptrain_trace.own_backward([y], [x], g, [h])

What lies between the two operators becomes a graph of its own (`backward_graph`). Inside a trace
y' has the user's backward too, for models that differentiate.

A backward may ask whether there is a gradient for an output. That shows at the loss only: where it
was guessed wrong, the model is traced again.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, overrides
from torch.autograd import Function, function
from torch.fx.experimental import proxy_tensor

from p2ptrain.errors import CaptureError
from p2ptrain.model.tracing.autograd_graph import (
    AnyLayout,
    Edge,
    edge_of,
    edges_reached,
    recorder,
    unrecorded,
)
from p2ptrain.model.tracing.trace_patches import replaced_in_this_thread

_overrides: Any = overrides

_library: Any = torch.library.Library("p2ptrain_trace", "DEF")  # type: ignore[no-untyped-call]

_library.define("arriving(Tensor[] outputs, str name) -> Tensor[]")

_library.define(
    "own_backward(Tensor[] outputs, Tensor[] inputs, Tensor[] arriving, Tensor?[] gradients)"
    " -> Tensor[]"
)

ARRIVING = torch.ops.p2ptrain_trace.arriving.default

JOINED = torch.ops.p2ptrain_trace.own_backward.default

_Base: Any = function._SingleLevelFunction
"""What every `apply` calls after it has looked at its arguments, also one that was kept."""

Place: TypeAlias = tuple[int, int]
"""Of all calls of functions in forward() and the loss which one; which of its outputs."""


class UndefinedGradientsError(Exception):
    """Some outputs get no gradient at all, which the trace took for zeros.

    Attributes:
        places: all those.
    """

    def __init__(self, places: frozenset[Place]) -> None:
        super().__init__(f"no gradient arrives for {sorted(places)}")
        self.places = places


class FunctionCalls:
    """The calls of functions in one forward() and loss.

    Attributes:
        records: whether backwards are recorded; not inside of one, which has none.
    """

    def __init__(self, undefined: frozenset[Place], *, records: bool) -> None:
        """Of a model that is trained, or of one that is evaluated, which `records` nothing.

        Args:
            undefined: outputs for which no gradient will arrive, where a function asks for that.
                It is the first guess that all arrive; `check` makes a better one.
        """
        self.records = records
        self._undefined = undefined
        self._made: list[_Call] = []

    def add(self, call: _Call) -> frozenset[int]:
        """The outputs of this one for which none will arrive."""
        self._made.append(call)
        number = len(self._made) - 1
        return frozenset(k for made, k in self._undefined if made == number)

    def check(self, loss: Tensor) -> None:
        """Look which outputs the loss hangs on.

        Raises:
            UndefinedGradientsError: others than was thought.
        """
        if not self._made:
            return
        reached = edges_reached(loss)
        found = frozenset(
            (number, k)
            for number, call in enumerate(self._made)
            for k, edge in call.edges_that_may_be_undefined()
            if edge not in reached
        )
        if found != self._undefined:
            raise UndefinedGradientsError(found)


@contextlib.contextmanager
def own_backwards_as_traced(
    undefined: frozenset[Place], *, training: bool
) -> Iterator[FunctionCalls]:
    """For one call of forward() and the loss; where nothing is traced nothing changes.

    Args:
        undefined: as for `FunctionCalls`.
        training: whether gradients will be asked for.
    """
    if recorder() is None:
        yield FunctionCalls(frozenset(), records=False)
        return
    calls = FunctionCalls(undefined, records=training)
    thread = threading.get_ident()

    def apply(cls: Any, *args: Any) -> Any:
        own = threading.get_ident() == thread and not cls.__module__.startswith(_NOT_THE_USERS)
        return _traced(calls, cls, args) if own else super(_Base, cls).apply(*args)

    _Base.apply = classmethod(apply)
    try:
        with replaced_in_this_thread(function, "custom_function_call", _refuse):
            yield calls
    finally:
        del _Base.apply


_NOT_THE_USERS = ("torch.", "p2ptrain.model.")


def _refuse(cls: Any, *_: Any) -> None:
    raise CaptureError(
        f"the model uses {_name(cls)}, a torch.autograd.Function with its own backward, inside "
        "torch.vmap or torch.autocast, where that cannot be followed. Call it outside of them"
    )


def _name(cls: Any) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


class _Context(function.FunctionCtx):
    """What forward and backward get: the tensors that were saved are the very ones."""

    def __init__(self, needs_input_grad: tuple[bool, ...]) -> None:
        self.needs_input_grad = needs_input_grad
        self.to_save: tuple[Tensor, ...] = ()
        self.dirty_tensors: tuple[Tensor, ...] = ()
        self.non_differentiable: tuple[Tensor, ...] = ()
        self.materialize_grads = True

    @property
    def saved_tensors(self) -> tuple[Tensor, ...]:
        return tuple(self.to_save)


def _traced(calls: FunctionCalls, cls: Any, args: tuple[Any, ...]) -> Any:
    """The results of `cls.apply(*args)`."""
    recording = recorder()
    if recording is None:
        _refuse(cls)
    tracer = recording.tracer
    ctx = _Context(tuple(isinstance(arg, Tensor) and arg.requires_grad for arg in args))
    learns = torch.is_grad_enabled() and any(ctx.needs_input_grad)
    with _known_as_before(tracer, args):
        call = _Call(cls, ctx, args, tracer)
        is_recorded = calls.records
        with torch.no_grad():
            made = _forward(cls, ctx, args)
            outputs = made if isinstance(made, tuple) else (made,)
            learning = [k for k, output in enumerate(outputs) if _takes_gradient(output, ctx)]
            outputs = tuple(_unlike(output, args) for output in outputs)
            differentiable = {k: outputs[k] for k in learning}
            if learns and differentiable and is_recorded:
                calls.records = False
                call.record_backward(outputs, differentiable, calls.add(call))
                calls.records = True
        if learns and differentiable:
            joined = call.join(outputs, differentiable, is_recorded=is_recorded)
            outputs = tuple(joined.get(k, output) for k, output in enumerate(outputs))
    return outputs if isinstance(made, tuple) else outputs[0]


@contextlib.contextmanager
def _known_as_before(tracer: Any, args: Sequence[Any]) -> Iterator[None]:
    """What returns an argument as it is, such as `flatten`, makes a trace take it for the result.

    In here that is nothing that the model should go on with.
    """
    known = tracer.tensor_tracker
    before = [(arg, known[arg]) for arg in args if isinstance(arg, Tensor) and arg in known]
    yield
    for arg, proxy in before:
        known[arg] = proxy


def _forward(cls: Any, ctx: _Context, args: tuple[Any, ...]) -> Any:
    if cls.setup_context is _Base.setup_context:
        made = cls.forward(ctx, *args)
    else:
        made = cls.forward(*args)
        cls.setup_context(ctx, args, made)
    if ctx.dirty_tensors:
        raise CaptureError(
            f"{_name(cls)}.forward writes to its arguments (mark_dirty), which other devices would "
            "not follow. Return new tensors"
        )
    return made


def _unlike(output: Any, args: tuple[Any, ...]) -> Any:
    """An argument that is returned is a view of it, as autograd has it."""
    return output.view_as(output) if any(output is arg for arg in args) else output


def _takes_gradient(output: Any, ctx: _Context) -> bool:
    return (
        isinstance(output, Tensor)
        and (output.is_floating_point() or output.is_complex())
        and not any(output is other for other in ctx.non_differentiable)
    )


class _Call:
    """One application of a user's function, on its way into a trace."""

    def __init__(self, cls: Any, ctx: _Context, args: tuple[Any, ...], tracer: Any) -> None:
        self._cls, self._ctx, self._args, self._tracer = cls, ctx, args, tracer
        self._learning = [k for k, needed in enumerate(ctx.needs_input_grad) if needed]
        self._inputs = self._proxies([args[k] for k in self._learning])
        self._outputs: Any = []
        self._arriving: Any = []
        self._gradients: Any = []
        self._edges: Mapping[int, Edge] = {}

    def record_backward(
        self,
        outputs: Sequence[Any],
        differentiable: Mapping[int, Tensor],
        undefined: Collection[int],
    ) -> None:
        """Behind the forward, with gradients off as there.

        Args:
            undefined: those of `outputs` for which no gradient will arrive.
        """
        self._outputs = self._proxies([*differentiable.values()])
        with unrecorded():
            gradients = [torch.empty_like(output) for output in differentiable.values()]
        self._record(ARRIVING, (self._outputs, _name(self._cls)), gradients)
        self._arriving = self._proxies(gradients)
        known = zip(differentiable, gradients, strict=True)
        given = {k: None if k in undefined else gradient for k, gradient in known}
        arriving = _completed(self._ctx, given, outputs)
        with AnyLayout(_name(self._cls), gradients):
            found = _backward(self._cls, self._ctx, arriving, len(self._args))
        self._gradients = self._proxies([found[k] for k in self._learning])

    def join(
        self, outputs: Sequence[Any], differentiable: Mapping[int, Tensor], *, is_recorded: bool
    ) -> Mapping[int, Tensor]:
        """Behind the backward, with gradients on; the outputs that the model computes with next.

        Inside another's backward, and in evaluation mode, all that there is are the operations.
        """
        others = {k: output for k, output in enumerate(outputs) if k not in differentiable}
        with unrecorded():
            results: Sequence[Tensor] = _Differentiated.apply(  # type: ignore[no-untyped-call]
                self._cls, self._ctx, differentiable, others, *self._args
            )
        self._edges = {
            k: edge_of(result) for k, result in zip(differentiable, results, strict=True)
        }
        if is_recorded:
            operands = self._outputs, self._inputs, self._arriving, self._gradients
            self._record(JOINED, operands, list(results))
            given = dict(zip(self._learning, self._gradients, strict=True))
            node, _ = edge_of(results[0])
            node.gives = [
                given.get(k) is not None
                for k, arg in enumerate(self._args)
                if isinstance(arg, Tensor)
            ]
        return dict(zip(differentiable, results, strict=True))

    def edges_that_may_be_undefined(self) -> Iterator[tuple[int, Edge]]:
        """Outputs with where their gradient arrives, if the function asks whether there is one."""
        return iter(() if self._ctx.materialize_grads else self._edges.items())

    def _record(self, operator: Any, operands: tuple[Any, ...], results: list[Tensor]) -> None:
        proxy = self._tracer.create_proxy("call_function", operator, operands, {})
        proxy_tensor.track_tensor_tree(results, proxy, constant=None, tracer=self._tracer)

    def _proxies(self, values: Sequence[Any]) -> list[Any]:
        return [self._tracer.unwrap_proxy(v) if isinstance(v, Tensor) else v for v in values]


def _completed(
    ctx: _Context, arriving: Mapping[int, Tensor | None], outputs: Iterable[Any]
) -> list[Tensor | None]:
    """One for each output: what takes no gradient gets zeros, as from autograd; no tensor none."""
    return [
        arriving[k]
        if k in arriving
        else torch.zeros_like(output)
        if isinstance(output, Tensor) and ctx.materialize_grads
        else None
        for k, output in enumerate(outputs)
    ]


def _backward(cls: Any, ctx: Any, arriving: Sequence[Any], count: int) -> Sequence[Any]:
    """What the user's backward gives, one for each of `count` arguments."""
    call = cls.backward if cls.vjp is Function.vjp else cls.vjp
    boxed = getattr(cls, "boxed_grads_call", False)  # torch 2.9 has no such switch
    given = call(ctx, [*arriving]) if boxed else call(ctx, *arriving)
    given = given if isinstance(given, tuple) else (given,)
    given += (None,) * (count - len(given))  # plain torch refuses too few, which comparing shows
    return [gradient if isinstance(gradient, Tensor) else None for gradient in given]


@contextlib.contextmanager
def _watched_by(modes: Sequence[Any]) -> Iterator[None]:
    """In the modes of forward(): a trace learns by them where gradients are switched on and off.

    torch.autograd.grad runs without any.
    """
    with contextlib.ExitStack() as stack:
        for mode in modes[len(_overrides._get_current_function_mode_stack()) :]:
            stack.enter_context(mode)
        yield


class _Differentiated(Function):
    """The user's backward on results of a trace: derivatives that the model takes go on there."""

    @staticmethod
    def forward(
        ctx: Any,
        cls: Any,
        own: _Context,
        differentiable: Mapping[int, Tensor],
        others: Mapping[int, Any],
        *args: Any,
    ) -> tuple[Tensor, ...]:
        ctx.cls, ctx.own, ctx.others, ctx.count = cls, own, others, len(args)
        ctx.differentiable = [*differentiable]
        ctx.set_materialize_grads(own.materialize_grads)
        ctx.modes = _overrides._get_current_function_mode_stack()
        return tuple(differentiable.values())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        given = dict(zip(ctx.differentiable, gradients, strict=True))
        places = range(len(given) + len(ctx.others))
        arriving = _completed(ctx.own, given, [ctx.others.get(k) for k in places])
        with _watched_by(ctx.modes):
            found = _backward(ctx.cls, ctx.own, arriving, ctx.count)
        return (None, None, None, None, *found[: ctx.count])
