"""The tensors of one job that a device has beside those it trains, by version and units.

Snapshots of its own stage, backups of others, parts fetched for a generation to come: whole ranges
of units, of which any part can be read, so that stages may be cut elsewhere later.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import TypeAlias

from torch import Tensor

from p2ptrain.errors import InternalError
from p2ptrain.model.graph.description import ModelDescription
from p2ptrain.model.stage.mutated_state import unchanging_names
from p2ptrain.model.wire.tensor_codec import copy_into, like
from p2ptrain.recovery.state_report import StateEntry, StateKind
from p2ptrain.recovery.version import Version
from p2ptrain.state.checksums import ChecksumMismatch, Digest, find_damaged

Named: TypeAlias = Mapping[str, Tensor]
"""Tensors by `model:` and `optimizer:` names."""

_AT_HAND = (StateKind.FETCHED, StateKind.KEPT, StateKind.REPLICA)
"""Where the same is here more than once: what may be trained on itself goes first."""

Place: TypeAlias = tuple[StateKind, int, int]
"""(kind, first unit, end unit)."""


@dataclass(frozen=True, slots=True)
class StoredTensors:
    """Tensors of the units before `end`, at one version.

    Attributes:
        digests: of the tensors, as far as they were taken.
        stays: names of those that must not be trained on.
    """

    end: int
    tensors: Named
    digests: Mapping[str, Digest]
    stays: frozenset[str] = frozenset()

    @classmethod
    def whole(
        cls, end: int, tensors: Named, digests: Mapping[str, Digest] | None = None
    ) -> StoredTensors:
        """Of a copy of the whole model, which stays as it is."""
        return cls(end, tensors, digests or {}, frozenset(tensors))

    def joined(self, part: StoredTensors) -> StoredTensors:
        """With the tensors of the units behind these; of what both have, these count."""
        new = {name: t for name, t in part.tensors.items() if name not in self.tensors}
        digests = {name: part.digests[name] for name in new if name in part.digests}
        return StoredTensors(
            part.end,
            {**self.tensors, **new},
            {**self.digests, **digests},
            self.stays | part.stays.intersection(new),
        )

    def own(self) -> dict[str, Tensor]:
        """The same, to be trained on: what must stay is copied. For the compute thread.

        Raises:
            ChecksumMismatch: some have changed since their digests were taken.
        """
        wrong = find_damaged(self.tensors, self.digests)
        if wrong:
            raise ChecksumMismatch(f"{', '.join(wrong[:3])} changed in memory")
        return {
            name: copy_into(None, tensor) if name in self.stays else tensor
            for name, tensor in self.tensors.items()
        }


class SnapshotStore:
    """Immutable tensors, for the event loop alone. What is put in is not copied.

    Attributes:
        unchanging: `model:` names of what is the same in all versions: entries may share it with
            one another and with what is trained.
        unchanging_digests: of those, as far as they were taken.
    """

    def __init__(self, description: ModelDescription) -> None:
        """Of a model; nothing is there yet."""
        self.unchanging = frozenset(f"model:{name}" for name in unchanging_names(description))
        self.unchanging_digests: dict[str, Digest] = {}
        self._description = description
        self._entries: dict[StateEntry, StoredTensors] = {}
        self._reserved: frozenset[Place] = frozenset()
        self._spare: dict[Place, Named] = {}  # of released snapshots

    def put(
        self,
        kind: StateKind,
        first: int,
        end: int,
        version: Version,
        tensors: Named,
        digests: Mapping[str, Digest],
    ) -> None:
        """Have units [first, end) at `version`, whole; the same again is replaced.

        Args:
            kind: not LIVE.
            tensors: all of their tensors; of the optimizer's those that there are.
            digests: of the tensors by name, as far as they were taken.

        Raises:
            InternalError: a parameter or buffer is missing.
        """
        lacking = self.lacking(first, end, tensors)
        if lacking or kind is StateKind.LIVE:
            raise InternalError(f"{kind} copy of layers {first} to {end} lacks {lacking[:3]}")
        # what was fetched is this device's own, and what never changes is trained by none
        stays = frozenset() if kind is StateKind.FETCHED else tensors.keys() - self.unchanging
        self._entries[StateEntry(first, end, version, kind)] = StoredTensors(
            end, dict(tensors), dict(digests), frozenset(stays)
        )
        self._note(digests)
        # What has not changed came from an older copy, which may have been forgotten meanwhile.
        used = {id(tensor) for tensor in tensors.values()}
        for place, spare in self._spare.items():
            self._spare[place] = {n: t for n, t in spare.items() if id(t) not in used}

    def lacking(self, first: int, end: int, tensors: Named) -> list[str]:
        """Parameters and buffers of units [first, end) that are not among `tensors`."""
        wanted = (f"model:{name}" for name in self._description.state_names(first, end))
        return [name for name in wanted if name not in tensors]

    def part_from(self, first: int, end: int, version: Version) -> StoredTensors | None:
        """Of units [first, end) as many from `first` on as lie together; None = it is not here."""
        here = [h for h in self._entries if h.version == version and h.has(first)]
        if not here:
            return None
        entry = min(here, key=lambda h: _AT_HAND.index(h.kind))
        stored, stop = self._entries[entry], min(end, entry.end)
        tensors = tensors_of_units(self._description, stored.tensors, first, stop)
        digests = {name: stored.digests[name] for name in tensors if name in stored.digests}
        return StoredTensors(stop, tensors, digests, stored.stays.intersection(tensors))

    def of(self, entry: StateEntry) -> StoredTensors | None:
        """What is here of an entry, if it is."""
        return self._entries.get(entry)

    def seal(self, entry: StateEntry, part: StoredTensors, digests: Mapping[str, Digest]) -> bool:
        """Know these digests of `part`; False where it is not what is here any more."""
        if self._entries.get(entry) is not part:
            return False
        self._entries[entry] = replace(part, digests=dict(digests))
        self._note(digests)
        return True

    def _note(self, digests: Mapping[str, Digest]) -> None:
        for name in self.unchanging.intersection(digests):
            self.unchanging_digests[name] = digests[name]

    def entries(self) -> tuple[StateEntry, ...]:
        """Everything here."""
        return tuple(self._entries)

    def reserve(self, places: Collection[Place]) -> None:
        """Only copies of these leave their memory to the next one."""
        self._reserved = frozenset(places)
        self._spare = {place: t for place, t in self._spare.items() if place in self._reserved}

    def slot(self, kind: StateKind, first: int, end: int) -> Named | None:
        """Memory for the next copy of units [first, end), given away; None = there is none."""
        return self._spare.pop((kind, first, end), None)

    def discard(self, entry: StateEntry) -> None:
        """Forget this one, if it is here.

        It may not be read any more: its memory may be written to again (`slot`).
        """
        stored = self._entries.pop(entry, None)
        place = (entry.kind, entry.first, entry.end)
        if stored is not None and place in self._reserved:
            used = {id(t) for other in self._entries.values() for t in other.tensors.values()}
            self._spare[place] = {n: t for n, t in stored.tensors.items() if id(t) not in used}


def tensors_of_units(
    description: ModelDescription, tensors: Named, first: int, end: int
) -> dict[str, Tensor]:
    """Those of `tensors` that belong to units [first, end), the optimizer's included."""
    names = frozenset(description.state_names(first, end))
    return {name: tensor for name, tensor in tensors.items() if owner_of(name) in names}


def owner_of(name: str) -> str:
    """The parameter or buffer that a `model:` or `optimizer:` name belongs to."""
    kind, _, rest = name.partition(":")
    return rest if kind == "model" else rest.rpartition(".")[0]


def as_laid_out(model: Named, name: str, tensor: Tensor) -> Tensor:
    """What was read from a file as `name`, in new memory and as it lies in the model.

    A file keeps neither strides nor the place on the 64-byte grid, and both decide last bits.

    Args:
        model: the model's tensors, by `model:` names.
    """
    owner = model.get(f"model:{owner_of(name)}")  # None: a constant of an earlier loss, say
    if owner is None or owner.shape != tensor.shape or owner.dtype != tensor.dtype:
        return tensor.clone()
    return like(owner).copy_(tensor)
