"""Whether a job that starts resumes an unfinished one of this device.

The journal must fit the job, and some device must keep something of it: a journal without weights
is worth nothing, and without the journal, steps would be reported twice.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial

from p2ptrain.recovery.version import Version


class ResumeMode(StrEnum):
    """How a job starts."""

    FROM_START = "anew"
    GO_ON = "go on"
    REFUSE = "refuse"


@dataclass(frozen=True, slots=True)
class KeptJob:
    """What a member keeps of a job of this device.

    Attributes:
        job: its id.
        newest: what was computed last of it there.
    """

    job: str
    newest: Version


@dataclass(frozen=True, slots=True)
class ResumeDecision:
    """How a job starts.

    Attributes:
        reason: for the user, where it may surprise; names no devices.
        ending: jobs of this device that are over now.
    """

    start: ResumeMode
    reason: str = ""
    ending: frozenset[str] = frozenset()


def decide_resume(
    asked: str,
    found: tuple[str, bool] | None,
    others: Collection[str],
    kept: Mapping[str, KeptJob | None],
    *,
    fresh: bool,
    begun: bool = True,
    over: Collection[str] = (),
    captured_step: int | None = None,
) -> ResumeDecision:
    """Decide.

    Args:
        asked: what ids of jobs begin with that are the one asked for.
        found: id of the job in the journal, and whether it is the one asked for.
        others: ids of the devices, without this one, that had a part in the journal's job.
        kept: what each member that answered keeps.
        fresh: the user wants a new start.
        begun: whether a new start would lose anything of the journal's job.
        over: ids of jobs that have ended; who keeps one of them was out of reach then.
        captured_step: of the state that this device has, where its model was captured again.
    """
    ended = frozenset(one.job for one in kept.values() if one is not None and one.job in over)
    if found is not None and found[0] in over:  # it ended as its journal was to go
        ended |= {found[0]}
        found = None
    if ended:
        free = {d: None if one and one.job in ended else one for d, one in kept.items()}
        again = partial(decide_resume, fresh=fresh, begun=begun, captured_step=captured_step)
        verdict = again(asked, found, others, free)
        return replace(verdict, ending=verdict.ending | ended)
    jobs = {one.job for one in kept.values() if one is not None}
    old = jobs if found is None else jobs | {found[0]}
    if fresh:
        return ResumeDecision(ResumeMode.FROM_START, ending=frozenset(old))
    if found is not None and found[1] and not begun:
        # No step was reported, and what others have is of first weights that are not drawn again.
        return ResumeDecision(ResumeMode.FROM_START, ending=frozenset(old))
    if found is not None and found[1]:
        return _with_journal(found[0], others, kept, frozenset(old), captured_step)
    same = [one for one in kept.values() if one is not None and one.job.startswith(asked)]
    if same:
        steps = max(one.newest.step for one in same)
        return ResumeDecision(
            ResumeMode.REFUSE,
            f"other devices have this training up to step {steps}, but this device has lost its "
            "record of it: start from the beginning with --fresh, or from a checkpoint with "
            "--resume",
        )
    reason = ""
    if old:
        reason = (
            "an unfinished training of this device is dropped, because the script or its options "
            "changed"
        )
    return ResumeDecision(ResumeMode.FROM_START, reason, frozenset(old))


def _with_journal(
    job: str,
    others: Collection[str],
    kept: Mapping[str, KeptJob | None],
    old: frozenset[str],
    captured_step: int | None,
) -> ResumeDecision:
    keepers = [device for device, one in kept.items() if one is not None and one.job == job]
    unheard = set(others) - kept.keys()
    if keepers or unheard:  # the rules wait for devices without an answer
        return ResumeDecision(ResumeMode.GO_ON, ending=old - {job})
    reason = ""
    if others:
        where = "the beginning" if captured_step is None else f"step {captured_step}"
        reason = (
            f"no device has anything of the unfinished training any more: it starts from {where}"
        )
    return ResumeDecision(ResumeMode.FROM_START, reason, old)
