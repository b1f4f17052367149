"""Which faults there are: every failpoint with every device that dies there, and random moments."""

from __future__ import annotations

import random
from collections.abc import Iterator

from tests.support.faults import GROUP, STEP, STEPS, ZERO_BUBBLE, Fault

_PIECES = (  # (name, stages where it is not reached); several times a round
    ("forward.receive.before", ""),
    ("forward.receive.after", ""),
    ("forward.compute.after", ""),
    ("forward.send.before", "d"),
    ("forward.send.after", "d"),
    ("backward.receive.before", ""),
    ("backward.receive.after", ""),
    ("backward.compute.after", ""),
    ("backward.send.before", "b"),
    ("backward.send.after", "b"),
)
_ROUND = (  # once a round
    ("ties.send.before", "c"),
    ("ties.receive.after", "bc"),
    ("done.send.before", ""),
    ("done.send.after", ""),
    ("commit.receive.before", ""),
    ("update.before", ""),
    ("update.after", ""),
    ("version.after", ""),
)
_CLIPPED = (("norms.send.before", ""), *_ROUND)
_DECISION = ("decide.before", "report.after", "commit.send.between")
_CHANGE = (
    "state_report.receive.before",
    "state_report.answer.before",
    "prepare.receive.before",
    "build.after",
    "ready.send.before",
    "begin.receive.before",
)
_OFFICE = ("planned.after", "prepare.send.between", "answer.before")
_BEGIN = ("accept.before", "begin.send.between", "replay.first")
_OF_OWNERS = ("replica.copied", "replica.offer.after")
_OF_KEEPERS = (
    "replica.read.between",
    "replica.whole.before",
    "replica.kept.before",
    "replica.kept.after",
)
_OF_COPIES = ("stable.before", "versions.keep.between")
_ON_DISK = (
    "checkpoint.gather.between",
    "checkpoint.rename.before",
    "checkpoint.index.before",
    "checkpoint.index.after",
)
_LOOK = ("look.ask.before", "look.found.before")
_LEAVE = ("leave.receive.before", "leave.answer.before")
_BORDER = ("settled.receive.before", "settled.answer.before")
_GROUP = (
    *("bucket.send.before", "bucket.receive.after", "update.before", "update.after"),
    *("done.send.before", "done.send.after"),
)
_TRAILING = ("update.begin.before", "update.end.after")  # where the next order is there in time


def every_fault() -> list[Fault]:
    """Every failpoint with every stage that dies there, alone and while others are gone already."""
    return [
        *_in_rounds(),
        *_in_changes(),
        *_of_the_coordinator(),
        *_of_copies(),
        *_going_back_to_copies(),
        *_making_anew(),
        *_of_joins(),
        *_of_leaves(),
        *_at_the_end(),
        *_of_groups(),
        *_of_the_holder(),
    ]


def _in_rounds() -> Iterator[Fault]:
    for device in "bcd":
        for names, counts in ((_PIECES, (1, 7)), (_ROUND, (1, 3))):
            for name, not_at in names:
                if device not in not_at:
                    yield from (Fault(name, device, device, count) for count in counts)
        for name, not_at in _CLIPPED:
            if device not in not_at:
                yield from (Fault(name, device, device, n, clips=True) for n in (1, 3))
        for name in _DECISION:
            yield from (Fault(name, device, "a", count) for count in (1, 2))
        yield Fault("backward.weights.after", device, device, 2, stages=ZERO_BUBBLE)


def _in_changes() -> Iterator[Fault]:
    for name in _CHANGE:
        yield from (Fault(name, device, device, first="cut") for device in "bcd")
        for device in "bde":
            yield Fault(name, device, device, first="c", may_miss=device == "e")
    for device in "bde":
        yield Fault("fetch.between", device, device, first="c", may_miss=True)
    for name in _BEGIN:
        yield from (Fault(name, device, "a", first="cut") for device in "bcd")
        yield from (Fault(name, device, "a", first="b") for device in "cde")


def _of_the_coordinator() -> Iterator[Fault]:
    for name in _OFFICE:
        for first in ("cut", "c"):
            for victim in "bcde":
                if victim != first:
                    yield Fault(name, victim, "a", first=first, coordinator="e")
        yield Fault(name, "d", "a", first="cut", coordinator="d")
        yield Fault(name, "d", "a", first="b", coordinator="d")
    for name in _CHANGE:
        yield Fault(name, "e", "b", first="cut", coordinator="e")


def _of_copies() -> Iterator[Fault]:
    """`c` keeps the copies of `b` and `d`, `d` those of `c`."""
    for device in "bcd":
        for name in _OF_OWNERS:
            yield Fault(name, device, device, copies=True)
        for name in _OF_KEEPERS:
            yield from (Fault(name, device, keeper, copies=True) for keeper in "cd")
        for name in _OF_COPIES:
            yield Fault(name, device, "a", copies=True)
    # with `a` as the first stage `b` keeps the copies of `a` and `c`, and `c` those of `b`
    for name in (*_OF_OWNERS, *_OF_COPIES):
        yield Fault(name, "a", "a", copies=True)
    for name in _OF_KEEPERS:
        yield from (Fault(name, "a", keeper, copies=True) for keeper in "bc")


