"""What a holder does about trouble: settle, ask a coordinator, accept, begin; and ask again.

    STARTING ──► ASKING ──► TRAINING ──► DRAINING ─┐       at a round's border: join, leave, drift
                  ▲ ▲          │ trouble           │
                  │ └───── SETTLING ◄──────────────┤       at most SETTLE_SECONDS
                  │                                ▼
                  └──────── WAITING ◄── lost, but not for certain; or nobody coordinates

The holder owns what is true: the history, which epoch counts, which step was reported. A change is
final when the journal has it, and before that nobody is told to begin. Pure: feed events and ticks
with the time (seconds of any monotonic clock), carry out what it returns in that order.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

from p2ptrain.errors import InternalError
from p2ptrain.training.recovery.change import EPOCHS_A_REQUEST, ChangeAsk, Reason
from p2ptrain.training.recovery.choose import Choice, GlobalCopy, Past
from p2ptrain.training.recovery.holder_events import (
    AnswerIn,
    Appeared,
    Ask,
    Begin,
    BringHome,
    BrokeOff,
    CallFailed,
    Committed,
    Coordinates,
    CopiesAre,
    CourseDone,
    Died,
    Drain,
    Drained,
    Failure,
    Freeze,
    HolderEvent,
    HolderInstruction,
    Home,
    Journal,
    KeepOnly,
    LetGo,
    LinkBack,
    LinkTrouble,
    MemoryShort,
    RefusedIn,
    Stable,
    StayOn,
    StopJob,
    Stuck,
    WaitFor,
    Wanted,
)
from p2ptrain.training.recovery.lineage import Lineage
from p2ptrain.training.recovery.placed import Placed
from p2ptrain.training.recovery.presence import Presence
from p2ptrain.training.recovery.settling import Settling

START_SECONDS = 3.0
"""Longest wait of a holder that was started again for the members of its last plan."""
RETRY_SECONDS = 1.0
"""Between two requests where the first one failed and nothing has changed."""
MOST_SPOILED = 5
"""Requests in a row without a new step in which every preparation was spoiled; the wait between two
doubles."""
_NEVER = float("inf")


class Phase(StrEnum):
    """What the job does."""

    STARTING = "starting"
    TRAINING = "training"
    DRAINING = "draining"
    SETTLING = "settling"
    ASKING = "asking"
    WAITING = "waiting"
    OVER = "over"


class HolderCore:
    """See the module.

    Args:
        holder: own id.
        units: of the model.
        journal: what an earlier process of this job wrote last; None = a new job.
        reported: updates that people were told of, or that the job begins with.
        clips: whether updates need a clipping coefficient.

    Attributes:
        phase: what the job does.
        lineage: of the job.
        next_epoch: first epoch number that was never used.
        placed: the plan in force, None before the first.
        finishing: all steps are committed, the weights come home.
    """

    def __init__(
        self,
        holder: str,
        units: int,
        reported: int,
        *,
        journal: Journal | None = None,
        clips: bool = False,
    ) -> None:
        self.phase = Phase.STARTING
        self.lineage = journal.lineage if journal else Lineage()
        self.next_epoch = journal.next_epoch if journal else 1
        self.placed = journal.placed if journal else None
        self.finishing = False
        self.stable = journal.stable if journal else None
        self._holder = holder
        self._units = units
        self._reported = reported
        self._clips = clips
        self._copies: tuple[GlobalCopy, ...] = ()
        # until it is seen, whoever had a part before a restart may still have it
        parts = self.placed.places() if self.placed else {}
        self._there = Presence(holder, dict(journal.took_part) if journal else {}, parts)
        self._settling = Settling(holder)
        self._lowered: dict[str, int] = {}
        self._spoiled = 0  # requests in a row
        self._leaving: set[str] = set()
        self._coordinator: tuple[str, int] | None = None
        self._reason = Reason.FAILURE if journal else Reason.START
        self._number = 0
        self._due = _NEVER  # of the present phase
        self._waits_for: tuple[str, ...] | None = None  # as people were told last
        self._now = float("-inf")
        self._out: list[HolderInstruction] = []

    @property
    def next_wakeup(self) -> float:
        """When to call `tick` at the latest."""
        return self._due

    @property
    def number(self) -> int:
        """Of the newest request."""
        return self._number

    @property
    def alive(self) -> frozenset[str]:
        """Devices that are alive, this one included."""
        return frozenset(self._there.alive)

    @property
    def lowered(self) -> Mapping[str, int]:
        """Memory in bytes that devices proved to have less of."""
        return dict(self._lowered)

    @property
    def coordinator(self) -> str | None:
        """Whoever coordinates; None = nobody does at present."""
        return None if self._coordinator is None else self._coordinator[0]

    def start(self, now: float) -> list[HolderInstruction]:
        """Begin; a holder that was started again gives its members a moment to be found."""
        self._now = max(now, self._now)
        self._due = now + START_SECONDS if self.placed is not None else now
        self._step()
        return self._finish()

    def tick(self, now: float) -> list[HolderInstruction]:
        """Do what is due."""
        self._now = max(now, self._now)
        self._step()
        return self._finish()

    def handle(self, event: HolderEvent, now: float) -> list[HolderInstruction]:
        """Take in one event."""
        self._now = max(now, self._now)
        if self.phase is not Phase.OVER:
            self._on(event)
            self._step()
        return self._finish()

    def _finish(self) -> list[HolderInstruction]:
        out, self._out = self._out, []
        return out

    def _on(self, event: HolderEvent) -> None:
        match event:
            case Appeared() | Died():
                self._on_member(event)
            case LinkTrouble(one, other):
                self._on_link_trouble(one, other)
            case LinkBack(one, other):
                self._settling.link_back(one, other)
            case MemoryShort(device, memory_bytes):
                self._lowered[device] = memory_bytes
                self._trouble()
            case BrokeOff(reason):
                if self.phase in (Phase.TRAINING, Phase.DRAINING):
                    self._settling.broke_off(reason, self._now)
                    self._trouble()
            case Stuck(devices):
                if self.phase in (Phase.TRAINING, Phase.DRAINING):
                    self._settling.stood_still(devices)
                    self._trouble()
            case Committed(step):
                if step > self._reported:
                    self._reported = step
                    self._settling.progress()
                    self._spoiled = 0
            case Stable(version, besides):
                self.stable = version
                self._write_down()
                self._out.append(KeepOnly((version, *besides), self.alive))
                if self.phase is Phase.TRAINING:
                    self._let_go()
            case CopiesAre(copies):
                self._copies = copies
            case Coordinates(device, term):
                self._on_coordinator(device, term)
            case AnswerIn() | RefusedIn() | CallFailed():
                self._on_answer(event)
            case Wanted() | Drained() | CourseDone() | Home():
                self._on_course(event)
            case _:
                raise InternalError(f"a holder has no rule for {type(event).__name__}")

    # -- signs of trouble --------------------------------------------------------------------

    def _on_member(self, event: Appeared | Died) -> None:
        device = event.device
        if isinstance(event, Appeared):
            self._there.appeared(device)
            if self.phase is Phase.WAITING:
                self._ask_soon()
            return
        self._there.died(device, certain=event.certain)
        self._leaving.discard(device)
        in_plan = self.placed is not None and device in self.placed.devices
        self._settling.died(device, in_plan=in_plan)
        if in_plan:
            if self._there.mourn(device):
                self._out.append(Failure(device))
            self._reason = Reason.FAILURE
            self._trouble()
        if self.phase is Phase.WAITING:
            self._ask_soon()  # hope may have ended

    def _on_link_trouble(self, one: str, other: str) -> None:
        self._there.link_broke(one, other)
        placed = self.placed
        if placed is None or not {one, other} <= {*placed.devices, self._holder}:
            return
        if {one, other} <= self._there.alive:
            self._settling.link_broke(one, other, self._now)
        self._trouble()

    def _trouble(self) -> None:
        """The epoch in force is over, whatever was under way."""
        if self.phase in (Phase.TRAINING, Phase.DRAINING):
            self._out.append(Freeze())
            self.phase = Phase.SETTLING
            self._reason = Reason.FAILURE

    # -- asking --------------------------------------------------------------------------------

    def _step(self) -> None:
        """Go on where nothing is to be waited for any more."""
        due = self._now >= self._due
        match self.phase:
            case Phase.STARTING:
                placed, has_started = self.placed, self._due < _NEVER
                are_here = placed is not None and self.alive.issuperset(placed.devices)
                if due or (has_started and are_here):
                    self._ask()
            case Phase.SETTLING:
                self._due = max(self._settling.due, self._now)
                if self._now >= self._due:
                    self._ask()
            case Phase.TRAINING:
                placed = self.placed
                if placed is not None and self._leaving.intersection(placed.places()):
                    self._drain(Reason.LEAVE)
            case Phase.ASKING | Phase.WAITING:
                if due:
                    self._ask()

    def _ask_soon(self) -> None:
        self._due = min(self._due, self._now)

    def _ask(self) -> None:
        useless = self._settling.over()
        self._due = _NEVER
        if useless is not None:
            self.phase = Phase.OVER
            self._out.append(StopJob(useless))
            return
        if self._coordinator is None:
            self.phase = Phase.WAITING
            self._tell_waiting(())
            return
        self.phase = Phase.ASKING
        self._there.asked()
        self._number = self.next_epoch  # rises, also over the holder's restarts
        ask = ChangeAsk(
            number=self._number,
            epoch=self.next_epoch,
            reason=self._reason,
            units=self._units,
            holder=self._holder,
            alive=self.alive,
            past=Past(
                self.lineage,
                self._reported,
                self._copies,
                self.placed.places() if self.placed else {},
                frozenset(self._there.silent),
                frozenset(self._there.took_part),
                self._clips,
            ),
            present=self.placed,
            stable=self.stable,
            without=frozenset(self._leaving | self._settling.without),
            lowered=dict(self._lowered),
        )
        self.next_epoch += EPOCHS_A_REQUEST
        self._write_down()  # else a restart could use these numbers again
        self._out.append(Ask(self._coordinator[0], ask))

    def _write_down(self) -> None:
        took_part = tuple(sorted(self._there.took_part.items()))
        journal = Journal(self.next_epoch, self.lineage, self.placed, self.stable, took_part)
        self._out.append(journal)

    def _on_coordinator(self, device: str | None, term: int) -> None:
        new = None if device is None else (device, term)
        if new == self._coordinator:
            return
        self._coordinator = new
        if self.phase is Phase.ASKING or (self.phase is Phase.WAITING and new is not None):
            self._ask_soon()

    # -- answers -------------------------------------------------------------------------------

    def _on_answer(self, event: AnswerIn | RefusedIn | CallFailed) -> None:
        if self.phase is not Phase.ASKING or event.number != self._number:
            return  # of a request that was given up
        match event:
            case AnswerIn(_, placed, choice):
                if self._there.stand_ready(placed.devices):
                    self._accept(placed, choice)
                else:
                    self._ask_soon()
            case RefusedIn():
                self._on_refusal(event)
            case CallFailed():
                self._due = min(self._due, self._now + RETRY_SECONDS)

    def _on_refusal(self, refused: RefusedIn) -> None:
        lost, silent = refused.lost, self._there.silent
        for device, memory_bytes in refused.lowered.items():
            self._lowered[device] = min(memory_bytes, self._lowered.get(device, memory_bytes))
        self._spoiled += refused.spoiled > 0
        hopeless = lost.certain if lost is not None else not silent
        if refused.again and self._spoiled <= MOST_SPOILED:
            wait = RETRY_SECONDS * 2 ** max(self._spoiled - 1, 0)
            self._due = min(self._due, self._now + wait)
        elif refused.again:
            asked = f"{self._spoiled} times in a row no plan could be made ready"
            self.phase = Phase.OVER
            self._out.append(StopJob(f"{asked}: {refused.reason}"))
        elif lost is None and self._leaving:
            self._keep_leavers(refused.reason)
        elif hopeless:
            self.phase = Phase.OVER
            self._out.append(StopJob(refused.reason, lost))
        else:
            self.phase = Phase.WAITING
            places = lost.last_places if lost is not None else ()
            seen = self._there.alive.intersection(places)  # but not by the coordinator, yet
            self._due = self._now + RETRY_SECONDS if seen else _NEVER
            self._tell_waiting(tuple(sorted(silent.intersection(places))))

    def _accept(self, placed: Placed, choice: Choice) -> None:
        back_to = self.stable.step if self.stable is not None else 0
        oldest = min([placed.version.step, back_to, *(c.version.step for c in self._copies)])
        self.lineage = self.lineage.begun(placed.epoch, placed.version).pruned(oldest)
        if self.stable is not None and not self.lineage.is_valid(self.stable):
            self.stable = None  # training goes on from before it
        oldest_epoch = self.lineage.eras[0].epoch
        self._there.begun(placed.epoch, placed.devices, placed.places(), oldest_epoch)
        self.next_epoch = placed.epoch + 1
        self.placed = placed
        self.phase = Phase.TRAINING
        self._due = _NEVER
        self._waits_for = None
        self._write_down()
        reason, self._reason = self._reason, Reason.FAILURE
        self._out.append(Begin(placed, choice, reason, self.alive))
        self._let_go()
        if self.finishing and placed.version.step >= self._reported:
            self._out.append(BringHome(placed))

    def _tell_waiting(self, devices: tuple[str, ...]) -> None:
        if devices != self._waits_for:
            self._waits_for = devices
            self._out.append(WaitFor(devices))

    def _on_leaver(self, device: str) -> None:
        placed = self.placed
        if self.phase is Phase.TRAINING and placed is not None and device not in placed.places():
            self._out.append(LetGo(device))
        else:
            self._leaving.add(device)  # `_step` drains as soon as that is possible

    def _keep_leavers(self, reason: str) -> None:
        """No plan fits without them: they hear so, and all goes on with them."""
        for device in sorted(self._leaving):
            self._out.append(StayOn(device, reason))
        self._leaving.clear()
        self._ask_soon()

    def _let_go(self) -> None:
        """Who has no part any more may leave: nothing depends on it."""
        placed = self.placed
        if placed is None or (placed.keeps and not self._is_safe(placed)):
            return
        for device in sorted(self._leaving - placed.places().keys()):
            self._leaving.discard(device)
            self._out.append(LetGo(device))

    def _is_safe(self, placed: Placed) -> bool:
        """Whether what this epoch began with can be had without whoever had it before."""
        return self.stable is not None and self.stable.step >= placed.version.step

    # -- the undisturbed course ------------------------------------------------------------------

    def _drain(self, reason: Reason) -> None:
        if not self.finishing:
            self._reason = reason
            self.phase = Phase.DRAINING
            self._out.append(Drain())

    def _on_course(self, event: Wanted | Drained | CourseDone | Home) -> None:
        match event:
            case Wanted(reason, leaver):
                if leaver is not None:
                    self._on_leaver(leaver)
                elif self.phase is Phase.TRAINING:
                    self._drain(reason)
            case Drained():
                if self.phase is Phase.DRAINING:
                    self._out.append(Freeze())
                    self._ask()
            case CourseDone():
                self.finishing = True
                if self.phase in (Phase.TRAINING, Phase.DRAINING) and self.placed is not None:
                    self.phase = Phase.TRAINING
                    self._out.append(BringHome(self.placed))
            case Home():
                if self.phase is Phase.TRAINING and self.finishing:
                    self.phase = Phase.OVER
                    self._out.append(StopJob())
