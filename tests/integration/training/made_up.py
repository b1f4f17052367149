"""Profiles whose units take seconds, so that plans and drift do not hang on this machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from p2ptrain.model.graph.description import ModelDescription
from p2ptrain.process.compute_thread import ComputeThread
from p2ptrain.profiling.profile_cache import Measuring, ProfileCache, measure
from p2ptrain.recovery.recovery_settings import RecoverySettings
from p2ptrain.worker import device_profile

UNIT_SECONDS = (1.0, 2.0)
"""Of a unit's forward and backward, whatever the size of a micro-batch: no link costs as much."""

SOON = RecoverySettings(
    newcomer_settle_seconds=0.0,
    drift_window_seconds=0.0,
    drift_copying_seconds=0.0,
    drift_look_seconds=0.0,
)
"""Every round counts for drift, and at once."""

_profiles = ProfileCache(None, Measuring(0.0, 0.0, 0.0, 0.0))


async def made_up(
    description: ModelDescription,
    sizes: Sequence[int],
    thread: ComputeThread,
    cache: ProfileCache,
    memory_bytes: int,
    *,
    largest_second: bool = False,
) -> Mapping[str, Any]:
    """In place of `profiling.measure`: its units, whose times are no one's."""
    found = await measure(
        *(description, sizes, thread, _profiles, memory_bytes), largest_second=largest_second
    )
    units = len(found["units"])
    forward, backward = UNIT_SECONDS
    each = {"forward": [forward] * units, "backward": [backward] * units}
    return {**found, "times": {str(size): each for size in sizes}, "wall_by_cpu": 1.0}


def make_up_profiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """By which a unit is worth a device of its own."""
    monkeypatch.setattr(device_profile, "measure", made_up)
