"""A stage: some consecutive units with their weights, computing exactly what plain torch would.

Several things make the difference between "the same model" and the same bits; each was measured:

- What arrives is no autograd leaf but the result of a node of its own (`_Receive`), so a gradient
  that comes back for a value which is also passed on is summed in plain torch's order (the later
  stages' part first), and leaves with the strides it has.
- The backward of a micro-batch starts from all outputs at once, and parameters accumulate through
  autograd's own nodes. A parameter that other stages use too is received like an input: its
  gradient begins with what the later stages made of it.
- Tensors keep the strides that the user's have.

A backward may be split in two, so that what others wait for comes first; see `split_backward`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from p2ptrain.devices.interface import ComputeDevice
from p2ptrain.devices.processor import HOST
from p2ptrain.errors import InternalError
from p2ptrain.model.graph.description import ModelDescription, TensorKind
from p2ptrain.model.stage.failures import NonFiniteUnit, find_non_finite
from p2ptrain.model.stage.mutated_state import MutatedParameters, rewritten_names
from p2ptrain.model.stage.program import Passing, Program, Seed
from p2ptrain.model.stage.running_statistics import RunningStatistics, written_buffers
from p2ptrain.model.stage.split_backward import (
    NoGradients,
    WeightGradients,
    accumulate,
    compute_together,
)

NO_SEED: Seed = (0, 0, 0)


@dataclass(slots=True)
class _InFlightMicroBatch:
    """A micro-batch between its forward and its backward.

    Attributes:
        inputs, targets, seed, parameters: as given to `forward`.
        roots: what the backward starts from: the outputs, at the last stage the weighted loss.
        gradients: of the inputs and then of the tied parameters, filled in by the backward.
        leaves: where autograd's graph ends at those.
        tied: the tied parameters as this micro-batch has received them.
        later: the weights' part of the backward, where it is split.
        copies: this micro-batch's own of what its forward has written to.
        counts: False = the loss is a mean of nothing, and the backward adds nothing.
    """

    inputs: Sequence[Tensor]
    targets: Sequence[Tensor]
    seed: Seed | None
    roots: list[Tensor]
    gradients: list[Tensor | None]
    leaves: list[Tensor]
    tied: list[Tensor]
    later: WeightGradients | None
    parameters: Mapping[str, Tensor]
    copies: Mapping[str, Tensor]
    counts: bool = True


class Stage:
    """Units [first, end) of a model, with their own copy of the weights.

    All tensors that are given to it and that it gives are on its device, but for `state` and
    `parameters`: they are where it is updated.

    Attributes:
        device: where its operators run, on tensors that live there.
        home: where it is updated: its device, or the host, where the devices of a
            group compute with different things, and must not round differently.

    Not thread-safe: all calls come from one thread, as torch's order of gradients requires.
    """

    def __init__(
        self,
        description: ModelDescription,
        first: int,
        end: int,
        state: Mapping[str, Tensor],
        *,
        copy: bool = True,
        tied: Mapping[str, bool] | None = None,
        shared: bool = False,
        device: ComputeDevice = HOST,
        home: ComputeDevice | None = None,
        hashes: bool = False,
    ) -> None:
        """Build the stage.

        Args:
            description: of the whole model.
            first, end: its units.
            state: at least the tensors of `description.state_names(first, end)`, by name, in host
                memory or the device's.
            copy: False computes with (and writes to) the tensors of `state` themselves.
            tied: parameters that other stages use too -> whether this stage is the first of them.
                Each micro-batch's gradient goes from the last of them to the first, which has it
                in `.grad`.
            shared: several devices hold this stage. What training writes to buffers is then kept
                in `statistics`, until the group has added it up.
            device, home: see the class.
            hashes: as `Program` has it.

        Raises:
            NotShareable: `shared`, and it writes what a group cannot add up.
        """
        self.description = description
        self.first, self.end = first, end
        self.device = device
        self.home = device if home is None or device.is_host else home
        self._hashes = hashes
        self._is_last = end == len(description.units)
        self._tied = tied or {}
        self._state = {
            name: _own(description, name, state, copy, device)
            for name in description.state_names(first, end)
        }
        self.statistics: RunningStatistics | None = None
        training_state = self._state
        self._at_home = self._state
        if shared:
            written = written_buffers(description, first, end)
            if self.home is not device:
                self._at_home = self._state | self._copies({*self._trainable(), *written})
            self.statistics = RunningStatistics(written, self._state, self._at_home)
            training_state = self._state | self.statistics.scratch
        rewritten = frozenset[str]() if shared else rewritten_names(description, first, end)
        self._rewritten = MutatedParameters(rewritten, self._state)
        self._train = Program(
            *(description, first, end, "train", training_state, self._tied, rewritten),
            device=device,
            hashes=hashes,
        )
        self._evaluate: Program | None = None
        self._uses = {
            id(self._state[name]): count for name, count in self._train.parameter_uses.items()
        }
        self._held: dict[int, _InFlightMicroBatch] = {}
        self._later: dict[int, WeightGradients] = {}

    def _copies(self, names: Collection[str]) -> dict[str, Tensor]:
        """In host memory."""
        own = {name: tensor for name, tensor in self._state.items() if name in names}
        copies = zip(own.items(), self.device.fetched([*own.values()]), strict=True)
        return {
            name: nn.Parameter(copy) if isinstance(tensor, nn.Parameter) else copy
            for (name, tensor), copy in copies
            if copy is not None
        }

    @torch.no_grad()
    def take_update(self) -> None:
        """It is made at home: compute with what it gives."""
        if self._at_home is not self._state:
            for name, tensor in self._at_home.items():
                if tensor is not self._state[name]:
                    self._state[name].copy_(self.device.copy_in(tensor))

    def forward(
        self,
        key: int,
        inputs: Sequence[Tensor],
        targets: Sequence[Tensor],
        *,
        weight: float | None = None,
        scale: float = 0.0,
        seed: Seed | None = NO_SEED,
        share: float = 1.0,
        split: bool = False,
        parameters: Mapping[str, Tensor] | None = None,
        passing: Passing | None = None,
    ) -> list[Tensor]:
        """Run the training graph and keep what the backward needs under `key`.

        Args:
            key: number of the micro-batch.
            inputs: what crosses into the first unit, in the order of `description.crossing`.
            targets: all leaves of the loss's target, or none where no unit here uses any.
            weight: of this micro-batch's loss in the backward (last stage only; None is 1). With 0
                the backward gives zeros, whatever the loss is: the mean of nothing is NaN.
            scale: of the loss in the backward, beside its weight; 0.0: none.
            seed: (job, step, micro-batch) for dropout and its like; None: torch's generator goes
                on as it is.
            share: part of the micro-batch's samples that this device of a group takes.
            split: `backward_inputs` and `backward_weights` will follow instead of `backward`.
            parameters: leaves by name that take the place of the stage's own; the backward adds
                gradients to them. None that the forward writes to.
            passing: receives how far it has come.

        Returns:
            What crosses out of the last unit, detached; at the last stage the unweighted loss.
        """
        if key in self._held or key in self._later:
            raise InternalError(f"micro-batch {key} was already forwarded")
        gradients: list[Tensor | None] = [None] * (len(inputs) + len(self._tied))
        leaves: list[Tensor] = []
        counts = weight != 0.0 or not self._is_last
        later = WeightGradients(self._uses) if split and counts else None
        with torch.enable_grad():
            received = list(inputs)
            for position, described in enumerate(self._train.inputs):
                if described.may_require_grad:
                    leaf = inputs[position].detach().requires_grad_()
                    leaves.append(leaf)
                    received[position] = _receive(leaf, gradients, position)
            tied: dict[str, Tensor] = {}
            for position, name in enumerate(self._tied, len(inputs)):
                leaf = self._state[name].detach().requires_grad_()
                leaves.append(leaf)
                tied[name] = _receive(leaf, gradients, position)
            given = parameters or {}
            copies = self._rewritten.copies()
            instead = {**given, **copies, **tied}
            outputs = self._run(key, share, received, targets, seed, later, instead, passing)
            self._rewritten.take(copies)
            roots = list(outputs)
            if self._is_last and weight is not None and counts:
                roots = [outputs[0] * weight]
                if scale:  # a tensor, as GradScaler has it: a loss in float16 becomes float32
                    roots = [roots[0] * torch.tensor(scale, device=outputs[0].device)]
        self._held[key] = _InFlightMicroBatch(
            *(inputs, targets, seed, roots, gradients, leaves, [*tied.values()]),
            *(later, given, copies, counts),
        )
        return [output.detach() for output in outputs]

    def _run(
        self,
        key: int,
        share: float,
        inputs: Sequence[Tensor],
        targets: Sequence[Tensor],
        seed: Seed | None,
        later: WeightGradients | None,
        instead: Mapping[str, Tensor],
        passing: Passing | None,
    ) -> list[Tensor]:
        watch = None if later is None else later.watch
        if self.statistics is not None:
            self.statistics.before_forward()
        before = None if passing is None else passing.unit
        outputs = self._train.run(
            inputs, targets, seed, watch=watch, instead=instead, before=before
        )
        if passing is not None:
            passing.end()
        if self.statistics is not None:
            self.statistics.after_forward(key, share)
        if later is not None:
            later.settle()
        return outputs

    def backward(
        self,
        key: int,
        gradients: Sequence[Tensor | None] = (),
        *,
        tied: Sequence[Tensor | None] = (),
        final: Callable[[str], None] | None = None,
    ) -> list[Tensor | None]:
        """Run the backward of micro-batch `key`; parameters add to their `.grad`.

        Args:
            key: of an earlier `forward`.
            gradients: one for each of its outputs, None where none came back; empty at the last
                stage.
            tied: of each tied parameter what the later stages that use it made; None where none do.
            final: in the last backward before an update, called with the name of each trainable
                parameter as soon as its gradient will not change any more.

        Returns:
            One for each of its inputs, None for those that need none; then one for each tied
            parameter of which this stage is not the first.
        """
        held = self._held.pop(key)
        if not held.counts:
            with self._reporting(final):
                for parameter in self._reached(held):
                    accumulate(parameter, torch.zeros_like(parameter))
            return self._leaving(held)
        if held.later is not None:
            held.later.cancel()
        roots, starts = self._starts(held, gradients, tied)
        with self._reporting(final):
            if roots:
                with self._rewritten.lent(held.copies):
                    torch.autograd.backward(roots, starts)
        return self._leaving(held)

    def backward_inputs(
        self,
        key: int,
        gradients: Sequence[Tensor | None] = (),
        *,
        tied: Sequence[Tensor | None] = (),
    ) -> list[Tensor | None]:
        """Run the part of a backward that others wait for; `backward_weights` does the rest.

        Args:
            key: of an earlier `forward` with `split`.
            gradients, tied: as for `backward`.

        Returns:
            As `backward`. Parameters that cannot be split have added to their `.grad`.
        """
        held = self._held.get(key)
        if held is None or (held.later is None and held.counts):
            raise InternalError(f"micro-batch {key} was not forwarded with split=True")
        del self._held[key]
        if held.later is None:
            self._later[key] = NoGradients(self._reached(held))
            return self._leaving(held)
        later = self._later[key] = held.later
        roots, starts = self._starts(held, gradients, tied)
        here = {n: p for n, p in self._trainable().items() if id(p) not in later.parameters}
        own = [copy for copy in held.copies.values() if copy.requires_grad]
        wanted = [*held.leaves, *here.values(), *own]
        if roots and wanted:
            with self._rewritten.lent(held.copies):
                torch.autograd.backward(roots, starts, inputs=wanted)
        return self._leaving(held)

    def backward_weights(self, *keys: int, final: Callable[[str], None] | None = None) -> None:
        """Add what `backward_inputs` has left out to the parameters' `.grad`.

        Args:
            keys: of earlier `backward_inputs`, ascending, as calls should be: for plain torch's
                sums. Of several the last layers come first, so that `final` is called early.
            final: as for `backward`; no `backward_inputs` may come between this and the update.
        """
        parts = [self._take_later(key) for key in keys]
        later = frozenset[int]().union(*(part.parameters for part in parts))
        trainable = self._trainable()
        names = {id(parameter): name for name, parameter in trainable.items()}
        waiting = dict.fromkeys(trainable)

        def report(done: Iterable[str]) -> None:
            for name in done:
                del waiting[name]
                if final is not None:
                    final(name)

        report([name for key, name in names.items() if key not in later])

        with torch.no_grad():
            for parameter in compute_together(parts, accumulate):
                report([names[id(parameter)]])
        report(list(waiting))

    def _take_later(self, key: int) -> WeightGradients:
        part = self._later.pop(key, None)
        if part is None:
            raise InternalError(f"nothing is left of the backward of micro-batch {key}")
        return part

    def _reached(self, held: _InFlightMicroBatch) -> list[nn.Parameter]:
        """The parameters to which a backward leads; `held.gradients` become zeros where it does.

        No number of it is used: a mean of nothing has none.
        """
        roots = [root for root in held.roots[:1] if _takes_gradient(root)]
        held.roots.clear()
        named = {**self._trainable(), **held.parameters, **held.copies}
        named = {name: tensor for name, tensor in named.items() if tensor.requires_grad}
        wanted = [*held.leaves, *named.values()]
        if not roots or not wanted:
            return []
        found = torch.autograd.grad(roots, wanted, allow_unused=True)[len(held.leaves) :]
        held.gradients[:] = [None if g is None else torch.zeros_like(g) for g in held.gradients]
        adding = {**self._state, **held.parameters}
        return [
            parameter
            for name, gradient in zip(named, found, strict=True)
            if gradient is not None and isinstance(parameter := adding[name], nn.Parameter)
        ]

    def _leaving(self, held: _InFlightMicroBatch) -> list[Tensor | None]:
        """After the backward: what the stages before get; the rest is added here."""
        count = len(held.inputs)
        leaving = held.gradients[:count]
        for (name, is_first), gradient in zip(
            self._tied.items(), held.gradients[count:], strict=True
        ):
            parameter = self._state[name]
            if not is_first:
                leaving.append(gradient)
            elif parameter.grad is not None and gradient is not None:
                parameter.grad.add_(gradient)
            elif gradient is not None:  # a copy: it may be another tensor's gradient as well
                parameter.grad = torch.empty_like(parameter).copy_(gradient)
        return leaving

    def _starts(
        self,
        held: _InFlightMicroBatch,
        gradients: Sequence[Tensor | None],
        tied: Sequence[Tensor | None],
    ) -> tuple[list[Tensor], list[Tensor | None]]:
        """Tensors from which the backward starts, taken from `held`, and their gradients."""
        given: Sequence[Tensor | None] = gradients or [None] * len(held.roots)
        roots: list[Tensor] = []
        starts: list[Tensor | None] = []
        for root, gradient in zip(held.roots, given, strict=True):
            if _takes_gradient(root) and (self._is_last or gradient is not None):
                roots.append(root)
                starts.append(gradient)
        held.roots.clear()
        for received, gradient in zip(held.tied, tied, strict=False):
            if gradient is not None:
                roots.append(received)
                starts.append(gradient)
        return roots, starts

    @contextmanager
    def _reporting(self, final: Callable[[str], None] | None) -> Iterator[None]:
        """Call `final` when autograd has added to a parameter; at the end for all the others."""
        if final is None:
            yield
            return
        waiting = self._trainable()
        names = {id(parameter): name for name, parameter in waiting.items()}

        def added(parameter: Tensor) -> None:
            name = names[id(parameter)]
            if waiting.pop(name, None) is not None:
                final(name)

        hooks = [
            parameter.register_post_accumulate_grad_hook(added)  # type: ignore[no-untyped-call]
            for name, parameter in waiting.items()
            if name not in self._tied
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
        for name in waiting:
            final(name)

    def _trainable(self) -> dict[str, nn.Parameter]:
        return {name: p for name, p in self.inside().items() if p.requires_grad}

    def evaluate(
        self,
        inputs: Sequence[Tensor],
        targets: Sequence[Tensor],
        *,
        seed: Seed | None = NO_SEED,
        instead: Mapping[str, Tensor] | None = None,
    ) -> list[Tensor]:
        """Run the evaluation graph without gradients; returns what crosses out of the last unit.

        At the last stage: the loss, then the tensors of the model's output. None of it shares
        memory with the stage's own tensors, which may change before it is read.

        Args:
            instead: tensors by name that take the place of the stage's own; also at home.
        """
        instead = {name: self.device.copy_in(one) for name, one in (instead or {}).items()}
        if self._evaluate is None:
            units = (self.first, self.end)
            self._evaluate = Program(
                *(self.description, *units, "eval", self._state),
                device=self.device,
                hashes=self._hashes,
            )
        tensors = (*self._state.values(), *instead.values())
        own = {tensor.untyped_storage().data_ptr() for tensor in tensors}
        with torch.no_grad():
            results = self._evaluate.run(inputs, targets, seed, instead=instead)
            return [r.clone() if r.untyped_storage().data_ptr() in own else r for r in results]

    def first_non_finite(self, key: int) -> NonFiniteUnit | None:
        """Where a micro-batch that is between forward and backward here stopped being finite.

        Runs it again unit by unit; buffers keep their values.
        """
        held = self._held.get(key)
        if held is None:
            return None
        units = range(self.first, self.end)
        state = self._state | dict(held.parameters) | dict(held.copies)
        return find_non_finite(
            *(self.description, units, state, held.inputs, held.targets, held.seed or NO_SEED),
            device=self.device,
            hashes=self._hashes,
        )

    def parameters(self) -> dict[str, nn.Parameter]:
        """Parameters by canonical name, in the model's order; frozen ones too."""
        return {n: t for n, t in self._at_home.items() if isinstance(t, nn.Parameter)}

    def inside(self) -> dict[str, nn.Parameter]:
        """The same where it computes, with the gradients of its backwards."""
        return {n: t for n, t in self._state.items() if isinstance(t, nn.Parameter)}

    def state(self) -> dict[str, Tensor]:
        """Parameters, buffers and constants by canonical name: the tensors themselves."""
        return dict(self._at_home)

    def held(self) -> int:
        """How many micro-batches wait for their backward, or for its second part."""
        return len(self._held) + len(self._later)

    def forget_held(self) -> None:
        """Give up all micro-batches that wait for their backward, or for its second part."""
        self._held.clear()
        self._later.clear()


