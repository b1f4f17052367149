"""Another process with this device's identity: somebody copied its state folder.

The two must not both be members. A device that hears its own announcement from elsewhere dials it;
the hello tells which of them began later, and that one ends (`connections.py`). A member that has
found an older process says so too.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from p2ptrain.errors import Error, UserError
from p2ptrain.logs import get_logger
from p2ptrain.mesh.addresses import Address
from p2ptrain.mesh.connections import Connections, copied_identity
from p2ptrain.mesh.discovered import Candidate
from p2ptrain.mesh.tasks import TaskScope
from p2ptrain.net.message import Message

log = get_logger(__name__)


class OwnCopies:
    """See the module.

    Args:
        self_id: own id.
        fail: ends this device's membership.
    """

    def __init__(
        self,
        self_id: str,
        connections: Connections,
        tasks: TaskScope,
        fail: Callable[[UserError], None],
    ) -> None:
        self._self_id = self_id
        self._connections = connections
        self._tasks = tasks
        self._fail = fail

    def heard(self, candidate: Candidate, own: Collection[Address]) -> None:
        """Our own announcement, or that of a copy; `own`: where this process listens."""
        others = [address for address in candidate.addresses if address not in own]
        if others:
            self._tasks.spawn(self._dial(others), "dial a copy")

    async def refused(self, peer_id: str, _message: Message) -> None:
        """A member found an older process with our identity."""
        log.warning("identity_copied", by=peer_id[:16])
        self._fail(copied_identity())

    async def _dial(self, addresses: Sequence[Address]) -> None:
        try:
            await self._connections.dial(self._self_id, addresses)
        except Error as error:
            log.info("own_identity_elsewhere", addresses=addresses, why=str(error))
