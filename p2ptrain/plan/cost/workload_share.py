"""Whose work is how much of a round: what `--cap` limits.

Work is counted in the reference device's seconds, forward and backward, so that a slow device does
not seem to do more than a fast one with the same units and samples:

    part of a device = sum over its stages of
        (the profile's seconds of the stage's units / those of the whole model)
        x (its samples of a round / batch size, of a tiled stage: its part of the maps)

The parts of a plan's devices sum to 1.
"""

from __future__ import annotations

from itertools import accumulate

from p2ptrain.plan.cost.draft import Draft, StageGroup
from p2ptrain.plan.types.plan import Plan
from p2ptrain.plan.types.profile import Profile

ROUNDING = 1e-9
"""How far a part may lie above its cap: parts are sums of quotients."""


class WorkloadShare:
    """Answers about one profile; keeps what it has computed."""

    def __init__(self, profile: Profile) -> None:
        self._profile = profile
        self._before: dict[int, tuple[float, ...]] = {}

    def units(self, first: int, end: int, samples: int) -> float:
        """Part of the model's work that units [first, end) are, in micro-batches of `samples`."""
        before = self._before.get(samples)
        if before is None:
            before = self._before[samples] = self._running_parts(samples)
        return before[end] - before[first]

    def parts(self, draft: Draft) -> dict[int, float]:
        """Part of the round's work by device index, of the devices in a stage."""
        split, parts = draft.split, dict.fromkeys(draft.devices, 0.0)
        for units, group in zip(draft.units, draft.groups, strict=True):
            stage = self.units(*units, split.first_samples)
            for place, device in enumerate(group.devices):
                parts[device] += stage * group.round_samples(split, place) / split.batch_size
        return parts

    def _running_parts(self, samples: int) -> tuple[float, ...]:
        """Part of the units before each unit; a profile without any time counts units."""
        times = self._profile.times.at(samples)
        seconds = [sum(pair) for pair in zip(times.forward, times.backward, strict=True)]
        running = list(accumulate(seconds, initial=0.0))
        if running[-1] == 0:
            running = list(range(len(seconds) + 1))
        return tuple(value / running[-1] for value in running)


def plan_parts(plan: Plan, profile: Profile) -> dict[str, float]:
    """Part of the round's work by device name, of the devices in a stage."""
    work, split = WorkloadShare(profile), plan.split
    parts = {device.name: 0.0 for stage in plan.stages for device in stage.devices}
    for stage in plan.stages:
        of_model = work.units(*stage.units, split.first_samples)
        shares = tuple(device.share for device in stage.devices)
        if stage.tiling is not None:
            for device, area in zip(stage.devices, stage.tiling.areas(shares), strict=True):
                parts[device.name] += of_model * area
            continue
        group = StageGroup(tuple(range(len(shares))), shares, stage.allocation)
        for place, device in enumerate(stage.devices):
            samples = group.round_samples(split, place)
            parts[device.name] += of_model * samples / split.batch_size
    return parts