def _going_back_to_copies() -> Iterator[Fault]:
    """The first weights are no way back."""
    for device in "abcd":
        own = "b" if device == "a" else device  # as the first stage
        for name, not_at in (*_PIECES, *_ROUND):
            if own not in not_at:
                yield Fault(name, device, device, copies=True)
        for name, not_at in _CLIPPED:
            if own not in not_at:
                yield Fault(name, device, device, copies=True, clips=True)


def _making_anew() -> Iterator[Fault]:
    """The second stage's device has died: `d`, its keeper, gets from `b` and itself what it got."""
    for victim in "bde":
        yield Fault("rebuild.step.before", victim, "d", first="c", copies=True)
        yield Fault("rebuild.after", victim, "d", first="c", copies=True)
        yield Fault("rebuild.after", victim, "d", first="c", copies=True, clips=True)
        yield from (
            Fault("log.send.between", victim, sender, first="c", copies=True) for sender in "bd"
        )


def _of_joins() -> Iterator[Fault]:
    """`e` comes, and is given the first stage; `c` keeps the second, `b` has the third."""
    for victim in "bcdea":
        for name in _LOOK:
            yield Fault(name, victim, "a", first="join")
        for name in ("look.measured.after", *_OFFICE):
            yield Fault(name, victim, "a", first="join")
            if victim != "a":
                yield Fault(name, victim, "a", first="join", coordinator="d")
        for name in _BORDER:
            yield Fault(name, victim, "c", first="join")
        for name in (*_CHANGE, *_BEGIN):
            comes = "a" if name in _BEGIN else victim if victim in "bce" else "e"
            yield Fault(name, victim, comes, first="join")
    for victim in "be":  # `c` has what it needs
        yield Fault("fetch.between", victim, victim, first="join")


def _of_leaves() -> Iterator[Fault]:
    """The second stage's device hands its work over; it may die of it, and so may others."""
    for victim in "bcdea":
        for name in (*_LOOK, *_LEAVE, *_BEGIN):
            yield Fault(name, victim, "a", first="leave")
        for name in _OFFICE:
            yield Fault(name, victim, "a", first="leave")
            if victim != "a":
                yield Fault(name, victim, "a", first="leave", coordinator="e")
        for name in (*_BORDER, *_CHANGE):
            comes = victim if victim in "bd" else "b"
            yield Fault(name, victim, comes, first="leave", may_miss=name in _CHANGE[2:])
    yield Fault("leave.ask.before", "c", "c", first="leave")


def _at_the_end() -> Iterator[Fault]:
    for device in "bcd":
        for count in (1, 2):
            yield Fault("home.between", device, "a", count)
            for name in _ON_DISK:
                yield Fault(name, device, None, count, checkpoints=True)


def _of_groups() -> Iterator[Fault]:
    for device in "cd":
        for name in _GROUP:
            yield from (Fault(name, device, device, count, stages=GROUP) for count in (1, 2))
        yield from (Fault(name, device, device, 1, stages=GROUP) for name in _TRAILING)


def _of_the_holder() -> Iterator[Fault]:
    """It has the first stage; what only it comes to as the one with the data is not said twice."""
    for names, counts in ((_PIECES, (1, 7)), (_ROUND, (1, 3))):
        for name, not_at in names:
            if "b" not in not_at:
                yield from (Fault(name, "a", "a", count) for count in counts)
    for name, not_at in _CLIPPED:
        if "b" not in not_at:
            yield from (Fault(name, "a", "a", count, clips=True) for count in (1, 3))
    for name in _DECISION:
        yield from (Fault(name, "a", "a", count) for count in (1, 2))
    for name in (*_CHANGE, *_BEGIN, *_OFFICE):
        yield Fault(name, "a", "a", first="cut")
        yield Fault(name, "a", "a", first="c")
    yield Fault("fetch.between", "a", "a", first="c", may_miss=True)
    yield from (Fault("home.between", "a", "a", count) for count in (1, 2))
    yield Fault("weights.written", "a", "a")
    for name in _ON_DISK:
        yield from (Fault(name, "a", None, count, checkpoints=True) for count in (1, 2))


def random_fault(seed: int) -> Fault:
    """One device or two die at any moment; with copies alone, once there are some."""
    chance = random.Random(seed)
    count = chance.choice((1, 1, 2))
    copies = count == 1 and seed % 2 == 1
    kills = tuple(
        (chance.randint(STEP if copies else 1, STEPS), chance.uniform(0.0, 0.06), name)
        for name in chance.sample("bcde", count)
    )
    return Fault("", kills=kills, coordinator=chance.choice("abcde"), copies=copies)
