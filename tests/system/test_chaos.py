"""The short form of `python -m tools.chaos`: misfortunes come, and training continues."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.chaos import Chaos, Outcome, Settings
from tools.chaos.__main__ import problems, report
from tools.chaos.misfortunes import LEAST_DEVICES, Fate, Kind

pytestmark = [pytest.mark.namespaces, pytest.mark.household, pytest.mark.timeout(300)]

SHORT = Settings(devices=5, share=0.3, every=6.0, seconds=18.0, calm=2.0, longest=4.0, seed=3)


def test_every_kind_of_misfortune_comes_as_often_and_the_same_every_time() -> None:
    devices = [f"device{number}" for number in range(1, 8)]
    fate, again = Fate(devices, 5), Fate(devices, 5)
    dealt = [fate.next(()) for _ in range(30)]
    assert dealt == [again.next(()) for _ in range(30)]
    kinds = [misfortune.kind for misfortune in dealt if misfortune is not None]
    assert [kinds.count(kind) for kind in Kind] == [10, 10, 10]
    assert {misfortune.device for misfortune in dealt if misfortune} == set(devices)


def test_enough_devices_are_left_alone() -> None:
    devices = [f"device{number}" for number in range(1, 8)]
    fate = Fate(devices, 5)
    hit = devices[: -LEAST_DEVICES + 1]
    assert fate.next(hit) is None
    misfortune = fate.next(devices[:-LEAST_DEVICES])
    assert misfortune is not None
    assert misfortune.device not in devices[:-LEAST_DEVICES]


def _outcome(planner: str, *losses: float) -> Outcome:
    settings = Settings(planner=planner, seconds=10.0, every=10.0)
    return Outcome(settings, undisturbed_per_s=0.1, losses=list(losses))


@pytest.mark.parametrize(("planner", "bar"), [("pp", 0.0), ("hybrid", 1e-8)])
def test_losses_are_held_against_one_devices_as_exactly_as_the_planner_allows(
    planner: str, bar: float
) -> None:
    assert problems(_outcome(planner, 2.0, 1.0), [2.0, 1.0]) == []
    off = ["the losses differ from step 2 on"]
    assert problems(_outcome(planner, 2.0, 1.0 + 3e-8), [2.0, 1.0]) == off
    assert problems(_outcome(planner, 2.0), [2.0, 1.0]) == off
    near = problems(_outcome(planner, 2.0, 1.0 + 3e-9), [2.0, 1.0])
    assert near == ([] if bar else off)


@pytest.mark.usefixtures("emulation")
async def test_training_goes_on_and_its_losses_are_those_of_one_device(tmp_path: Path) -> None:
    said: list[str] = []
    chaos = Chaos(SHORT, tmp_path, said.append, load=False)
    outcome = await chaos.run()
    story = "\n".join([*said, report(outcome)])
    assert not problems(outcome, await chaos.reference(len(outcome.losses))), story
    assert len(outcome.misfortunes) >= 3, story
    assert outcome.recoveries, story
    assert outcome.steps > 0, story
