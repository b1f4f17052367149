"""What a model does besides tensor operations and a trace would silently get wrong.

Put right where possible, refused otherwise: hooks that change gradients or what is kept for them,
parameters frozen in forward(), TorchScript that has run before (its own autodiff detaches what it
computes with), reentrant checkpoints (traced without gradients), inference mode (leaves nothing in
a graph, so that gradients would flow through it).

Functions of torch's are replaced in the capturing thread only. Random numbers that forward() seeds
by itself are refused: devices draw new ones for every micro-batch, so noise that never changes
would become noise that does.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import fake_impls
from torch.autograd.graph import saved_tensors_hooks
from torch.distributions import Distribution
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import CheckpointFunction

from p2ptrain.errors import CaptureError


def _traced_ctc(mode: Any, func: Any, log_probs: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Losses and log alphas of (time, batch, class); how many alphas depends on the targets.

    That shows nowhere: the graph has `ctc_loss`, of which this is the inside.
    """
    time, batch, _ = log_probs.shape
    return log_probs.new_empty((batch,)), log_probs.new_empty((batch, time, 1))


_CTC = torch.ops.aten._ctc_loss.Tensor

_register: Any = fake_impls.register_op_impl

if _CTC not in fake_impls.op_implementations_dict:  # another torch may have a rule of its own
    _register(_CTC)(_traced_ctc)

one_at_a_time = threading.RLock()
"""Held while a model is captured: what is put in place of torch's own meanwhile is there for all
threads, and so are the mode and the tensors that a traced module has for a while. A capture whose
caller was cancelled may still be under way when the next one, of the same module, begins."""

_SET_REQUIRES_GRAD: Any = Tensor.requires_grad.__set__  # type: ignore[attr-defined]

_GRAD_FN: Any = vars(torch._C.TensorBase)["grad_fn"].__get__

_MODULE_HOOKS = ("_backward_hooks", "_backward_pre_hooks")

_TENSOR_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")

_LOST = (
    "changes or reads gradients in a backward hook, which other devices would not run. Remove the "
    "hook; x * a + (x * (1 - a)).detach() scales the gradient of x by a"
)


def refuse_gradient_hooks(module: nn.Module) -> None:
    """CaptureError where a part or a parameter of `module` has a hook on its backward."""
    owners: list[tuple[str, object, tuple[str, ...]]] = [
        *((name, part, _MODULE_HOOKS) for name, part in module.named_modules()),
        *((name, parameter, _TENSOR_HOOKS) for name, parameter in module.named_parameters()),
    ]
    for name, owner, hooks in owners:
        if any(getattr(owner, attribute, None) for attribute in hooks):
            raise CaptureError(f"{name or 'the model'} {_LOST}")


def _checkpointed(function: Callable[..., Any], preserves: bool, *args: Any) -> Any:
    """A reentrant checkpoint's inside, which a trace takes for something without gradients.

    It has none in plain torch either where none of its arguments has.
    """
    learns = any(isinstance(arg, Tensor) and arg.requires_grad for arg in args)
    with torch.set_grad_enabled(learns and torch.is_grad_enabled()):  # plain torch warns of it
        return function(*args)


class NoSwitchedParameters(TorchFunctionMode):
    """Refuse `parameter.requires_grad_(False)`: the graph has no word for it.

    Of an activation it is followed.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        if func in (Tensor.requires_grad_, _SET_REQUIRES_GRAD):
            wanted = args[1] if len(args) > 1 else given.get("requires_grad", True)
            if isinstance(args[0], nn.Parameter) and bool(wanted) != args[0].requires_grad:
                raise CaptureError(
                    "forward() or the loss switches requires_grad of a parameter, which other "
                    "devices would not follow. Compute with parameter.detach() there (a module "
                    "with torch.func.functional_call), or freeze it before training"
                )
        return func(*args, **given)


class NoTensorHooks(TorchFunctionMode):
    """Refuse `activation.register_hook(...)` and `activation.grad_fn.register_hook(...)`."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (Tensor.register_hook, Tensor.register_post_accumulate_grad_hook):
            raise CaptureError(f"forward() {_LOST}")
        result = func(*args, **(kwargs or {}))
        return _NoNodeHooks(result) if func == _GRAD_FN and result is not None else result


class _NoNodeHooks:
    """A node of autograd's that takes no hooks."""

    def __init__(self, node: Any) -> None:
        self._node = node

    def __getattr__(self, name: str) -> Any:
        if name in ("register_hook", "register_prehook"):
            raise CaptureError(f"forward() {_LOST}")
        return getattr(self._node, name)


