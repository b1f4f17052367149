"""A model on "meta" with its weights in a file trains as the model itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from p2ptrain.holder.start import prepared_job
from p2ptrain.job.job import Job
from p2ptrain.state.fetch import fetch_units
from p2ptrain.state.transfer_client import Known
from p2ptrain.worker import generation_builder
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


@pytest.mark.parametrize("theirs", ["the same file", "other numbers", "no file"])
async def test_frozen_weights_come_from_a_file_of_the_device_s_own(
    theirs: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where it is the same: digests tell."""

    def made(weights: Path | None = None) -> Job:
        job = make_job(weights=weights)
        for parameter in list(job.model.parameters())[:-1]:
            parameter.requires_grad_(False)
        return job

    file, other = tmp_path / "first.safetensors", tmp_path / "other.safetensors"
    save_file(made().model.state_dict(), file)
    save_file({name: t + 1 for name, t in made().model.state_dict().items()}, other)
    hints = {"the same file": str(file), "other numbers": str(other), "no file": str(tmp_path)}
    monkeypatch.setattr(prepared_job, "hint_of", lambda _path, _most: hints[theirs])
    read: list[int] = []

    def counted(*asked: Any, known: Known) -> Any:
        *others, count = asked

        def arrived(nbytes: int) -> None:
            read.append(nbytes)
            count(nbytes)

        return fetch_units(*others, arrived, known=known)

    monkeypatch.setattr(generation_builder, "fetch_units", counted)
    job = made(file)
    async with devices(2) as household:
        await household.holder_run(job, one_stage_each(2, 1000)).run()
    wanted = undisturbed(made())
    assert household.losses == wanted.losses
    assert_same_weights(job, wanted)
    last = household.plan.stages[1].parameters
    tensors = {n: p for n, p in job.model.named_parameters() if n in last}
    trained = sum(p.nbytes for p in tensors.values() if p.requires_grad)
    every = sum(p.nbytes for p in tensors.values())
    assert trained < every
    assert sum(read) == (trained if theirs == "the same file" else every)
