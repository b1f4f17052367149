"""What the devices of a stage have when a job has ended: the same bits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from p2ptrain.runtime.live_stage import LiveStage
from p2ptrain.worker.hosted_stages import HostedStages
from tests.integration.training.household import Devices


def engaged(household: Devices) -> list[HostedStages]:
    """The stages that are trained now; ask before the job ends, and look when it has."""
    here = (member.service.slot.hosted for member in household.members.values())
    return [hosted for hosted in here if hosted is not None]


def check_replicas(trained: Sequence[HostedStages], steps: int) -> None:
    """Every device of a stage that has made the last update holds the same bits."""
    states: dict[int, Mapping[str, Tensor]] = {}
    assert trained
    for hosted in trained:
        for index, executor in hosted.executors.items():
            live = executor.live
            if live.ready is not None:  # the job has ended before it heard the last word
                if not isinstance(live, LiveStage) or not live.is_ahead:
                    continue
                live.apply(None)
            assert live.version.step == steps
            state = live.on_host(live.named())
            first = states.setdefault(index, state)
            assert first.keys() == state.keys()
            for name, tensor in state.items():
                assert torch.equal(first[name], tensor), (index, name)
