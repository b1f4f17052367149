"""Releases of torch that cannot work are named before they crash."""

from __future__ import annotations

import importlib.metadata
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

from p2ptrain import torch_version
from p2ptrain.api.train import train_alone
from p2ptrain.errors import UserError

PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"
WELL = ("2.9.0", "2.9.1+cpu", "2.12.1", "2.13.0+cpu", "2.14.0a0", "3.0.1")
WRONG = ("2.8.0", "2.10.0", "2.11.0+cu130", "1.13.1")


@pytest.mark.parametrize("version", WELL)
def test_a_release_that_works_is_taken(version: str) -> None:
    assert torch_version.why_not(version) is None


@pytest.mark.parametrize("version", WRONG)
def test_a_release_that_does_not_work_is_refused_with_what_to_install(
    version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda _package: version)
    with pytest.raises(UserError, match=r"pip install .torch>=2\.9"):
        torch_version.check()


async def test_it_is_refused_before_what_needs_it_is_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda _package: "2.8.0")
    monkeypatch.setitem(sys.modules, "p2ptrain.api.device_services", None)  # fails to load
    nothing: Any = None
    with pytest.raises(UserError, match="too old"):
        await train_alone(nothing, nothing, None, {})


def test_pip_and_the_check_exclude_the_same() -> None:
    wanted = tomllib.loads(PYPROJECT.read_text())["project"]["dependencies"]
    (torch,) = [found for line in wanted if (found := Requirement(line)).name == "torch"]
    numbers = [version.partition("+")[0] for version in (*WELL, *WRONG)]
    taken = [torch.specifier.contains(number, prereleases=True) for number in numbers]
    assert taken == [torch_version.why_not(number) is None for number in numbers]
