"""What a model does besides tensor operations and a trace would get wrong, or stumble over.

TorchScript that has run before (its own autodiff detaches what it computes with), reentrant
checkpoints (traced without gradients), inference mode (leaves nothing in a graph, so that gradients
would flow through it), hooks on a backward (there is none in a trace), seeds.

Functions of torch's are replaced in the capturing thread only.
"""

from __future__ import annotations

import builtins
import contextlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import fake_impls
from torch.autograd.graph import saved_tensors_hooks
from torch.distributions import Distribution
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode
from torch.utils import checkpoint
from torch.utils.checkpoint import CheckpointFunction
from torch.utils.hooks import RemovableHandle


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

_GRAD_FN: Any = vars(torch._C.TensorBase)["grad_fn"].__get__

_ENTERED = "_checkpoint_without_reentrant_generator"

_MODULE_HOOKS = ("_backward_hooks", "_backward_pre_hooks")

_REGISTERING = (
    "register_backward_hook",
    "register_full_backward_hook",
    "register_full_backward_pre_hook",
)


@contextlib.contextmanager
def without_backward_hooks(module: nn.Module) -> Iterator[None]:
    """Hooks on the backward of `module` are left out, and those that forward() registers.

    A trace runs no backward. What hooks do to gradients shows when captured is compared.
    """
    owners = [vars(part) for part in module.modules()]
    hooks = [owner[name] for owner in owners for name in _MODULE_HOOKS if owner.get(name)]
    kept = [dict(each) for each in hooks]
    with contextlib.ExitStack() as stack:
        for name in _REGISTERING:
            stack.enter_context(replaced_in_this_thread(nn.Module, name, _not_registered))
        for each in hooks:
            each.clear()
        try:
            yield
        finally:
            for each, before in zip(hooks, kept, strict=True):
                each.update(before)


def _not_registered(*_: Any, **__: Any) -> RemovableHandle:
    return RemovableHandle(OrderedDict())


class _Checkpoints:
    """Checkpoints just call what they hold; plain torch calls it once more in the backward.

    Of a BatchNorm inside, this moves the statistics a second time, by the same samples.
    """

    def __init__(self) -> None:
        self._calls_in_backward = 0

    def reentrant(self, function: Callable[..., Any], preserves: bool, *args: Any) -> Any:
        """Its inside, which a trace takes for something without gradients.

        It has none in plain torch either where none of its arguments has.
        """
        learns = any(isinstance(arg, Tensor) and arg.requires_grad for arg in args)
        learns = learns and torch.is_grad_enabled()  # plain torch warns of it
        with torch.set_grad_enabled(learns), self._inside():
            return function(*args)

    def entered(self, *_: Any, **__: Any) -> Iterator[None]:
        """In place of what surrounds the call of a checkpoint that is not reentrant."""
        with self._inside():
            yield

    @contextlib.contextmanager
    def statistics_move_again(self) -> Iterator[None]:
        """Those of each BatchNorm that is called inside."""
        original = _BatchNorm.forward

        def forward(norm: _BatchNorm, x: Tensor) -> Tensor:
            out = original(norm, x)
            again = norm.training and norm.track_running_stats and self._calls_in_backward
            if again:  # torch.export takes long over each part without gradients
                with torch.no_grad():
                    for _ in range(self._calls_in_backward):
                        original(norm, x)
            return out

        with replaced_in_this_thread(_BatchNorm, "forward", forward):
            yield

    @contextlib.contextmanager
    def _inside(self) -> Iterator[None]:
        calls = int(torch.is_grad_enabled())
        self._calls_in_backward += calls
        try:
            yield
        finally:
            self._calls_in_backward -= calls


class NoTensorHooks(TorchFunctionMode):
    """Leaves out `activation.register_hook(...)` and `activation.grad_fn.register_hook(...)`."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (Tensor.register_hook, Tensor.register_post_accumulate_grad_hook):
            return _not_registered()
        result = func(*args, **(kwargs or {}))
        return _NoNodeHooks(result) if func == _GRAD_FN and result is not None else result


class _NoNodeHooks:
    """A node of autograd's that takes no hooks."""

    def __init__(self, node: Any) -> None:
        self._node = node

    def __getattr__(self, name: str) -> Any:
        if name in ("register_hook", "register_prehook"):
            return _not_registered
        return getattr(self._node, name)


@contextlib.contextmanager
def as_written() -> Iterator[None]:
    """TorchScript runs operator by operator, checkpoints call what they hold at once.

    Inference mode is no more than gradients switched off, and distributions do not look at their
    arguments. What autograd keeps stays as it is: a checkpoint's hooks would compute again what a
    derivative inside forward() needs, which is no part of the model. What others lose of it shows
    when captured is compared. A trace draws nothing, and leaves the process's seed alone.
    """
    jit: Any = torch.jit
    checkpoints = _Checkpoints()
    compiled: tuple[Any, ...] = (torch._C.ScriptMethod, torch._C.ScriptFunction)
    instead: list[tuple[Any, str, Callable[..., Any]]] = [
        *((kind, "__call__", _afresh(kind.__call__)) for kind in compiled),
        *((saved_tensors_hooks, name, lambda *_: None) for name in ("__enter__", "__exit__")),
        *((place, "manual_seed", _default_generator) for place in (torch, torch.random)),
        (torch.inference_mode, "__enter__", _enter_gradients_mode),
        (CheckpointFunction, "apply", checkpoints.reentrant),
        (checkpoint, _ENTERED, checkpoints.entered),
    ]
    with contextlib.ExitStack() as stack:
        stack.callback(Distribution.set_default_validate_args, Distribution._validate_args)
        Distribution.set_default_validate_args(False)
        stack.enter_context(jit.optimized_execution(False))
        stack.enter_context(checkpoints.statistics_move_again())
        for owner, name, function in instead:
            stack.enter_context(replaced_in_this_thread(owner, name, function))
        yield


def _default_generator(*_: Any) -> torch.Generator:
    return torch.default_generator


def _enter_gradients_mode(mode: Any) -> None:
    """Enter `no_grad`; what is left is whatever has been entered."""
    mode._inference_mode_context = torch.no_grad() if mode.mode else torch.enable_grad()
    mode._inference_mode_context.__enter__()


def _afresh(original: Callable[..., Any]) -> Callable[..., Any]:
    """A call without what was compiled before: that counts even where compiling is switched off."""

    def call(script: Any, *args: Any, **kwargs: Any) -> Any:
        script._debug_flush_compilation_cache()
        return original(script, *args, **kwargs)

    return call


@contextlib.contextmanager
def replaced_in_this_thread(owner: Any, name: str, function: Callable[..., Any]) -> Iterator[None]:
    """Call `function` instead of `owner.name`; other threads train meanwhile, with the latter.

    A Python module may have the name from builtins.
    """
    thread, own = threading.get_ident(), vars(owner).get(name)
    original: Callable[..., Any] = getattr(owner, name, None) or getattr(builtins, name)

    def either(*args: Any, **kwargs: Any) -> Any:
        called = function if threading.get_ident() == thread else original
        return called(*args, **kwargs)

    setattr(owner, name, either)
    try:
        yield
    finally:
        if own is None:
            delattr(owner, name)
        else:
            setattr(owner, name, own)
