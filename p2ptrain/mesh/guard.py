"""Acts on misconduct: warns the user with the member's name and ends links of no more use.

Only what this device received itself counts (conduct.py). A device that is cut off stays paired: it
is connected again when this process restarts, or when the two pair with a code again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from time import monotonic
from types import MappingProxyType

from p2ptrain import events
from p2ptrain.logs import get_logger
from p2ptrain.mesh.conduct import Conduct, ConductAction, ConductConfig, Judgement, Offence
from p2ptrain.mesh.notifications import WarnOnce
from p2ptrain.mesh.trust.trust_store import TrustStore
from p2ptrain.net.fields import printable

log = get_logger(__name__)

_REASON_LIMIT_CHARACTERS = 300


class Guard:
    """See the module.

    Args:
        end_links: (device id) ends its links and takes it for no member any more. Called from the
            event loop, not in the middle of a message.
    """

    def __init__(
        self,
        trust: TrustStore,
        notices: WarnOnce,
        end_links: Callable[[str], None],
        config: ConductConfig | None = None,
        now: Callable[[], float] = monotonic,
    ) -> None:
        self._trust = trust
        self._notices = notices
        self._end_links = end_links
        self._conduct = Conduct(config)
        self._now = now
        self._cut_off: dict[str, str] = {}

    @property
    def cut_off(self) -> Mapping[str, str]:
        """Why each device was cut off, by its id."""
        return MappingProxyType(self._cut_off)

    def is_listened_to(self, device_id: str) -> bool:
        """Whether that device is trusted, and was not cut off since this process began."""
        return self._trust.is_trusted(device_id) and device_id not in self._cut_off

    def note(self, peer_id: str, offence: Offence, about: str = "", why: str = "") -> None:
        """The device did it once more; `about` another one; `why` in words, for the user."""
        if offence is Offence.STRANGERS:
            if about in self._trust.book:
                return  # this device does not listen to it any more, others do
            about = ""  # a liar can make up as many as there are ids
        judgement = self._conduct.note(peer_id, offence, self._now(), about, why)
        if judgement is not None:
            self._act(peer_id, judgement)

    def forgive(self, peer_id: str) -> None:
        """The device is paired again."""
        self._conduct.forgive(peer_id)
        self._cut_off.pop(peer_id, None)

    def _act(self, peer_id: str, judgement: Judgement) -> None:
        name = self._trust.name(peer_id)
        reason = printable(judgement.reason, _REASON_LIMIT_CHARACTERS)
        log.warning("conduct", name=name, id=peer_id[:16], step=judgement.step.name.lower())
        if judgement.step is ConductAction.WARN:
            text = f"{name} {reason}: if that continues, this device ends its link"
            self._notices.emit(events.Warning(text, name))
            return
        self._cut_off[peer_id] = reason
        text = (
            f"{name} {reason}: this device does not talk to it any more, until this device starts "
            f"again; `p2ptrain remove {name}` removes it from the household"
        )
        self._notices.emit(events.Warning(text, name))
        asyncio.get_running_loop().call_soon(self._end_links, peer_id)
