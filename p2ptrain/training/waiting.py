"""Waiting for something the membership must show first."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from p2ptrain.mesh.interface import Mesh


async def until(mesh: Mesh, condition: Callable[[], bool]) -> None:
    """Wait until `condition` holds, asked again at each change of membership or office."""
    with changes(mesh) as changed:
        while not condition():
            changed.clear()
            await changed.wait()


@contextmanager
def changes(mesh: Mesh) -> Iterator[asyncio.Event]:
    """An event that is set at each change of membership or office."""
    changed = asyncio.Event()
    unsubscribe = mesh.subscribe(lambda _event: changed.set())
    try:
        yield changed
    finally:
        unsubscribe()
