"""What was known of this device's last job when it ended, for `p2ptrain explain` afterwards."""

from __future__ import annotations

from pathlib import Path

from p2ptrain.mesh.identity.state_folder import StateFolder
from p2ptrain.plan.types.job_facts import JobFacts

JOB_FOLDER = "job"
"""In the state folder."""

_FILE = "last_job.json"


def keep_facts(folder: StateFolder, facts: JobFacts) -> None:
    """`folder`: of jobs. Raises UserError: it cannot be written."""
    folder.write_form(_FILE, facts)


def last_facts(state_dir: Path) -> JobFacts | None:
    """None where no job has ended here. Raises UserError: the file is not to be read."""
    folder = state_dir / JOB_FOLDER
    return StateFolder(folder).read_form(_FILE, JobFacts) if folder.is_dir() else None
