"""Does nobody listen there any more? A refused connection says that a process has ended.

A pulled cable or a frozen process refuses nothing; the kernel of a running machine does, at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from p2ptrain.mesh.addresses import Address

CONNECT_SECONDS = 1.0


async def all_refuse(addresses: Sequence[Address]) -> bool:
    """Whether each of `addresses` (at least one) refuses connections."""
    if not addresses:
        return False
    return all(await asyncio.gather(*(_refuses(address) for address in addresses)))


async def _refuses(address: Address) -> bool:
    try:
        async with asyncio.timeout(CONNECT_SECONDS):
            _, writer = await asyncio.open_connection(*address)
    except ConnectionRefusedError:
        return True
    except OSError:  # TimeoutError included
        return False
    writer.transport.abort()
    return False
