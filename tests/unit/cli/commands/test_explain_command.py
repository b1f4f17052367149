"""`explain` where no member runs: what the last job here left, or one clear line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from p2ptrain.cli.main import main
from p2ptrain.cli.usage import DONE, FAILED
from p2ptrain.job.last_job import JOB_FOLDER, keep_facts
from p2ptrain.mesh.identity.state_folder import StateFolder
from tests.unit.plan.test_explain import FACTS


def test_the_last_jobs_facts_are_worded(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    place = ["explain", "--state-dir", str(tmp_path)]
    assert main(place) == FAILED
    assert "has held no training before" in capfd.readouterr().err
    keep_facts(StateFolder(tmp_path / JOB_FOLDER), FACTS)
    assert main(place) == DONE
    assert "laptop limits: laptop computes for 95%" in capfd.readouterr().out
    assert main([*place, "--json"]) == DONE
    said = json.loads(capfd.readouterr().out)
    assert said["event"] == "explain"
    assert said["facts"]["step"] == FACTS.step
    assert said["points"][1]["because"]["laptop"] == 0.95
