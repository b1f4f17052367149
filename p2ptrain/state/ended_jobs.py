"""The jobs of this device that are over, written down for devices that missed their end."""

from __future__ import annotations

from collections.abc import Collection

from p2ptrain.errors import UserError
from p2ptrain.logs import get_logger
from p2ptrain.mesh.identity.state_folder import StateFolder

log = get_logger(__name__)

ENDED_FILE = "ended.json"

MAX_JOBS = 64
"""The newest; a device that slept through more keeps its job until `--fresh` or ten minutes."""


def note_ended(folder: StateFolder, jobs: Collection[str]) -> None:
    """Write down that these are over; a disk that refuses is only logged."""
    known = [job for job in find_ended(folder) if job not in jobs]
    try:
        folder.write_json(ENDED_FILE, {"jobs": [*known, *sorted(jobs)][-MAX_JOBS:]})
    except (OSError, UserError) as error:
        log.warning("end_not_noted", why=str(error))


def find_ended(folder: StateFolder) -> tuple[str, ...]:
    """Those written down, the newest last."""
    try:
        found = folder.read_json(ENDED_FILE)
    except UserError as error:
        log.warning("ends_unreadable", why=str(error))
        return ()
    jobs = found.get("jobs") if isinstance(found, dict) else found  # older ones are a list
    return tuple(job for job in jobs if isinstance(job, str)) if isinstance(jobs, list) else ()
