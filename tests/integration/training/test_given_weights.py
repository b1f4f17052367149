"""A model on "meta" with its weights in a file trains as the model itself."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file

from p2ptrain.job.job import Job
from tests.integration.training.household import devices
from tests.integration.training.jobs import (
    assert_same_weights,
    make_job,
    one_stage_each,
    undisturbed,
)
from tests.support import zoo


async def test_a_model_on_meta_trains_from_its_file(tmp_path: Path) -> None:
    file = tmp_path / "first.safetensors"
    wanted_job = make_job()
    save_file(wanted_job.model.state_dict(), file)
    wanted = undisturbed(wanted_job)
    with torch.device("meta"):
        model = zoo.make("mlp").model
    assert all(parameter.is_meta for parameter in model.parameters())
    job: Job = make_job(model=model, weights=file)
    async with devices(2) as household:
        await household.holder_run(job, one_stage_each(2, 1000)).run()
    assert household.losses == wanted.losses
    assert_same_weights(job, wanted)
