"""Derivatives that forward() or the loss takes by itself: `torch.autograd.grad`.

A trace follows the operations of such a derivative, but loses two things. Without `create_graph`
the derivative is a constant to what comes after, and nothing in the graph says so. And what
autograd keeps of the forward pass (the result of `tanh`, the transposed weight inside `linear`)
reaches the trace as a tensor that it has never seen. So a model that differentiates is traced once
more, with composite operators taken apart, and with autograd's copies known for what they are
copies of.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, _ops
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakTensorKeyDictionary

from p2ptrain.errors import CaptureError
from p2ptrain.model.tracing.trace_patches import replaced_in_this_thread

_modes: Any = _ops

_DETACH = torch.ops.aten.detach.default


class DifferentiatesError(Exception):
    """The model takes a derivative, which this trace is not prepared for."""


class _Derivatives(TorchFunctionMode):
    """Derivatives as constants where they are; none that end in `.grad`."""

    def __init__(self, *, traced: bool, expected: bool) -> None:
        super().__init__()
        self._traced, self._expected = traced, expected

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        if func is Tensor.backward:
            _refuse_backward()
        if func is not torch.autograd.grad:
            return func(*args, **given)
        if self._traced and recorder() is None:
            raise CaptureError(
                "forward() or the loss takes a derivative inside torch.vmap or torch.autocast, "
                "where it cannot be followed. Call torch.autograd.grad outside of them"
            )
        if self._traced and not self._expected:
            raise DifferentiatesError
        if given.get("is_grads_batched", args[6] if len(args) > 6 else False):
            raise CaptureError(
                "forward() or the loss takes many derivatives at once (is_grads_batched, "
                "vectorize=True), which a trace cannot follow. Take them one by one: a Python loop "
                "over torch.autograd.grad, vectorize=False"
            )
        learns = bool(given.get("create_graph", args[4] if len(args) > 4 else False))
        with torch.set_grad_enabled(learns):  # it would compute so anyway: here it is recorded
            return func(*args, **given)


def _refuse_backward(*_: Any, **__: Any) -> None:
    raise CaptureError(
        "forward() or the loss calls backward(), which would add to gradients of its own. "
        "Use torch.autograd.grad(value, tensors)"
    )


def _refuse_forward_mode(*_: Any, **__: Any) -> None:
    raise CaptureError(
        "forward() or the loss takes a derivative in forward mode (make_dual), which a trace "
        "cannot follow. Use torch.autograd.grad or torch.autograd.functional.jvp, or write the "
        "derivative out"
    )


class _AutogradCopies(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Tell the trace of `recording` what autograd's copies of tensors are copies of.

    They are made by `detach`, beneath what is recorded, before the trace has seen the original. In
    a derivative they come from above it: there the call must not be recorded either.
    """

    def __init__(self, recording: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._known = recording.tracer.tensor_tracker
        self._originals: Any = WeakTensorKeyDictionary()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not _DETACH:
            return func(*args, **(kwargs or {}))
        with unrecorded():
            result = func(*args)
            original = self._originals.get(args[0], args[0])
            self._originals[result] = original
            if original in self._known and result not in self._known:
                self._known[result] = self._known[original]
        return result


@contextlib.contextmanager
def unrecorded() -> Iterator[None]:
    """Calls in here are made, but no trace has them."""
    modes = [
        _modes._pop_mode_from_pre_dispatch()
        for _ in range(_modes._len_torch_dispatch_stack_pre_dispatch())
    ]
    try:
        yield
    finally:
        for mode in reversed(modes):
            _modes._set_mode_pre_dispatch(mode)


def recorder() -> Any:
    """What records calls here; None where no trace is under way, or inside vmap and autocast."""
    return _modes.mode_stack_state_for_pre_dispatch().get(0)


@contextlib.contextmanager
def derivatives_as_traced(*, expected: bool) -> Iterator[None]:
    """For one call of forward() and the loss, traced or not.

    Args:
        expected: whether the trace is to be prepared for derivatives.

    Raises:
        DifferentiatesError: it is not, and there is one.
        CaptureError: it cannot be followed, or backward() is called.
    """
    with contextlib.ExitStack() as stack:
        recording = recorder()
        if expected and recording is not None:
            stack.enter_context(_AutogradCopies(recording))
            stack.callback(setattr, recording, "pre_dispatch", recording.pre_dispatch)
            recording.pre_dispatch = False  # composite operators are taken apart
        stack.enter_context(_Derivatives(traced=recording is not None, expected=expected))
        stack.enter_context(replaced_in_this_thread(torch.autograd, "backward", _refuse_backward))
        stack.enter_context(replaced_in_this_thread(forward_ad, "make_dual", _refuse_forward_mode))
        yield
