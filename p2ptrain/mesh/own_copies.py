"""Another process with this device's identity: somebody copied its state folder.

The two must not both be members. A device that hears its own announcement from elsewhere dials it;
the hello tells which of them began later, and that one ends (`connections.py`). A member that has
found an older process says so too. Anybody can announce our id with any addresses, so copies are
dialled one after the other, with a pause, and only the last announcement waits.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Sequence

from p2ptrain.errors import Error, UserError
from p2ptrain.logs import get_logger
from p2ptrain.mesh.addresses import Address
from p2ptrain.mesh.connections import Connections, copied_identity
from p2ptrain.mesh.discovered import Candidate
from p2ptrain.mesh.interfaces import without_scope
from p2ptrain.mesh.tasks import TaskScope
from p2ptrain.net.message import Message

log = get_logger(__name__)

PAUSE_SECONDS = 5.0
"""Between two dials. Shorter: a copy behind invented ones is found sooner; longer: fewer dials."""


class OwnCopies:
    """See the module.

    Args:
        self_id: own id.
        fail: ends this device's membership.
        sleep: waits for seconds.
    """

    def __init__(
        self,
        self_id: str,
        connections: Connections,
        tasks: TaskScope,
        fail: Callable[[UserError], None],
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._self_id = self_id
        self._connections = connections
        self._tasks = tasks
        self._fail = fail
        self._sleep = sleep
        self._waiting: Sequence[Address] = ()  # where to dial next
        self._dialling: asyncio.Task[None] | None = None

    def heard(self, candidate: Candidate, own_ips: Collection[str], own_port: int) -> None:
        """Our own announcement, or that of a copy; `own_ips`: where this process listens."""
        own = {(without_scope(ip), own_port) for ip in own_ips}
        others = [
            (ip, port) for ip, port in candidate.addresses if (without_scope(ip), port) not in own
        ]
        if not others:
            return
        self._waiting = others
        if self._dialling is None or self._dialling.done():
            self._dialling = self._tasks.spawn(self._dial_waiting(), "dial copies")

    async def refused(self, peer_id: str, _message: Message) -> None:
        """A member found an older process with our identity."""
        log.warning("identity_copied", by=peer_id[:16])
        self._fail(copied_identity())

    async def _dial_waiting(self) -> None:
        while self._waiting:
            addresses, self._waiting = self._waiting, ()
            await self._dial(addresses)
            await self._sleep(PAUSE_SECONDS)

    async def _dial(self, addresses: Sequence[Address]) -> None:
        try:
            await self._connections.dial(self._self_id, addresses)
        except Error as error:
            log.info("own_identity_elsewhere", addresses=addresses, why=str(error))
