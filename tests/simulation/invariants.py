"""What must hold after every call of every core, whatever the faults.

vote       a device votes at most once per term (restarts included, unless its disk is lost),
           so no two coordinators of one term share a voter; none without a majority
term       the terms that a device follows or knows never fall
grave      a member once dead or left is alive again only in a higher incarnation
invention  nobody believes an incarnation that its owner never had
table      tables stay within their limit; a device lists itself as alive (or left)
conduct    nobody honest is taken for a liar, however bad its network is
report     each Changed follows on the one before it
"""

from __future__ import annotations

from dataclasses import dataclass, field

from p2ptrain.mesh.conduct import Judgement
from p2ptrain.mesh.interface import MemberState
from p2ptrain.mesh.membership.core_events import (
    CoordinatorIs,
    ElectionInstruction,
    Instruction,
    MemberRecord,
    MemberUpdated,
    SendTo,
)
from p2ptrain.mesh.membership.core_messages import ElectionKind
from tests.simulation.device import Device

_GONE = (MemberState.DEAD, MemberState.LEFT)


class InvariantViolated(AssertionError):
    """The message says which, where and when."""


@dataclass(slots=True)
class _Observer:
    """What one process of one device has said so far."""

    run: int = 0
    graves: dict[str, int] = field(default_factory=dict)  # member -> incarnation it died in
    reported: dict[str, MemberState] = field(default_factory=dict)


class Invariants:
    """Watches all devices.

    Attributes:
        deaths: (observer, member, reason) as reported.
        liars: devices that are no honest members.
        found_out: (observer, liar, what was decided).
    """

    def __init__(self) -> None:
        self.deaths: list[tuple[str, str, str]] = []
        self.elections = 0
        self.liars: set[str] = set()
        self.found_out: list[tuple[str, str, Judgement]] = []
        self._votes: dict[tuple[str, int, int], str] = {}  # (voter, disk, term) -> candidate
        self._electors: dict[tuple[str, int], set[str]] = {}  # (candidate, term) -> voters
        self._terms: dict[tuple[str, int], int] = {}  # (device, disk) -> highest term
        self._followed: dict[tuple[str, int], int] = {}
        self._incarnations: dict[str, int] = {}  # highest its owner ever had
        self._observers: dict[str, _Observer] = {}

    def judged(self, device: Device, peer: str, judgement: Judgement) -> None:
        """`device` has found `peer` to be no honest member.

        Raises:
            InvariantViolated: it is one.
        """
        if peer not in self.liars:
            _fail(device, f"takes {peer} for a liar: it {judgement.reason}")
        self.found_out.append((device.id, peer, judgement))

    def check(self, device: Device, out: list[Instruction | ElectionInstruction]) -> None:
        """Check what `device` just did.

        Raises:
            InvariantViolated: always with the reason.
        """
        observer = self._observers.setdefault(device.id, _Observer())
        if observer.run != device.run:
            observer = self._observers[device.id] = _Observer(device.run)
        me = device.membership.members[device.id]
        self._incarnations[me.id] = max(self._incarnations.get(me.id, 0), me.incarnation)
        for instruction in out:
            match instruction:
                case SendTo(peer, payload) if "claims" not in payload:
                    self._check_vote(device, peer, payload)
                case MemberUpdated():
                    self._check_report(device, observer, instruction)
                case CoordinatorIs(id_, term):
                    self._check_coordinator(device, id_, term)
        self._check_terms(device)
        self._check_table(device, observer)

    # -- elections -------------------------------------------------------------------------

    def _check_vote(self, device: Device, peer: str, payload: dict[str, object]) -> None:
        kind, term = payload["kind"], payload.get("term")
        assert isinstance(term, int) or kind == ElectionKind.ASK
        if kind == ElectionKind.VOTE:
            self._vote(device, device.id, int(str(term)))
        elif kind == ElectionKind.REPLY and payload["yes"] and not payload["poll"]:
            self._vote(device, peer, int(str(term)))

    def _vote(self, device: Device, candidate: str, term: int) -> None:
        key = (device.id, device.disk.generation, term)
        earlier = self._votes.setdefault(key, candidate)
        if earlier != candidate:
            _fail(device, f"votes for {candidate} and for {earlier} in term {term}")
        self._electors.setdefault((candidate, term), set()).add(device.id)

    def _check_coordinator(self, device: Device, coordinator: str, term: int) -> None:
        self._follow(device, term)
        if coordinator != device.id:
            return
        self.elections += 1
        alive = {i for i, r in device.membership.members.items() if r.state not in _GONE}
        if len(alive) > 1:
            voters = self._electors.get((coordinator, term), set()) & alive
            if 2 * len(voters) <= len(alive):
                _fail(device, f"coordinates term {term} with votes of {sorted(voters)} only")

    def _follow(self, device: Device, term: int) -> None:
        key = (device.id, device.disk.generation)
        if term < self._followed.get(key, 0):
            _fail(device, f"follows term {term} after {self._followed[key]}")
        self._followed[key] = term

    def _check_terms(self, device: Device) -> None:
        key = (device.id, device.disk.generation)
        term = device.election.term
        coordinator = device.election.coordinator
        if term < self._terms.get(key, 0):
            _fail(device, f"knows term {term} after {self._terms[key]}")
        if coordinator is not None and coordinator[1] > term:
            _fail(device, f"follows term {coordinator[1]} but knows {term} only")
        self._terms[key] = term

    # -- membership ------------------------------------------------------------------------

    def _check_report(self, device: Device, observer: _Observer, change: MemberUpdated) -> None:
        record = change.record
        if record.id == device.id:
            return
        before = observer.reported.get(record.id)
        if change.previous_state is not before and before is not None:
            _fail(device, f"says {record.id} was {change.previous_state}, but it was {before}")
        observer.reported[record.id] = record.state
        if record.state is MemberState.DEAD:
            self.deaths.append((device.id, record.id, change.reason))

    def _check_table(self, device: Device, observer: _Observer) -> None:
        members = device.membership.members
        if len(members) > device.build.membership_config.table_limit:
            _fail(device, f"lists {len(members)} members")
        for record in members.values():
            self._check_record(device, observer, record)

    def _check_record(self, device: Device, observer: _Observer, record: MemberRecord) -> None:
        own = record.id == device.id
        if own and record.state not in (MemberState.ALIVE, MemberState.LEFT):
            _fail(device, f"lists itself as {record.state}")
        if record.incarnation > self._incarnations.get(record.id, 0):
            _fail(device, f"believes {record.id} in incarnation {record.incarnation}")
        if record.state in _GONE:
            observer.graves[record.id] = record.incarnation
        elif record.incarnation <= observer.graves.get(record.id, -1):
            _fail(device, f"lets {record.id} rise in incarnation {record.incarnation} again")


def _fail(device: Device, what: str) -> None:
    raise InvariantViolated(f"device {device.id}, run {device.run}: {what}")
