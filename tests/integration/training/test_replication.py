"""Copies of stages at neighbours: what they are, what becomes of them, and going back to them.

The holder's account of copies is watched, so that a test can say when which is kept.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from p2ptrain import failpoints
from p2ptrain.events import Event, Recovered, Step
from p2ptrain.holder.rounds.generation import HolderGeneration
from p2ptrain.holder.snapshots.snapshot_manager import SnapshotManager
from p2ptrain.job.job import Job
from p2ptrain.messages.round_orders import RoundOrder
from p2ptrain.messages.snapshots import SnapshotKept
from p2ptrain.model.wire.tensor_codec import pack
from p2ptrain.net.message import Message
from p2ptrain.recovery.backup_placement import SLOTS_WITH_CHECKPOINTS
from p2ptrain.recovery.state_report import StateEntry, StateKind
from p2ptrain.recovery.version import Version
from p2ptrain.runtime.live_stage import LiveStage
from p2ptrain.state.checksums import digests_of
from p2ptrain.state.snapshot_store import SnapshotStore
from p2ptrain.worker import snapshot_service
from tests.integration.training.household import Devices, devices
from tests.integration.training.jobs import (
    STEPS,
    assert_undisturbed,
    momentum_job,
    one_stage_each,
    undisturbed,
)
from tests.support.memory_household import memory_id

R, LATER = Version(4, 1), Version(8, 1)


class Account:
    """Watches the holder's account of copies, which orders them after `steps` alone.

    Attributes:
        kept: what devices reported, in order.
        stable: the newest version that everybody has reported.
        was_stable: all that were, in order.
        gates: before the round of these steps is ordered, what is awaited.
        versions: that generations began with.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *steps: int) -> None:
        self.kept: list[tuple[str, SnapshotKept]] = []
        self.stable: Version | None = None
        self.was_stable: list[Version] = []
        self.gates: dict[int, Callable[[], bool]] = {}
        self.versions: list[Version] = []
        self._changed = asyncio.Event()
        account = self

        order, begin = HolderGeneration.order, HolderGeneration.begin
        hear, keep_only = SnapshotManager._kept, SnapshotManager.keep_only

        def wants(copies: SnapshotManager, step: int) -> bool:
            return step in steps

        async def gated(generation: HolderGeneration, what: RoundOrder) -> None:
            gate = account.gates.pop(what.round.step, None)
            if gate is not None:
                await account.until(gate)
            await order(generation, what)

        async def noted(generation: HolderGeneration) -> bool:
            if not generation._has_begun:
                account.versions.append(generation.assignment.version)
            return await begin(generation)

        async def heard(copies: SnapshotManager, peer: str, message: Message) -> None:
            name = copies._mesh.members[peer].name
            account.kept.append((name, SnapshotKept.read(message.fields)))
            await hear(copies, peer, message)
            account.changed()

        def told(
            copies: SnapshotManager, versions: Collection[Version], members: Collection[str]
        ) -> None:
            account.stable = next(iter(versions))
            account.was_stable.append(account.stable)
            keep_only(copies, versions, members)

        monkeypatch.setattr(SnapshotManager, "wants", wants)
        monkeypatch.setattr(SnapshotManager, "_kept", heard)
        monkeypatch.setattr(SnapshotManager, "keep_only", told)
        monkeypatch.setattr(HolderGeneration, "order", gated)
        monkeypatch.setattr(HolderGeneration, "begin", noted)

    def changed(self) -> None:
        """Somebody may wait for it."""
        self._changed.set()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait for what devices tell; the test's time limit is the deadline."""
        while not condition():
            self._changed.clear()
            await self._changed.wait()


def _backup_peers(household: Devices) -> list[tuple[tuple[int, int], str, str]]:
    """Of each stage: its units, its device, who keeps its copies."""
    stages = household.plan.stages
    names = [stage.devices[0].name for stage in stages]
    near = [*names[1:], names[-2]]
    units = [(stage.units[0], stage.units[1]) for stage in stages]
    return list(zip(units, names, near, strict=True))


