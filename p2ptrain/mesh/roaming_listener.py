"""Listening follows `--interface` when its addresses change, as a lease or a network ends.

Without `--interface` a device listens on all addresses, whichever they are.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from p2ptrain.errors import OptionError
from p2ptrain.mesh.roaming import LOOK_SECONDS, OwnAddresses


async def follow(
    own: OwnAddresses,
    move: Callable[[Sequence[str]], None],
    warn: Callable[[str], None],
    look_seconds: float = LOOK_SECONDS,
) -> None:
    """Listen where `own` leads, until cancelled; an interface that is gone is waited for.

    Args:
        own: refreshed from here.
        move: `Listener.move`.
        warn: tells people something, once however often it happens.
        look_seconds: between two looks.
    """
    while True:
        await asyncio.sleep(look_seconds)  # the period of looking
        own.refresh()
        if not own.ips:
            continue
        try:
            move(own.ips)
        except OptionError as error:  # tried again at the next look
            warn(f"{error}: other devices cannot connect there")
