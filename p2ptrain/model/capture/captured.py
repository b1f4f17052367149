"""A captured model on the data holder: its description, and the way back to the user's module.

Tensors that share memory are refused (`refuse_shared_memory`): in plain torch a write to one is a
write to the other, but every tensor travels by itself, so the two would drift apart silently. One
parameter or buffer under several names is one tensor and travels once.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from p2ptrain.errors import CaptureError, InternalError
from p2ptrain.model.capture.scored_module import Example, Foreign, Structure
from p2ptrain.model.capture.translated import LengthGuards
from p2ptrain.model.graph.decoding import is_dense
from p2ptrain.model.graph.description import Mode, ModelDescription, TensorDescription, TensorKind


class StateTable:
    """The tensors of the user's module (and of the loss), each under one canonical name.

    Names of the user's state_dict are kept; of several names of one tensor the first is canonical.
    Tensors that torch.export found elsewhere (in the loss, in closures, in plain attributes) are
    constants, named in angle brackets.
    """

    def __init__(self, module: nn.Module) -> None:
        self._tensors: dict[str, Tensor] = {}
        self._kinds: dict[str, TensorKind] = {}
        self._names: dict[int, str] = {}
        self._tied: dict[str, str] = {}
        self._constants: dict[tuple[object, ...], str] = {}
        self._taken: list[TensorMemory] = []
        for name, parameter in module.named_parameters(remove_duplicate=False):
            self._add(name, parameter, TensorKind.PARAMETER)
        for name, buffer in module.named_buffers(remove_duplicate=False):
            self._add(name, buffer, TensorKind.BUFFER)
        self._state_dict = tuple(
            name for name, value in module.state_dict().items() if isinstance(value, Tensor)
        )
        unknown = [n for n in self._state_dict if n not in self._tensors and n not in self._tied]
        if unknown:
            raise CaptureError(f"the model's state_dict has tensors it does not own: {unknown[:4]}")

    def _add(self, name: str, tensor: Tensor, kind: TensorKind) -> str:
        known = self._names.setdefault(id(tensor), name)
        if known != name:
            self._tied[name] = known
            return known
        self._tensors[name] = tensor
        self._kinds[name] = kind
        return name

    def name_of(self, exported: str, tensor: Tensor, written: bool) -> str:
        """Canonical name of a tensor that the exported program takes, and may write to."""
        own = exported.removeprefix("module.")
        name = self._find(exported.startswith("module."), own, tensor, written)
        constant = self._kinds[name] is TensorKind.CONSTANT
        kept = tensor if constant else self._tensors[name]
        self._taken.append(TensorMemory(_label(own), kept, written))
        return name

    def _find(self, of_module: bool, own: str, tensor: Tensor, written: bool) -> str:
        if of_module and (own in self._tensors or own in self._tied):
            return self._tied.get(own, own)
        if id(tensor) in self._names:
            return self._names[id(tensor)]
        if written:
            name = f"<written>.{len(self._tensors)}"
            return self._add(name, tensor, TensorKind.BUFFER)
        return self._constant(tensor)

    def refuse_shared_memory(self) -> None:
        """Refuse tensors that one update would write to together and devices would not.

        To be called when both modes have asked for their names.

        Raises:
            CaptureError: two have memory in common.
        """
        trainable = self.trainable_names()
        own = [
            TensorMemory(repr(name), tensor, name in trainable)
            for name, tensor in self._tensors.items()
            if self._kinds[name] is not TensorKind.CONSTANT
        ]
        taken, self._taken = self._taken, []
        refuse_shared_memory((*own, *taken))

    def _constant(self, tensor: Tensor) -> str:
        """One name for equal constants: the two modes lift them separately."""
        plain = tensor.detach().contiguous()
        content = hashlib.sha256(plain.flatten().view(torch.uint8).numpy().tobytes()).hexdigest()
        key = (tensor.dtype, tuple(tensor.shape), tensor.stride(), content)
        if key not in self._constants:
            self._constants[key] = f"<constant>.{len(self._constants)}"
            self._add(self._constants[key], tensor.detach(), TensorKind.CONSTANT)
        return self._constants[key]

    def trainable_names(self) -> frozenset[str]:
        """Parameters that take gradients."""
        return frozenset(
            name
            for name, tensor in self._tensors.items()
            if self._kinds[name] is TensorKind.PARAMETER and tensor.requires_grad
        )

    def describe(self, used: frozenset[str]) -> tuple[TensorDescription, ...]:
        """Every tensor of the state_dict, and those of the others that are `used`."""
        listed = set(self._state_dict)
        trainable = self.trainable_names()
        return tuple(
            TensorDescription(
                name,
                self._kinds[name],
                tensor.dtype,
                tuple(tensor.shape),
                _strides(tensor),
                name in trainable,
            )
            for name, tensor in self._tensors.items()
            if name in used or name in listed
        )

    def tied(self) -> dict[str, str]:
        """Other name -> canonical name."""
        return dict(self._tied)

    def state_dict_names(self) -> tuple[str, ...]:
        """Names in the user's state_dict, in its order."""
        return self._state_dict

    def tensor(self, name: str) -> Tensor:
        """The user's own tensor of that canonical or tied name."""
        return self._tensors[self._tied.get(name, name)]


