"""Finding out that an epoch stands still: the shell of `recovery.round_watch`, at the holder."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from time import monotonic

from p2ptrain.errors import Error
from p2ptrain.logs import get_logger
from p2ptrain.mesh.interface import Mesh
from p2ptrain.net.message import Message
from p2ptrain.training.holder_epoch import HolderEpoch, SentWrong
from p2ptrain.training.patience import Hangs, hanging
from p2ptrain.training.protocol import ALIVE
from p2ptrain.training.recovery.round_watch import Counters, RoundWatch
from p2ptrain.training.recovery.signs import TALKS, Signs, WorkSign
from p2ptrain.training.recovery.unsent import Standing, Unsent, unsent

log = get_logger(__name__)

ASK_TIMEOUT_SECONDS = 5.0
SILENCE_LOOK_SECONDS = 1.5
SAY_SECONDS = 7.0
"""That nothing moves is said after so long, and each time after three times as long as before."""
SILENCE_SECONDS = 4.0
"""A stage has waited so long where nothing moves, though what it waits for was due."""


async def standstill(mesh: Mesh, epoch: HolderEpoch) -> frozenset[str]:
    """Wait until nothing moves any more. Returns who has not finished what was ordered."""
    watch = RoundWatch(monotonic())
    tracker = epoch.tracker
    heard = tracker.heard
    while True:
        await asyncio.sleep(max(watch.due - monotonic(), 0.0))
        # what a slow data set has not given yet, no stage is to blame for
        if tracker.heard != heard or not tracker.waits_for or epoch.feeder.waits_for_data:
            heard = tracker.heard
            watch.moved(monotonic())
            continue
        counters = await _ask_all(mesh, epoch)
        if watch.look(counters, monotonic()) and tracker.heard == heard:
            return tracker.waits_for


async def silence(mesh: Mesh, epoch: HolderEpoch, say: Callable[[str], None]) -> SentWrong | Hangs:
    """Wait until a device has kept back what others wait for, while nothing moves at all.

    Or until one answers nothing, while no stage reports anything.

    Args:
        say: hears where nothing moves and nobody can be blamed.
    """
    tracker, warmups = epoch.tracker, [place.warmup for place in epoch.assignment.stages]
    before: Mapping[str, Counters] = {}
    heard, asked_at = tracker.heard, monotonic()
    signs: dict[str, Signs] = {}  # of all but this device, since a stage has reported
    still_since, due = asked_at, SAY_SECONDS
    while True:
        await asyncio.sleep(SILENCE_LOOK_SECONDS)
        if tracker.heard != heard or not tracker.waits_for or epoch.feeder.waits_for_data:
            heard, before, still_since, due = tracker.heard, {}, monotonic(), SAY_SECONDS
            signs = {}
            continue
        standings = await epoch.standings()
        now = monotonic()
        silent = _silent(mesh, epoch, signs, standings, now)
        if silent is not None and tracker.heard == heard:
            return silent
        if len(standings) < len(epoch.assignment.devices):
            before = {}
            continue
        counters = {device: counter for device, (counter, _) in standings.items()}
        if before and not RoundWatch.has_moved(before, counters, now - asked_at):
            every = {device: standing for device, (_, standing) in standings.items()}
            found = unsent(every, warmups, SILENCE_SECONDS)
            if found is not None and tracker.heard == heard:
                return _told(epoch, found)
            if now - still_since >= due:
                names = ", ".join(sorted(epoch.name(device) for device in tracker.waits_for))
                say(f"nothing has moved for {now - still_since:.0f} s: {names} did not finish")
                due = 3 * (now - still_since)
        else:
            still_since, due = now, SAY_SECONDS
        before, asked_at = counters, now


def _told(epoch: HolderEpoch, found: Unsent) -> SentWrong:
    wait = found.wait
    what = "gradients" if wait.backward else "activations"
    sender, receiver = epoch.name(found.sender), epoch.name(found.receiver)
    return SentWrong(
        found.sender,
        f"{sender} has not sent the {what} of micro-batch {wait.micro_batch} that {receiver} has "
        f"waited for {wait.seconds:.0f} s",
        found.receiver,
    )


def _silent(
    mesh: Mesh,
    epoch: HolderEpoch,
    signs: dict[str, Signs],
    standings: Mapping[str, tuple[Counters, Standing]],
    now: float,
) -> Hangs | None:
    for device in epoch.assignment.devices:
        if device == mesh.self_id:
            continue
        here = signs.setdefault(device, Signs(now - SILENCE_LOOK_SECONDS, TALKS))
        if device in standings:
            here.heard(WorkSign(standings[device][0].tasks, 0), now)
        found = hanging(mesh, device, here, now)
        if found is not None:
            return found
    return None


async def _ask_all(mesh: Mesh, epoch: HolderEpoch) -> Mapping[str, Counters | None]:
    devices = epoch.assignment.devices
    answers = await asyncio.gather(*(_ask(mesh, device) for device in devices))
    return dict(zip(devices, answers, strict=True))


async def _ask(mesh: Mesh, device: str) -> Counters | None:
    try:
        reply = await mesh.call(device, Message(ALIVE), timeout_seconds=ASK_TIMEOUT_SECONDS)
        return Counters.read(reply.fields)
    except (Error, TimeoutError) as error:
        log.info("no_counters", device=device[:12], why=str(error))
        return None