def _store(household: Devices, name: str) -> SnapshotStore:
    part = household.members[name].service.slot.part
    assert part is not None
    copies = part._store.copies
    assert copies is not None
    return copies


@dataclass
class Dying:
    """Who dies, when.

    Attributes:
        at: by step, whose report somebody does not outlive.
    """

    household: Devices
    at: dict[int, str] = field(default_factory=dict)
    tasks: list[asyncio.Task[None]] = field(default_factory=list)

    def listen(self, event: Event) -> None:
        """Of the holder's run."""
        self.household.events.append(event)
        if isinstance(event, Step) and event.step in self.at:
            self.kill(self.at.pop(event.step))

    def kill(self, name: str) -> None:
        """At once nothing comes from it any more."""
        self.household.mesh.freeze(name)
        self.tasks.append(asyncio.create_task(self.household.mesh.kill(name)))

    def arm(self, place: str, name: str, **where: int) -> None:
        """It dies at a failpoint."""

        def die(reached: failpoints.Reached) -> asyncio.Future[None]:
            self.kill(name)
            return asyncio.get_running_loop().create_future()

        failpoints.arm(place, die, device=memory_id(name), **where)

    async def train(self, job: Job) -> None:
        """To the end."""
        try:
            await self.household.holder_run(job, one_stage_each(3), self.listen).run()
        finally:
            failpoints.disarm()
            await asyncio.gather(*self.tasks)


