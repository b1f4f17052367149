"""What a device keeps of a job: ranges of units at versions, put together in any cut."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from p2ptrain.errors import InternalError
from p2ptrain.model.capture.capture import capture
from p2ptrain.model.graph.description import ModelDescription
from p2ptrain.recovery.state_report import StateEntry, StateKind
from p2ptrain.recovery.version import Version
from p2ptrain.state.snapshot_store import SnapshotStore
from tests.support.stored_tensors import discard, stored

OLD, NEW = Version(4, 1), Version(8, 1)


@pytest.fixture(scope="module")
def description() -> ModelDescription:
    """Five units or so; the first and the last share a weight."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    model[3].weight = model[0].weight
    x = torch.randn(2, 4)
    return capture(model, cross_entropy, (x, torch.tensor([0, 1])), evaluation=False).description


def _tensors(
    description: ModelDescription, first: int, end: int, value: float
) -> dict[str, Tensor]:
    named: dict[str, Tensor] = {}
    for name in description.state_names(first, end):
        named[f"model:{name}"] = torch.full((4,), value)
        named[f"optimizer:{name}.momentum_buffer"] = torch.full((4,), -value)
    return named


def _same(found: Mapping[str, Tensor] | None, wanted: Mapping[str, Tensor]) -> bool:
    return found is not None and {n: id(t) for n, t in found.items()} == {
        n: id(t) for n, t in wanted.items()
    }


def test_any_part_of_a_range_is_here_and_nothing_else(description: ModelDescription) -> None:
    units = len(description.units)
    store = SnapshotStore(description)
    whole = _tensors(description, 0, units, 1.0)
    store.put(StateKind.KEPT, 0, units, OLD, whole, {})
    assert _same(stored(store, 0, units, OLD), whole)
    assert stored(store, 0, units, NEW) is None
    for first in range(units):
        for end in range(first + 1, units + 1):
            here = stored(store, first, end, OLD)
            assert here is not None
            names = set(description.state_names(first, end))
            assert {n for n in here if n.startswith("model:")} == {f"model:{n}" for n in names}
            assert len(here) == 2 * len(names)
    assert store.entries() == (StateEntry(0, units, OLD, StateKind.KEPT),)


def test_a_range_is_put_together_of_several_kinds(description: ModelDescription) -> None:
    units = len(description.units)
    middle = units // 2
    store = SnapshotStore(description)
    store.put(StateKind.KEPT, 0, middle, OLD, _tensors(description, 0, middle, 1.0), {})
    assert stored(store, 0, units, OLD) is None
    rest = _tensors(description, middle, units, 1.0)
    store.put(StateKind.FETCHED, middle, units, OLD, rest, {})
    store.put(StateKind.REPLICA, middle, units, NEW, _tensors(description, middle, units, 2.0), {})
    found = stored(store, 0, units, OLD)
    assert found is not None
    assert {name.partition(":")[2] for name in found if name.startswith("model:")} == set(
        description.state_names(0, units)
    )
    assert all(tensor.abs().max() == 1.0 for tensor in found.values())


def test_half_a_copy_is_refused(description: ModelDescription) -> None:
    store = SnapshotStore(description)
    tensors = _tensors(description, 0, 2, 1.0)
    del tensors[f"model:{description.state_names(0, 2)[0]}"]
    with pytest.raises(InternalError, match="lacks"):
        store.put(StateKind.REPLICA, 0, 2, OLD, tensors, {})
    assert store.entries() == ()


def test_the_optimizers_part_may_be_missing(description: ModelDescription) -> None:
    """Before the first update there is none, and of what was never updated there never is."""
    store = SnapshotStore(description)
    tensors = {n: t for n, t in _tensors(description, 0, 2, 1.0).items() if n.startswith("model:")}
    store.put(StateKind.KEPT, 0, 2, Version(0, 0), tensors, {})
    assert _same(stored(store, 0, 2, Version(0, 0)), tensors)


def test_two_slots_in_turn(description: ModelDescription) -> None:
    """The version to go back to stays whole while the next copy is written."""
    store = SnapshotStore(description)
    store.reserve([(StateKind.KEPT, 0, 2)])
    assert store.slot(StateKind.KEPT, 0, 2) is None
    first = _tensors(description, 0, 2, 1.0)
    store.put(StateKind.KEPT, 0, 2, OLD, first, {})
    assert store.slot(StateKind.KEPT, 0, 2) is None, "the only copy is not overwritten"
    second = _tensors(description, 0, 2, 2.0)
    store.put(StateKind.KEPT, 0, 2, NEW, second, {})
    discard(store, StateKind.KEPT, but=[NEW])
    assert stored(store, 0, 2, OLD) is None
    slot = store.slot(StateKind.KEPT, 0, 2)
    assert slot is not None
    assert _same(slot, first)
    assert store.slot(StateKind.KEPT, 0, 2) is None, "given away"
    assert _same(stored(store, 0, 2, NEW), second)


def test_dropping_gives_the_memory_back(description: ModelDescription) -> None:
    store = SnapshotStore(description)
    tensors = _tensors(description, 0, 2, 1.0)
    store.reserve([(StateKind.KEPT, 0, 2)])
    store.put(StateKind.KEPT, 0, 2, OLD, tensors, {})
    store.put(StateKind.REPLICA, 2, 3, OLD, _tensors(description, 2, 3, 1.0), {})
    store.put(StateKind.REPLICA, 2, 3, NEW, _tensors(description, 2, 3, 1.0), {})
    discard(store, StateKind.REPLICA, but=[NEW])
    assert {h.version for h in store.entries() if h.kind is StateKind.REPLICA} == {NEW}
    discard(store, StateKind.REPLICA)
    discard(store, StateKind.KEPT)
    assert store.entries() == ()
    assert store.slot(StateKind.KEPT, 0, 2) is not None, "a slot stays for the next copy"
    assert store.slot(StateKind.REPLICA, 2, 3) is None


def test_what_a_newer_copy_took_over_is_no_slot(description: ModelDescription) -> None:
    """The copy that it came from may have been forgotten while the newer one was read."""
    store = SnapshotStore(description)
    store.reserve([(StateKind.REPLICA, 0, 2)])
    old = _tensors(description, 0, 2, 1.0)
    store.put(StateKind.REPLICA, 0, 2, OLD, old, {})
    same = next(iter(old))
    discard(store, StateKind.REPLICA)
    new = {**_tensors(description, 0, 2, 2.0), same: old[same]}
    store.put(StateKind.REPLICA, 0, 2, NEW, new, {})
    slot = store.slot(StateKind.REPLICA, 0, 2)
    assert _same(slot, {name: tensor for name, tensor in old.items() if name != same})
