"""Devices that measure a model of others in a box, and one whose box it ends."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace

import pytest
from torch.utils.data import default_collate

from p2ptrain.job.train_options import TrainOptions
from p2ptrain.model.capture.capture import capture
from p2ptrain.process.box import Box, BoxTask, Zygote
from p2ptrain.process.compute_thread import ComputeThread
from p2ptrain.profiling import boxed_measure
from p2ptrain.profiling.profile_cache import ProfileCache, measure, measure_boxed
from tests.integration.training import crashing
from tests.integration.training.household import devices
from tests.integration.training.jobs import make_job
from tests.support import zoo

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="one process forks all boxes")


@pytest.fixture(scope="module")
def zygote() -> Iterator[Zygote]:
    made = Zygote([boxed_measure.__name__, crashing.__name__])
    yield made
    made.close()


class Crashing(Box):
    """Whatever is measured here ends its process."""

    def __init__(self, zygote: Zygote, shared: Box) -> None:
        super().__init__(zygote)
        self._shared, self.asked = shared, 0

    async def ask(self, question: BoxTask) -> bytes:
        self.asked += 1
        return await self._shared.ask(replace(question, function=f"{crashing.__name__}:measure"))


async def test_a_device_whose_box_the_model_ends_is_left_out_and_the_others_train(
    zygote: Zygote,
) -> None:
    shared = Box(zygote)
    crashes = Crashing(zygote, shared)
    async with devices(3, boxes={"a": shared, "b": crashes, "c": shared}) as household:
        await household.holder_run(make_job(), TrainOptions(wait_for=3, planner="pp")).run()
        (left_out,) = household.plan.left_out
        placed = {device.name for stage in household.plan.stages for device in stage.devices}
        warnings = [message for name, message in household.warned if name == "b"]
    assert left_out.name == "b"
    assert "in layer 1 (SIGSEGV)" in left_out.reason
    assert placed == {"a", "c"}
    assert len(household.losses) == 6
    assert len(warnings) == 1
    assert "a model of a " in warnings[0]
    assert "SIGSEGV" in warnings[0]
    assert crashes.asked == 1, "it is not tried again"


@pytest.mark.parametrize("name", ["mlp", "cnn"])
async def test_what_is_found_in_a_box_is_what_is_found_here(zygote: Zygote, name: str) -> None:
    made = zoo.make(name)
    example = default_collate(made.data[:4])
    description = capture(made.model, made.loss, example).description
    compute, profiles = ComputeThread(), ProfileCache(None)
    content, digest = description.to_bytes(), description.digest
    there = await measure_boxed(content, digest, [1, 4], compute, profiles, 1 << 30, Box(zygote))
    here = await measure(description, [1, 4], compute, ProfileCache(None), 1 << 30)
    assert await measure(description, [1, 4], compute, profiles, 1 << 30) == there, "it is kept"
    await compute.close()
    for key in ("units", "input_bytes", "target_bytes", "method", "processor", "faster"):
        assert there[key] == here[key]
    assert there["times"].keys() == here["times"].keys()
