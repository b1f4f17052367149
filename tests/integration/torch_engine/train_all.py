"""One rank: trains every job, one after the other, and writes what came of it."""

from __future__ import annotations

import json
import os

import torch

import p2ptrain
import p2ptrain.torch_engine.trainer  # for those who fork
from p2ptrain.events import Event
from tests.integration.torch_engine.jobs import JOBS


def main(file: str, environment: dict[str, str]) -> None:
    """`file` receives the losses by job; `environment` is what torchrun would set."""
    os.environ.update(environment)
    torch.set_num_threads(1)
    found = {}
    for name, make in JOBS.items():
        job, losses = make(), []

        def note(event: Event, losses: list[float] = losses) -> None:
            if isinstance(event, p2ptrain.events.Step):
                losses.append(event.loss)

        model = p2ptrain.train(job, engine="torch", on_event=note)
        state = {key: tensor.tolist() for key, tensor in model.state_dict().items()}
        found[name] = {"losses": losses, "state": state}
    with open(file, "w", encoding="utf-8") as out:
        json.dump(found, out)
