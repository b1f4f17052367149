"""What `EarlyStopping` and `SaveBest` know, written down beside the journal after each evaluation.

So a holder that is started again continues to count where it was, and does not replace the best
weights by worse ones. Callbacks are known by their order in the job.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from p2ptrain.errors import UserError
from p2ptrain.job.callbacks import BestSoFar, BestValue
from p2ptrain.logs import get_logger
from p2ptrain.mesh.identity.state_folder import StateFolder
from p2ptrain.net.forms import Id, Length
from p2ptrain.net.write_form import write_form

log = get_logger(__name__)

CALLBACKS_FILE = "callbacks.json"

CALLBACKS_LIMIT = 1_000


@dataclass(frozen=True, slots=True)
class _CallbacksFile:
    format: Literal["p2ptrain.callbacks/1"]
    job: Id
    found: Annotated[tuple[BestSoFar, ...], Length(CALLBACKS_LIMIT)]


def keep(folder: StateFolder | None, job: str, callbacks: Sequence[Any]) -> None:
    """Write it down; a disk that refuses is only logged."""
    found = tuple(one.found for one in callbacks if isinstance(one, BestValue))
    if folder is None or not found:
        return
    try:
        written = _CallbacksFile("p2ptrain.callbacks/1", job, found[:CALLBACKS_LIMIT])
        folder.write_json(CALLBACKS_FILE, write_form(written))
    except (OSError, UserError) as error:
        log.warning("callbacks_not_noted", why=str(error))


def recall(folder: StateFolder | None, job: str, callbacks: Sequence[Any]) -> None:
    """Have them go on from what was written down of that job, if anything was."""
    known = [one for one in callbacks if isinstance(one, BestValue)]
    if folder is None or not known:
        return
    try:
        written = folder.read_form(CALLBACKS_FILE, _CallbacksFile)
    except UserError as error:
        log.warning("callbacks_unreadable", why=str(error))
        return
    if written is not None and written.job == job and len(written.found) == len(known):
        for callback, found in zip(known, written.found, strict=True):
            callback.found = found
