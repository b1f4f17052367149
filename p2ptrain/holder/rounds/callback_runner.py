"""Calls a job's callbacks in a thread of their own, so that this device's network runs on.

    reports ──► events, in order ──► thread: each callback in turn
    rounds  ──► caught_up() ◄──────── all of them have returned
    rounds  ──► give(state) ────────► thread: the one that wants it

An update counts, and a mini-batch after an evaluation begins, once the callbacks have seen what
came before. So a stop at step s leaves the weights of step s, and the pipeline stands still only
for what a callback takes longer than a mini-batch. Steps and evaluations never wait here for more
than one call; of other events, such as warnings, `MOST_WAITING` wait at most, and those that come
then are passed over.

What `EarlyStopping` and `SaveBest` know is written down beside the journal after each evaluation:
a holder that is started again continues to count where it was, and does not replace the best
weights by worse ones. Callbacks are known by their order in the job.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal, TypeAlias

from p2ptrain import events
from p2ptrain.errors import ScriptError, UserError
from p2ptrain.events import Done, Eval, Event, Step, Stopped
from p2ptrain.job.callbacks import (
    BestSoFar,
    BestValue,
    SaveBest,
    StateCallback,
    StopTraining,
    TrainedState,
    WantedState,
    calls,
)
from p2ptrain.job.user_code import RAISED, describe_user_error, doings
from p2ptrain.logs import get_logger
from p2ptrain.mesh.identity.state_folder import StateFolder
from p2ptrain.model.stage.random_operators import randomness_lock
from p2ptrain.net.forms import Id, Length

log = get_logger(__name__)

MOST_WAITING = 1_000

CALLBACKS_FILE = "callbacks.json"

CALLBACKS_LIMIT = 1_000

_NEVER_PASSED_OVER = (Step, Eval, Done, events.Error, Stopped)

Outcome: TypeAlias = "tuple[str | None, CallbackFailed | None]"
"""Why a callback has ended the job, and what one has raised."""


class CallbackFailed(UserError):
    """A callback raised `error`, which ends the job."""

    def __init__(self, message: str, error: BaseException) -> None:
        super().__init__(message)
        # of the others some say something to an event loop
        is_plain = isinstance(error, Exception) and not isinstance(error, StopIteration)
        self.error = error if is_plain else ScriptError(message)


@dataclass(frozen=True, slots=True)
class _CallbacksFile:
    format: Literal["p2ptrain.callbacks/1"]
    job: Id
    found: Annotated[tuple[BestSoFar, ...], Length(CALLBACKS_LIMIT)]


class CallbackRunner:
    """The callbacks of one job. Create it in a running event loop, and `close` it.

    Args:
        folder: where what they know is written down; None = nowhere.

    Attributes:
        stopped: why one has raised StopTraining; None where none has.
        stopped_at: updates that the job ends with because of that.
        failure: what one raised first.
    """

    def __init__(self, callbacks: Sequence[Any], folder: StateFolder | None = None) -> None:
        self._callbacks = callbacks
        self._folder = folder
        self._job = ""
        self._state_callbacks = [one for one in callbacks if isinstance(one, StateCallback)]
        self._loop = asyncio.get_running_loop()
        self._calls: queue.SimpleQueue[Callable[[], Outcome] | None] = queue.SimpleQueue()
        self._waiting = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._thread: threading.Thread | None = None
        self._started: set[str] = set()  # what is called once
        self._ended = False
        self.stopped: str | None = None
        self.stopped_at: int | None = None
        self.failure: CallbackFailed | None = None

    def recall(self, job: str, stopped_at: int | None) -> None:
        """The job is known: go on from what was written down of it, if anything was."""
        self._job, self.stopped_at = job, stopped_at
        known = [one for one in self._callbacks if isinstance(one, BestValue)]
        if self._folder is None or not known:
            return
        try:
            written = self._folder.read_form(CALLBACKS_FILE, _CallbacksFile)
        except UserError as error:
            log.warning("callbacks_unreadable", why=str(error))
            return
        if written is not None and written.job == job and len(written.found) == len(known):
            for callback, found in zip(known, written.found, strict=True):
                callback.found = found

    def keep(self) -> None:
        """Write down what they know; a disk that refuses is only logged."""
        found = tuple(one.found for one in self._callbacks if isinstance(one, BestValue))
        if self._folder is None or not found:
            return
        try:
            form = _CallbacksFile("p2ptrain.callbacks/1", self._job, found[:CALLBACKS_LIMIT])
            self._folder.write_form(CALLBACKS_FILE, form)
        except (OSError, UserError) as error:
            log.warning("callbacks_not_noted", why=str(error))

    def stop_after(self, step: int) -> None:
        """One has ended the job, with so many updates."""
        self.stopped_at = step
        log.info("stopped_by_callback", step=step, why=self.stopped)

    @property
    def has_any(self) -> bool:
        """Whether the job has callbacks."""
        return bool(self._callbacks)

    @property
    def is_busy(self) -> bool:
        """Whether one has not returned yet."""
        return not self._idle.is_set()

    def put(self, event: Event) -> None:
        """Call them with an event, soon; none once the job has ended for them."""
        if not self._callbacks or self._ended:
            return
        if self._waiting >= MOST_WAITING and not isinstance(event, _NEVER_PASSED_OVER):
            log.warning("callbacks_too_slow", passed_over=event.event)
            return
        self._ended = isinstance(event, Done | events.Error | Stopped)
        self._submit(partial(self._call_all, event))

    def _submit(self, call: Callable[[], Outcome]) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="callbacks", daemon=True)
            self._thread.start()
        self._waiting += 1
        self._idle.clear()
        self._calls.put(call)

    async def caught_up(self) -> None:
        """Wait until they have seen every event so far. Raises CallbackFailed."""
        await self._idle.wait()
        if self.failure is not None:
            raise self.failure

    async def end(self, event: Event) -> None:
        """Call them with how the job has ended, if they have not been; what they raise is logged.

        For a job that has failed, or was cancelled.
        """
        self.put(event)
        await self._idle.wait()

    def due(self) -> list[SaveBest]:
        """Those that want the weights of the evaluation they have seen; once."""
        return [one for one in self._callbacks if isinstance(one, SaveBest) and one.take_due()]

    def stands_still_after(self, step: int) -> bool:
        """Whether the next mini-batch waits until the callbacks have seen this step's state."""
        return any(one.stands_still_after(step) for one in self._state_callbacks)

    @property
    def wanting(self) -> list[StateCallback]:
        """Those that want the state; ask once they have caught up."""
        return [one for one in self._state_callbacks if one.wanted is not WantedState.NOTHING]

    async def give(self, callback: StateCallback, state: TrainedState) -> None:
        """Give a callback the state, and wait until it has returned. Raises CallbackFailed."""
        self._submit(partial(self._give, callback, state))
        await self.caught_up()

    def close(self) -> None:
        """End the thread, once the call in it has returned."""
        self._calls.put(None)

    # -- in the thread ---------------------------------------------------------------------------

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            stopped, failure = call()
            with suppress(RuntimeError):  # the loop is closed: nothing waits any more
                self._loop.call_soon_threadsafe(self._returned, stopped, failure)

    def _give(self, callback: StateCallback, state: TrainedState) -> Outcome:
        name = f"{type(callback).__qualname__}.on_state"
        try:
            with doings.doing("the callback {}", name), randomness_lock:
                callback.on_state(state)
        except StopTraining as stop:
            return str(stop) or f"the callback {name} has stopped the training", None
        except RAISED as error:
            return None, CallbackFailed(_said(name, f" at step {state.step}", error), error)
        return None, None

    def _call_all(self, event: Event) -> Outcome:
        """Those behind one that fails do not see the event; the end of a job all see."""
        stopped = failure = None
        for callback in self._callbacks:
            for name, call in calls(callback, event):
                if name.endswith(".on_start") and not self._is_first(f"{id(callback)}"):
                    continue
                try:
                    with doings.doing("the callback {}", name), randomness_lock:
                        call(event)
                except StopTraining as stop:
                    stopped = (
                        stopped or str(stop) or f"the callback {name} has stopped the training"
                    )
                except RAISED as error:
                    failure = failure or CallbackFailed(_described(name, event, error), error)
                    if not isinstance(event, Done | events.Error | Stopped):
                        return stopped, failure
        return stopped, failure

    def _is_first(self, callback: str) -> bool:
        is_first = callback not in self._started
        self._started.add(callback)
        return is_first

    # -- on the loop -----------------------------------------------------------------------------

    def _returned(self, stopped: str | None, failure: CallbackFailed | None) -> None:
        self._waiting -= 1
        self.stopped = self.stopped or stopped
        if failure is not None:
            if self.failure is not None and str(failure) != str(self.failure):
                log.warning("callback_failed_again", why=str(failure))
            self.failure = self.failure or failure
        if not self._waiting:
            self._idle.set()


def _described(name: str, event: Event, error: BaseException) -> str:
    when = f" at step {event.step}" if isinstance(event, Step | Eval) else ""
    return _said(name, when, error)


def _said(name: str, when: str, error: BaseException) -> str:
    return f"the callback {name} failed{when}: {describe_user_error(error)}"