@pytest.mark.usefixtures("all_go_back")
@pytest.mark.parametrize("name", ["b", "c"])
async def test_a_death_goes_back_to_the_copies_bit_by_bit(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = undisturbed(momentum_job())
    account, job = Account(monkeypatch, 4), momentum_job()
    account.gates[6] = lambda: account.stable == R
    async with devices(3) as household:
        await Dying(household, {8: name}).train(job)
        assert_undisturbed(household, job, wanted)
        assert account.versions == [Version(0, 0), R]
        (recovered,) = (e for e in household.events if isinstance(e, Recovered))
        assert recovered.replayed_steps in (4, 5)
        for survivor in {"a", "b", "c"} - {name}:
            await household.until_idle(survivor)


async def test_copies_are_the_stages_bit_by_bit_and_lie_alike(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    account, job = Account(monkeypatch, 4, 8), momentum_job()
    looked: list[str] = []

    def look() -> bool:
        if account.stable != LATER:
            return False
        for units, owner, backup_peer in _backup_peers(household):
            own = _store(household, owner).of(StateEntry(*units, LATER, StateKind.KEPT))
            copy = _store(household, backup_peer).of(StateEntry(*units, LATER, StateKind.REPLICA))
            assert own is not None
            assert copy is not None
            assert list(own.tensors) == list(copy.tensors)
            for name, tensor in own.tensors.items():
                assert torch.equal(tensor, copy.tensors[name])
                assert pack(tensor).meta == pack(copy.tensors[name]).meta
                assert tensor.data_ptr() != copy.tensors[name].data_ptr()
            assert own.digests == copy.digests == digests_of(own.tensors)
            looked.append(owner)
        return True

    account.gates[10] = look
    async with devices(3) as household:
        await Dying(household).train(job)
        assert sorted(looked) == ["a", "b", "c"]
        backup_peers = [backup_peer for _, _, backup_peer in _backup_peers(household)]
        assert sorted(name for name, _ in account.kept) == sorted(2 * backup_peers)
        assert all(kept.failed is None for _, kept in account.kept)


async def test_what_is_older_than_the_stable_version_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    account = Account(monkeypatch, 4, 8, 11)
    seen: dict[int, set[Version]] = {}

    def versions() -> set[Version]:
        stores = [_store(household, name) for name in "abc"]
        return {entry.version for store in stores for entry in store.entries()}

    def look(step: int, stable: Version) -> Callable[[], bool]:
        def ready() -> bool:
            seen[step] = versions()
            return account.stable == stable

        return ready

    account.gates = {6: look(6, R), 9: look(9, LATER)}
    async with devices(3) as household:
        await Dying(household).train(momentum_job())
    assert seen[6] == {R}
    assert LATER in seen[9]


async def test_a_version_on_its_way_is_let_finish_though_every_later_one_is_wanted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As checkpoints after each update want them, over a link that takes longer than a round."""
    account = Account(monkeypatch, *range(1, STEPS))
    goes_on = asyncio.Event()
    most = 0

    def first() -> bool:
        nonlocal most
        goes_on.set()
        for name in "abc":
            own = [h for h in _store(household, name).entries() if h.kind is StateKind.KEPT]
            most = max(most, len(own))
        return account.stable is not None

    account.gates[6] = first
    async with devices(3) as household:
        slow = memory_id("b")
        failpoints.arm(
            "replica.read.between", lambda _: asyncio.ensure_future(goes_on.wait()), device=slow
        )
        await Dying(household).train(momentum_job())
        assert account.was_stable[0] == Version(1, 1)
        assert len(account.was_stable) > 1
    assert 1 < most <= SLOTS_WITH_CHECKPOINTS


@pytest.mark.parametrize(
    ("place", "name"),
    [
        ("replica.copied", "b"),
        ("replica.offer.after", "b"),
        ("replica.read.between", "b"),
        ("replica.read.between", "c"),
        ("replica.whole.before", "b"),
        ("replica.kept.before", "c"),
        ("replica.kept.after", "b"),
    ],
)
async def test_whichever_device_dies_while_a_copy_is_on_its_way_the_one_before_counts(
    place: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = undisturbed(momentum_job())
    account, job = Account(monkeypatch, 4, 8), momentum_job()
    async with devices(3) as household:
        dying = Dying(household)

        def is_stable() -> bool:
            if account.stable != R:
                return False
            dying.arm(place, name)
            return True

        account.gates[6] = is_stable
        await dying.train(job)
        assert_undisturbed(household, job, wanted)
        assert account.versions[0] == Version(0, 0)
        assert account.versions[1] in (R, LATER)
        assert dying.tasks


async def test_no_memory_for_a_copy_is_reported_and_training_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wanted = undisturbed(momentum_job())
    account, job = Account(monkeypatch, 4, 8), momentum_job()
    copied = LiveStage.copied

    def scarce(live: LiveStage, slot: Mapping[str, Tensor]) -> dict[str, Tensor]:
        if live.stage.first == 0 and R in (live.version, live.ready):
            raise MemoryError
        return copied(live, slot)

    monkeypatch.setattr(LiveStage, "copied", scarce)
    account.gates[10] = lambda: account.stable == LATER
    async with devices(3) as household:
        await Dying(household).train(job)
        assert_undisturbed(household, job, wanted)
        failed = [
            (name, k.copy.first, k.copy.version, k.failed) for name, k in account.kept if k.failed
        ]
        assert failed == [("a", 0, R, "no memory")]


async def test_a_keeper_without_memory_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    account = Account(monkeypatch, 4)
    monkeypatch.setattr(snapshot_service, "available_memory_bytes", lambda: 100)
    account.gates[6] = lambda: len(account.kept) >= 3
    async with devices(3) as household:
        await Dying(household).train(momentum_job())
    for name, kept in account.kept:
        assert str(kept.failed).startswith(f"{name} has no ")
        assert str(kept.failed).endswith("B free for a copy")
    assert {"b", "c"} <= {name for name, _ in account.kept}


async def test_a_copy_that_has_changed_in_memory_is_not_gone_back_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The keeper's copy of a dead device's stage has a wrong bit: the first weights are left."""
    wanted = undisturbed(momentum_job())
    account, job = Account(monkeypatch, 4), momentum_job()
    async with devices(3) as household:
        dying = Dying(household)

        def spoil() -> bool:
            if account.stable != R:
                return False
            units, owner, backup_peer = next(k for k in _backup_peers(household) if k[1] != "a")
            dying.at[8] = owner
            copy = _store(household, backup_peer).of(StateEntry(*units, R, StateKind.REPLICA))
            assert copy is not None
            next(t for t in copy.tensors.values() if t.numel() > 4).view(-1)[3] += 1
            return True

        account.gates[6] = spoil
        await dying.train(job)
        assert_undisturbed(household, job, wanted)
        assert account.versions == [Version(0, 0), Version(0, 0)]