@contextlib.contextmanager
def _nothing_packed() -> Iterator[None]:
    """What autograd keeps stays as it is: that changes nothing where torch's own hooks are for it.

    A checkpoint's would compute again what a derivative inside forward() needs, which is no part
    of the model. Others are refused.
    """
    hooks: Any = saved_tensors_hooks
    with (
        replaced_in_this_thread(hooks, "__enter__", _refuse_packing),
        replaced_in_this_thread(hooks, "__exit__", lambda *_: None),
    ):
        yield


def _refuse_packing(hooks: Any) -> None:
    if type(hooks) is saved_tensors_hooks or not type(hooks).__module__.startswith("torch."):
        raise CaptureError(
            "forward() or the loss packs what autograd keeps (saved_tensors_hooks), which other "
            "devices would not do. Remove the hooks; to keep less, use torch.utils.checkpoint"
        )


@contextlib.contextmanager
def as_written() -> Iterator[None]:
    """TorchScript runs operator by operator, checkpoints just call what they hold.

    Inference mode is no more than gradients switched off, and distributions do not look at their
    arguments.
    """
    validates = Distribution._validate_args
    jit: Any = torch.jit
    reentrant: Any = CheckpointFunction
    inference: Any = torch.inference_mode
    enter = inference.__enter__
    compiled: list[Any] = [torch._C.ScriptMethod, torch._C.ScriptFunction]
    originals = [kind.__call__ for kind in compiled]
    Distribution.set_default_validate_args(False)
    reentrant.apply = _checkpointed
    inference.__enter__ = _as_gradients_mode(enter)
    for kind in compiled:
        kind.__call__ = _afresh(kind.__call__)
    try:
        with jit.optimized_execution(False), _nothing_packed():
            yield
    finally:
        for kind, original in zip(compiled, originals, strict=True):
            kind.__call__ = original
        del reentrant.apply
        inference.__enter__ = enter
        Distribution.set_default_validate_args(validates)


def _as_gradients_mode(original: Callable[..., None]) -> Callable[..., None]:
    """Enter `no_grad` in this thread; what is left is whatever has been entered."""
    thread = threading.get_ident()

    def enter(mode: Any) -> None:
        if threading.get_ident() != thread:
            original(mode)
            return
        mode._inference_mode_context = torch.no_grad() if mode.mode else torch.enable_grad()
        mode._inference_mode_context.__enter__()

    return enter


def _afresh(original: Callable[..., Any]) -> Callable[..., Any]:
    """A call without what was compiled before: that counts even where compiling is switched off."""

    def call(script: Any, *args: Any, **kwargs: Any) -> Any:
        script._debug_flush_compilation_cache()
        return original(script, *args, **kwargs)

    return call


@contextlib.contextmanager
def replaced_in_this_thread(owner: Any, name: str, function: Callable[..., Any]) -> Iterator[None]:
    """Call `function` instead of `owner.name`; other threads train meanwhile, with the latter."""
    thread = threading.get_ident()
    original: Callable[..., Any] = getattr(owner, name)

    def either(*args: Any, **kwargs: Any) -> Any:
        called = function if threading.get_ident() == thread else original
        return called(*args, **kwargs)

    setattr(owner, name, either)
    try:
        yield
    finally:
        setattr(owner, name, original)


class _HeldGenerators(TorchFunctionMode):
    """Refuse to draw from generators that were not there before forward()."""

    def __init__(self, generators: Iterable[torch.Generator]) -> None:
        super().__init__()
        self._known = {id(generator) for generator in (*generators, torch.default_generator)}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        generator = given.get("generator")
        if isinstance(generator, torch.Generator) and id(generator) not in self._known:
            _refuse()
        return func(*args, **given)


def _refuse(*_: Any) -> None:
    raise CaptureError(
        "forward() or the loss seeds random numbers (torch.manual_seed, a torch.Generator of its "
        "own), so that they are the same for every batch; devices would draw others. Draw them "
        "once in __init__, into a buffer: self.register_buffer(name, torch.randn(...))"
    )


@contextlib.contextmanager
def unseeded(held: Iterable[object]) -> Iterator[None]:
    """For one call of forward() and the loss.

    Args:
        held: what module and loss keep, generators among it.

    Raises:
        CaptureError: random numbers are seeded.
    """
    generators = [value for value in held if isinstance(value, torch.Generator)]
    with (
        _HeldGenerators(generators),
        replaced_in_this_thread(torch, "manual_seed", _refuse),
        replaced_in_this_thread(torch.random, "manual_seed", _refuse),
    ):
        yield