@dataclass(frozen=True, slots=True)
class SampleLimits:
    """Which batches one graph is for.

    Attributes:
        refuses_one: whether plain torch's normalisations do not take a single one.
        known: samples below which the graph may not be the model.
        least: the fewest that are of use, at least `known`: with fewer an operator fails, or gives
            another shape than with more.
        most: samples above which the graph may not be the model; None where there are none.
        guards: of the lengths for which the graph is the model.
    """

    refuses_one: bool
    known: int
    least: int
    most: int | None
    guards: LengthGuards


class Captured:
    """What `capture` gives.

    Attributes:
        description: what travels.
        varying: sizes that differ from batch to batch.
        trains, evaluates: what batches it does both with.
        unscored: why evaluation gives no loss (a zero in its place), where the loss does not take
            what the model returns in evaluation mode; "" where it does.
        autocast: the type under which `torch.autocast` called both; None: neither was.
    """

    def __init__(
        self,
        description: ModelDescription,
        example: Example,
        targets: Sequence[int],
        output: Structure,
        table: StateTable,
        trains: SampleLimits,
        evaluates: SampleLimits,
        unscored: str,
        autocast: torch.dtype | None = None,
    ) -> None:
        self.description = description
        self.autocast = autocast
        self.trains, self.evaluates = trains, evaluates
        self.unscored = unscored
        self.varying = example.varying
        self._input, self._target = example.input, example.target
        self._targets = targets
        self._output = output
        self._table = table

    @property
    def most(self) -> int | None:
        """The most samples that can be computed together; None: any number."""
        known = [limits.most for limits in (self.trains, self.evaluates) if limits.most is not None]
        return min(known, default=None)

    def flatten_input(self, value: Any) -> list[Tensor]:
        """The tensors of a collated input, in the order of `description.inputs`.

        Raises:
            ScriptError: it is not built like the example.
        """
        return self._input.flatten(value)

    def entering(self, value: Any, mode: Mode) -> list[Tensor]:
        """Those of `flatten_input` that the first unit takes, in the order of `crossing(0, mode)`.

        Raises:
            ScriptError: it is not built like the example.
        """
        leaves = self.flatten_input(value)
        return [leaves[used.index] for used in self.description.crossing_values(0, mode)]

    def targets(self, batch: tuple[Any, Any]) -> list[Tensor]:
        """Those of a collated input and target that go to the stages that use them.

        In the order of `description.targets`.

        Raises:
            ScriptError: it is not built like the example.
        """
        leaves = self._leaves(batch)
        return [leaves[place] for place in self._targets]

    def with_leaves(
        self, batch: tuple[Any, Any], entering: Sequence[Tensor], targets: Sequence[Tensor]
    ) -> tuple[Any, Any]:
        """`batch` with other tensors for `entering` in training, and for `targets`."""
        leaves = self._leaves(batch)
        places = [used.index for used in self.description.crossing_values(0, "train")]
        for place, tensor in zip((*places, *self._targets), (*entering, *targets), strict=True):
            leaves[place] = tensor
        count = self._input.tensors
        return self._input.unflatten(leaves[:count]), self._target.unflatten(leaves[count:])

    def _leaves(self, batch: tuple[Any, Any]) -> list[Tensor]:
        return [*self.flatten_input(batch[0]), *self._target.flatten(batch[1])]

    def unflatten_output(self, tensors: Sequence[Tensor]) -> Any:
        """The model's output from its tensors (what evaluation gives after the loss).

        Leaves that are no tensors have the value they had at capture; caches are None, and a
        `Foreign` stands for what can have no value.
        """
        return self._output.unflatten(tensors)

    @property
    def foreign_output(self) -> tuple[Foreign, ...]:
        """What stands in the model's output for leaves that metrics cannot be given."""
        return tuple(c for c in self._output.constants.values() if isinstance(c, Foreign))

    def tensor(self, name: str) -> Tensor:
        """The user's own tensor of that canonical or tied name."""
        return self._table.tensor(name)

    def state(self) -> dict[str, Tensor]:
        """The user's own tensors (not copies) by name, tied names and constants included."""
        names = (*self.description.tensors_by_name, *self.description.tied)
        return {name: self._table.tensor(name).detach() for name in names}

    def state_dict(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The user's state_dict, with these tensors by canonical name in their places."""
        tied = self.description.tied
        names = self._table.state_dict_names()
        found = {name: state.get(tied.get(name, name)) for name in names}
        return {n: self._table.tensor(n) if t is None else t for n, t in found.items()}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Write tensors, by canonical name, into the user's module in place.

        Raises:
            InternalError: the model has no tensor of that name and shape.
        """
        for name, tensor in state.items():
            if name not in self.description.tensors_by_name:
                if name in self.description.tied:
                    continue
                raise InternalError(f"the model has no tensor {name!r}")
            own = self._table.tensor(name)
            if own.shape != tensor.shape or own.dtype != tensor.dtype:
                raise InternalError(f"tensor {name!r} has another shape or type than the model's")
            if not repeats_itself(own):  # else nothing has written to it, nor can
                with torch.no_grad():
                    own.copy_(tensor)


def _label(name: str) -> str:
    """What a message calls a tensor; those in closures have no name."""
    return "a tensor outside the model" if "lifted_tensor" in name else repr(name)


def _strides(tensor: Tensor) -> tuple[int, ...]:
    """The tensor's own strides; plain ones where its memory has gaps or overlaps."""
    if is_dense(tensor.shape, tensor.stride()):
        return tensor.stride()
    return torch.empty(tensor.shape, device="meta").stride()


@dataclass(frozen=True, slots=True)
class TensorMemory:
    """A tensor of the model.

    Attributes:
        label: what a message calls it.
        tensor: the user's own.
        changes: whether training writes to it.
    """

    label: str
    tensor: Tensor
    changes: bool

    @property
    def first(self) -> int:
        """Address of its first element."""
        return self.tensor.data_ptr()

    @property
    def end(self) -> int:
        """Address behind its last element."""
        reach = sum(
            (n - 1) * s for n, s in zip(self.tensor.shape, self.tensor.stride(), strict=True)
        )
        return self.first + (reach + 1) * self.tensor.element_size()


def repeats_itself(tensor: Tensor) -> bool:
    """Whether several of its elements are the same memory, as `.expand()` gives it."""
    return any(n > 1 and s == 0 for n, s in zip(tensor.shape, tensor.stride(), strict=True))


def refuse_shared_memory(tensors: Iterable[TensorMemory]) -> None:
    """Refuse memory that tensors, or elements of one, have in common and training writes to.

    Raises:
        CaptureError: there is such; names the tensors.
    """
    tensors = list(tensors)
    for one in tensors:
        if one.changes and repeats_itself(one.tensor):
            raise CaptureError(
                f"elements of {one.label} lie in the same memory (.expand()), to which plain torch "
                "does not write either: make a copy with .clone()"
            )
    for one, other in _neighbours(tensors):
        if one.tensor is not other.tensor and (one.changes or other.changes) and _meet(one, other):
            raise CaptureError(
                f"{one.label} and {other.label} lie in the same memory, but devices would keep "
                "them apart. Tie the parameter or module itself (decoder.weight = encoder.weight, "
                "no .data), compute a view in forward(), or make a copy with .clone()"
            )


def _neighbours(tensors: Iterable[TensorMemory]) -> Iterator[tuple[TensorMemory, TensorMemory]]:
    """Pairs whose first and last elements leave room for common ones."""
    placed = [t for t in tensors if t.tensor.numel() and t.first]
    placed.sort(key=lambda t: t.first)
    for index, one in enumerate(placed):
        for other in placed[index + 1 :]:
            if other.first >= one.end:
                break
            yield one, other


def _meet(one: TensorMemory, other: TensorMemory) -> bool:
    """Whether they have an element in common: columns of one matrix, for example, have none."""
    size = one.tensor.element_size()
    start = min(one.first, other.first)
    if other.tensor.element_size() != size or (one.first - other.first) % size:
        return True
    marks = torch.zeros((max(one.end, other.end) - start) // size, dtype=torch.bool)
    theirs, its = (
        marks.as_strided(t.tensor.shape, t.tensor.stride(), (t.first - start) // size)
        for t in (one, other)
    )
    theirs.fill_(True)
    return bool(its.any())
