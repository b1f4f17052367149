"""Named places in the code where a test can make a device die, stop or be cut off.

They are off unless one is armed, and then cost one call:

    await failpoints.reach("update.before", device=me, stage=0, step=3)

In a test `arm` says what happens; several devices may live in one process, so a place names the
device that has reached it. A real process takes it from P2PTRAIN_FAILPOINT, see `arm_from`:

    P2PTRAIN_FAILPOINT="update.before:stage=1:step=3:kill"

Each name occurs in the code once, so that it means one place.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Final, TypeAlias

from p2ptrain.errors import InternalError, OptionError

ENVIRONMENT: Final = "P2PTRAIN_FAILPOINT"

NAMES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "forward.receive.before": "a stage waits for a micro-batch slice",
        "forward.receive.after": "the slice is there, its sender has no credit for it yet",
        "forward.compute.after": "the slice is computed",
        "forward.send.before": "its activations are about to be sent",
        "forward.send.after": "they have been given to the link",
        "backward.receive.before": "a stage waits for the gradients of a slice",
        "backward.receive.after": "they are there",
        "backward.compute.after": "the slice's backward is computed",
        "backward.send.before": "its gradients are about to be sent",
        "backward.send.after": "they have been given to the link",
        "backward.weights.after": "deferred gradients of weights are computed",
        "bucket.send.before": "a chunk of a group's all-reduce is about to be sent",
        "bucket.receive.after": "a chunk of a group's all-reduce has come",
        "ties.send.before": "gradients of shared tensors are about to be sent",
        "ties.receive.after": "their sum has come",
        "norms.send.before": "the stage's norms are about to be sent",
        "done.send.before": "a stage is ready, and no other device knows",
        "done.send.after": "it has reported that",
        "commit.receive.before": "a stage receives the commit of its update",
        "update.before": "the update is about to be made",
        "update.after": "it is made",
        "update.begin.before": "an optimistic update is about to begin, before all sums are there",
        "update.end.after": "all reduced tensors are there and it is made",
        "version.after": "it is made, and the snapshot that was asked for is taken",
        "rebuild.step.before": "backup peer: a lost stage is about to compute its next step again",
        "rebuild.after": "backup peer: the lost stage is rebuilt",
        "log.send.between": "the replay log of a lost stage is about to be sent",
        "replica.copied": "a stage's snapshot is there, no device can read it yet",
        "replica.offer.after": "it has been offered to its backup peer",
        "replica.read.between": "backup peer: the next part of a snapshot is about to be read",
        "replica.whole.before": "backup peer: a snapshot is whole, its owner cannot rely on it",
        "replica.kept.before": "backup peer: the report to the holder is about to be sent",
        "replica.kept.after": "backup peer: the report has been sent",
        "decide.before": "holder: every stage is ready, and nothing is decided",
        "journal.after": "holder: the update is in the journal, the user does not know",
        "report.after": "holder: the update counts and the user knows, no device does",
        "commit.send.between": "holder: one more device has been sent the commit",
        "state_report.receive.before": "a device is asked to stop and report its state",
        "state_report.answer.before": "it has stopped, and has not reported its state",
        "planned.after": "holder: the plan is made",
        "prepare.send.between": "holder: one more device is about to be sent it",
        "prepare.receive.before": "a device receives it",
        "fetch.between": "a part that the device lacked has come",
        "build.after": "its stages stand",
        "ready.send.before": "it is ready, and has not reported that",
        "answer.before": "holder: all are ready, the rules do not know",
        "accept.before": "holder: the answer is here, the plan in force is still the old one",
        "begin.send.between": "holder: one more device has been sent the order to begin",
        "begin.receive.before": "a device receives the order to begin",
        "replay.first": "holder: the first round of a generation is about to be ordered",
        "settled.receive.before": "a device is asked, at a round's border, for its last update",
        "settled.answer.before": "it is made, and the device has not reported that",
        "look.ask.before": "holder: about to look what another plan would be worth",
        "look.measured.after": "holder: new devices are measured, no search has begun",
        "look.found.before": "holder: it knows the better plan, the job has not been notified",
        "leave.ask.before": "a device is about to report that it leaves",
        "leave.receive.before": "holder: it receives that report",
        "leave.answer.before": "holder: nothing depends on it any more, and it does not know",
        "stable.before": "holder: every backup of a version is there, no device knows",
        "versions.keep.between": "holder: the others are about to be sent which snapshots to drop",
        "checkpoint.gather.between": "holder: a stage's part of a checkpoint has come",
        "checkpoint.rename.before": "a checkpoint lies whole under its temporary name",
        "checkpoint.index.before": "it has its name, and the index still names the one before",
        "checkpoint.index.after": "the index names it, older ones are still there",
        "home.between": "holder: a stage's trained weights have arrived at the holder",
        "weights.written": "holder: the trained weights are in their file, and the job not over",
    }
)
"""Where each one is."""


@dataclass(frozen=True, slots=True)
class Reached:
    """A device has come to a place.

    Attributes:
        device: its id.
        stage: the stage it works on; -1 where it is none's.
        step: updates applied when the round began; -1 where the place does not know.
    """

    name: str
    device: str
    stage: int
    step: int


Action: TypeAlias = Callable[[Reached], asyncio.Future[None] | None]
"""Called at once; what it returns is awaited before the code continues, but for places that cannot
wait: an action that kills a device must have silenced it by then."""


@dataclass(slots=True)
class _Armed:
    name: str
    action: Action
    device: str | None
    stage: int | None
    step: int | None
    left: int

    def is_meant(self, reached: Reached) -> bool:
        """Whether it fires now."""
        wanted = (self.device, self.stage, self.step)
        found = (reached.device, reached.stage, reached.step)
        if self.name != reached.name or self.left == 0:
            return False
        if any(want is not None and want != has for want, has in zip(wanted, found, strict=True)):
            return False
        self.left -= 1
        return self.left == 0


armed: bool = False
"""Whether anything is; set by `arm` and `disarm` alone."""

_all: list[_Armed] = []


def arm(
    name: str,
    action: Action,
    *,
    device: str | None = None,
    stage: int | None = None,
    step: int | None = None,
    count: int = 1,
) -> None:
    """Have `action` done once, the `count`-th time that a place is reached as described.

    Args:
        device: id of the device; None = any. `stage` and `step` alike.

    Raises:
        InternalError: there is no such place.
    """
    global armed
    if name not in NAMES:
        raise InternalError(f"there is no failpoint {name}")
    _all.append(_Armed(name, action, device, stage, step, count))
    armed = True


def disarm() -> None:
    """Nothing happens any more."""
    global armed
    _all.clear()
    armed = False


async def reach(name: str, *, device: str, stage: int = -1, step: int = -1) -> None:
    """A device has come to a place."""
    if armed:
        for wait in _fire(Reached(name, device, stage, step)):
            await wait


def reach_now(name: str, *, device: str, stage: int = -1, step: int = -1) -> None:
    """The same at a place that cannot wait; also in a thread."""
    if armed:
        _fire(Reached(name, device, stage, step))


def _fire(reached: Reached) -> list[asyncio.Future[None]]:
    if reached.name not in NAMES:
        raise InternalError(f"there is no failpoint {reached.name}")
    waits = [one.action(reached) for one in list(_all) if one.is_meant(reached)]
    return [wait for wait in waits if wait is not None]


def _signal(name: str, reached: Reached) -> None:
    """By its name: Windows has neither, and failpoints are armed only where they are."""
    os.kill(os.getpid(), getattr(signal, name))


def _exit(reached: Reached) -> None:
    os._exit(1)


_ACTIONS: Final[Mapping[str, Action]] = MappingProxyType(
    {
        "kill": partial(_signal, "SIGKILL"),
        "freeze": partial(_signal, "SIGSTOP"),
        "exit": _exit,
    }
)


def arm_from(environment: Mapping[str, str]) -> None:
    """Arm what `ENVIRONMENT` says: NAME[:stage=N][:step=N][:count=N]:ACTION, commas between.

    `kill` and `freeze` are the signals, sent to this process by itself; `exit` ends it:
    these are the actions.

    Raises:
        OptionError: it cannot be read, or names no place.
    """
    for words in filter(None, environment.get(ENVIRONMENT, "").split(",")):
        name, *settings = words.split(":")
        action = settings.pop() if settings else ""
        if name not in NAMES or action not in _ACTIONS:
            raise OptionError(f"{ENVIRONMENT}: there is no {words!r}; see p2ptrain/failpoints.py")
        if action in ("kill", "freeze") and not hasattr(signal, "SIGKILL"):
            raise OptionError(f"{ENVIRONMENT}: this system has no signals: use {name}:exit")
        numbers = dict(_number(setting, words) for setting in settings)
        arm(
            name,
            _ACTIONS[action],
            stage=numbers.get("stage"),
            step=numbers.get("step"),
            count=numbers.get("count", 1),
        )


def _number(setting: str, words: str) -> tuple[str, int]:
    key, _, value = setting.partition("=")
    if key not in ("stage", "step", "count") or not value.isdecimal():
        raise OptionError(f"{ENVIRONMENT}: {setting!r} in {words!r} is no stage, step or count")
    return key, int(value)