def _takes_gradient(value: Tensor) -> bool:
    """Not a view that was made in `torch.no_grad()`, though torch says that it requires one."""
    return value.requires_grad and (value.grad_fn is not None or not value._is_view())


class _Receive(torch.autograd.Function):
    """Identity on what arrived; its backward keeps the gradient instead of passing it on."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, gradients: list[Tensor | None], position: int) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.gradients, ctx.position = gradients, position
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, None, None]:
        ctx.gradients[ctx.position] = gradients[0]
        return None, None, None


def _receive(leaf: Tensor, gradients: list[Tensor | None], position: int) -> Tensor:
    result: Tensor = _Receive.apply(leaf, gradients, position)  # type: ignore[no-untyped-call]
    return result


def _own(
    description: ModelDescription,
    name: str,
    state: Mapping[str, Tensor],
    copy: bool,
    device: ComputeDevice,
) -> Tensor:
    """The stage's tensor of that name, with the user's strides, in torch's own memory."""
    if name not in state:
        raise InternalError(f"tensor {name!r} of this stage is missing")
    described, given = description.tensors_by_name[name], state[name].detach()
    if tuple(given.shape) != described.shape or given.dtype is not described.dtype:
        raise InternalError(f"tensor {name!r} has shape {tuple(given.shape)} and {given.dtype}")
    tensor = given
    if copy or given.stride() != described.strides:
        tensor = torch.empty_strided(described.shape, described.strides, dtype=described.dtype)
        tensor.copy_(given)
    tensor = device.copy_in(tensor)
    if described.kind is TensorKind.PARAMETER:
        return nn.Parameter(tensor, requires_grad=described.trainable)
    return tensor
