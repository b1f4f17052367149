"""Waits until the membership shows something: enough members, a coordinator, a link.

New devices still dial each other for a moment, so a missing link may be about to come up.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from p2ptrain.logs import get_logger
from p2ptrain.mesh.interface import GONE, MemberChanged, Mesh, MeshEvent

T = TypeVar("T")


async def wait_until(mesh: Mesh, condition: Callable[[], bool]) -> None:
    """Wait until `condition` holds, asked again at each change of membership, links or office."""
    with membership_changes(mesh) as changed:
        while not condition():
            changed.clear()
            await changed.wait()


async def wait_within(mesh: Mesh, condition: Callable[[], bool], seconds: float | None) -> bool:
    """As `wait_until`, but for so long at most (None: for ever). Returns whether the condition
    holds."""
    try:
        async with asyncio.timeout(seconds):
            await wait_until(mesh, condition)
    except TimeoutError:
        return condition()
    return True


async def run_unless(
    mesh: Mesh, over: Callable[[], bool], work: Coroutine[Any, Any, T]
) -> T | None:
    """What `work` returns; None where `over` comes to hold before: then `work` is cancelled."""
    working = asyncio.create_task(work)
    watching = asyncio.create_task(wait_until(mesh, over))
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        working.cancel()
        watching.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


def is_gone(mesh: Mesh, device: str) -> bool:
    """Whether a device is dead, has left, or was never here."""
    member = mesh.members.get(device)
    return member is None or member.state in GONE


@contextmanager
def membership_changes(mesh: Mesh, *, described: bool = True) -> Iterator[asyncio.Event]:
    """An event that is set at each change of membership, links or office.

    Args:
        described: also where a member only says something else of itself.
    """
    changed = asyncio.Event()

    def on_event(event: MeshEvent) -> None:
        if described or not (isinstance(event, MemberChanged) and event.described):
            changed.set()

    unsubscribe = mesh.subscribe(on_event)
    try:
        yield changed
    finally:
        unsubscribe()


log = get_logger(__name__)

LINK_SECONDS = 2.0
"""A device without a link after that long is planned without."""


async def wait_until_linked(
    mesh: Mesh, peers: Collection[str], seconds: float = LINK_SECONDS
) -> None:
    """Wait until this device has a link to each of `peers`, at most so long."""
    wanted = frozenset(peers) - {mesh.self_id}
    if not await wait_within(mesh, lambda: wanted <= mesh.connected, seconds):
        missing = sorted(peer[:12] for peer in wanted - mesh.connected)
        log.info("not_linked", peers=missing)
