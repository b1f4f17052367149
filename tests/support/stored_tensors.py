"""Looks into a device's store of versions, and empties it."""

from __future__ import annotations

from collections.abc import Collection

from torch import Tensor

from p2ptrain.recovery.state_report import StateKind
from p2ptrain.recovery.version import Version
from p2ptrain.state.snapshot_store import SnapshotStore


def stored(
    store: SnapshotStore, first: int, end: int, version: Version
) -> dict[str, Tensor] | None:
    """The tensors of units [first, end) at `version` themselves; None unless all are here."""
    found: dict[str, Tensor] = {}
    while first < end:
        part = store.part_from(first, end, version)
        if part is None:
            return None
        found |= part.tensors
        first = part.end
    return found


def discard(store: SnapshotStore, kind: StateKind, but: Collection[Version] = ()) -> None:
    """Forget what is of this kind, except these versions."""
    for entry in store.entries():
        if entry.kind is kind and entry.version not in but:
            store.discard(entry)
