"""The newest checkpoints that were written, as copies of the whole model to go on from.

They are read from the disk, stage by stage, only if devices die that had what nobody else has.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from p2ptrain.errors import OptionError, PeerError
from p2ptrain.logs import get_logger
from p2ptrain.training.background import in_background
from p2ptrain.training.checkpoint import KEPT, Written, load_written
from p2ptrain.training.fetching import version_source
from p2ptrain.training.preparation import Prepared
from p2ptrain.training.recovery.version import Version
from p2ptrain.training.state_transfer import StateServer
from p2ptrain.training.versions import Named, laid_out

log = get_logger(__name__)


class CheckpointCopies:
    """See the module. Offered by `states` from the first `take` on.

    Args:
        warn: tells people of one that cannot be read.

    Attributes:
        versions: of which all is on the disk, the newest last. As many as are kept there: one that
            others are reading is not taken away by the next. What cannot be read is taken out.
    """

    def __init__(
        self,
        states: StateServer,
        job: str,
        prepared: Prepared,
        warn: Callable[[str], None],
    ) -> None:
        self.versions: list[Version] = []
        self._warn = warn
        self._states = states
        self._job = job
        self._description = prepared.captured.description
        self._first = prepared.state

    def take(self, version: Version, written: Written) -> None:
        """A newer one is whole."""
        self.versions.append(version)
        read = partial(self._units, version, written)
        self._states.hold(self._job, version_source(version), read)
        for old in self.versions[:-KEPT]:
            self._let_go(old)

    def _let_go(self, version: Version) -> None:
        if version in self.versions:
            self.versions.remove(version)
            self._states.let_go(self._job, version_source(version))

    async def _units(self, version: Version, of: Written, first: int, end: int) -> Named:
        try:
            return await in_background(partial(self._read, of, first, end))
        except OptionError as error:
            log.error("checkpoint_not_read", why=str(error))
            if version in self.versions:
                self._warn(f"{error}: going back to an older state, if there is one")
            self._let_go(version)
            raise PeerError(str(error)) from error

    def _read(self, written: Written, first: int, end: int) -> Named:
        """For seconds: in a thread, or this device says nothing meanwhile and is taken for dead."""
        names = frozenset(self._description.state_names(first, end))
        found = load_written(written, names.__contains__)
        return {name: laid_out(self._first, name, tensor) for name, tensor in found.items()}
