"""The tensors of one job that a device has beside those it trains, by version and units.

Copies of its own stage to go back to, copies for others, parts fetched for an epoch to come: whole
ranges of units, of which any part can be asked for, so that stages may be cut elsewhere later.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from torch import Tensor

from p2ptrain.errors import InternalError
from p2ptrain.model.description import ModelDescription
from p2ptrain.training.digests import Digest
from p2ptrain.training.recovery.holdings import Holding, Kind
from p2ptrain.training.recovery.version import Version

Named: TypeAlias = Mapping[str, Tensor]
"""Tensors by `model:` and `optimizer:` names."""


@dataclass(frozen=True, slots=True)
class _Entry:
    tensors: Named
    digests: Mapping[str, Digest]


class VersionStore:
    """Immutable tensors, for the event loop alone. What is put in is not copied."""

    def __init__(self, description: ModelDescription) -> None:
        """Of a model; nothing is there yet."""
        self._description = description
        self._entries: dict[Holding, _Entry] = {}
        self._spare: dict[tuple[int, int], Named] = {}  # of kept copies that nobody wants now

    @property
    def nbytes(self) -> int:
        """Memory of all tensors, that of spare slots included."""
        named = [*(entry.tensors for entry in self._entries.values()), *self._spare.values()]
        return sum(tensor.nbytes for tensors in named for tensor in tensors.values())

    def put(
        self,
        kind: Kind,
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
        wanted = [f"model:{name}" for name in self._description.state_names(first, end)]
        lacking = [name for name in wanted if name not in tensors]
        if lacking or kind is Kind.LIVE:
            raise InternalError(f"{kind} copy of units {first} to {end} lacks {lacking[:3]}")
        self._entries[Holding(first, end, version, kind)] = _Entry(dict(tensors), dict(digests))

    def named(self, first: int, end: int, version: Version) -> dict[str, Tensor] | None:
        """The tensors of units [first, end) at `version` themselves; None unless all are here."""
        entries = self._covering(first, end, version)
        if entries is None:
            return None
        found = (of_units(self._description, e.tensors, first, end) for e in entries)
        return {name: tensor for tensors in found for name, tensor in tensors.items()}

    def named_from(self, first: int, end: int, version: Version) -> tuple[int, Named] | None:
        """As `named`, of as many units from `first` on as are here: where they end, tensors.

        None where unit `first` is not here at `version`.
        """
        absent = self.missing(first, end, version)
        stop = absent[0][0] if absent else end
        named = self.named(first, stop, version) if stop > first else None
        return None if named is None else (stop, named)

    def digests(self, first: int, end: int, version: Version) -> dict[str, Digest]:
        """Of what `named` gives, as far as they were taken."""
        entries = self._covering(first, end, version) or []
        return {name: digest for entry in entries for name, digest in entry.digests.items()}

    def missing(self, first: int, end: int, version: Version) -> tuple[tuple[int, int], ...]:
        """The ranges of units in [first, end) that are not here at `version`, ascending."""
        here = [holding for holding in self._entries if holding.version == version]
        absent = [u for u in range(first, end) if not any(holding.has(u) for holding in here)]
        starts = [unit for unit in absent if unit - 1 not in absent]
        ends = [unit + 1 for unit in absent if unit + 1 not in absent]
        return tuple(zip(starts, ends, strict=True))

    def holdings(self) -> tuple[Holding, ...]:
        """Everything here."""
        return tuple(self._entries)

    def slot(self, first: int, end: int) -> Named | None:
        """Memory for the next kept copy of units [first, end), given away; None = there is none."""
        return self._spare.pop((first, end), None)

    def discard(self, holding: Holding) -> None:
        """Forget this one, if it is here; as `drop`."""
        entry = self._entries.pop(holding, None)
        if entry is not None and holding.kind is Kind.KEPT:
            self._spare[holding.first, holding.end] = entry.tensors

    def drop(self, kind: Kind | None = None, *, but: Collection[Version] = ()) -> None:
        """Forget what is of this kind (None: of any), except these versions.

        Nobody may read it any more: the memory of a kept copy is written again (`slot`).
        """
        for holding in list(self._entries):
            if kind in (None, holding.kind) and holding.version not in but:
                self.discard(holding)
        if kind is None and not but:
            self._spare.clear()

    def _covering(self, first: int, end: int, version: Version) -> list[_Entry] | None:
        if self.missing(first, end, version):
            return None
        return [
            entry
            for holding, entry in self._entries.items()
            if holding.version == version and holding.first < end and first < holding.end
        ]


def of_units(
    description: ModelDescription, tensors: Named, first: int, end: int
) -> dict[str, Tensor]:
    """Those of `tensors` that belong to units [first, end), the optimizer's included."""
    names = frozenset(description.state_names(first, end))

    def owner(name: str) -> str:
        kind, _, rest = name.partition(":")
        return rest if kind == "model" else rest.rpartition(".")[0]

    return {name: tensor for name, tensor in tensors.items() if owner(name) in names}
