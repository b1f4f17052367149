"""`--engine torch`: one rank trains plain torch's curve to the bit, three the same but for sums."""

from __future__ import annotations

import json
import multiprocessing
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import p2ptrain
from p2ptrain.events import Done, Eval, Event, Plan, Step
from tests.integration.torch_engine import train_all
from tests.integration.torch_engine.jobs import JOBS, groups, pairs, plain_torch

TOLERANCE = 1e-6
"""Of a loss, relative: the order in which float32 gradients are added."""

SCRIPT = """
import os, p2ptrain
from tests.integration.torch_engine.jobs import pairs
def job():
    print("script output")
    made = pairs()
    if os.environ["RANK"] == "1":
        made.model.forward = lambda x: x.no_such_thing
    return made
"""


def torchrun(*arguments: str, ranks: int) -> subprocess.CompletedProcess[str]:
    command = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks))
    root = Path(__file__).parents[3]
    return subprocess.run(
        [*command, "--standalone", *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def on_ranks(world: int, folder: Path) -> list[dict[str, Any]]:
    """What each rank of a world found; forked where torch is loaded, which takes torchrun long."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([train_all.__name__])
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    usual = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(world)}
    files = [folder / str(rank) for rank in range(world)]
    processes = [
        context.Process(
            target=train_all.main,
            args=(str(file), {**usual, "RANK": str(rank), "LOCAL_RANK": str(rank)}),
            daemon=True,
        )
        for rank, file in enumerate(files)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    return [json.loads(file.read_text(encoding="utf-8")) for file in files]


@pytest.mark.parametrize("name", JOBS)
def test_one_rank_is_plain_torch_to_the_bit(name: str) -> None:
    job, plain = JOBS[name](), JOBS[name]()
    steps: list[Step] = []

    def note(event: Event) -> None:
        if isinstance(event, Step):
            steps.append(event)

    p2ptrain.train(job, engine="torch", on_event=note)
    assert [step.loss for step in steps] == plain_torch(plain)
    assert {step.tokens_per_s is not None for step in steps} == {name == "padded"}
    wanted = plain.model.state_dict()
    assert all(torch.equal(tensor, wanted[key]) for key, tensor in job.model.state_dict().items())


def test_three_ranks_are_plain_torch_but_for_the_order_of_sums(tmp_path: Path) -> None:
    by_rank = on_ranks(3, tmp_path)
    for name, make in JOBS.items():
        job = make()
        wanted = plain_torch(job)
        assert by_rank[0][name]["losses"] == pytest.approx(wanted, rel=TOLERANCE)
        assert not by_rank[1][name]["losses"]
        states = [found[name]["state"] for found in by_rank]
        assert states[1] == states[0] == states[2]
        for key, tensor in job.model.state_dict().items():
            found = torch.tensor(states[0][key], dtype=tensor.dtype)
            assert torch.allclose(found, tensor, rtol=0, atol=1e-5), key


@pytest.mark.timeout(300)
def test_a_rank_that_fails_ends_all_with_one_line(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT, encoding="utf-8")
    done = torchrun("-m", "p2ptrain", "train", str(script), "--engine", "torch", "--json", ranks=2)
    lines = [line for line in done.stderr.splitlines() if "p2ptrain: error" in line]
    assert done.returncode != 0
    assert len(lines) == 1
    assert "rank 1 has failed" in lines[0]
    assert "no_such_thing" in lines[0]
    (event,) = map(json.loads, done.stdout.splitlines())
    assert event["event"] == "error"


def test_evaluations_callbacks_and_checkpoints(tmp_path: Path) -> None:
    """What rank 0 does between rounds; and the job continues from the checkpoint to the bit."""
    whole, checkpoint, best = groups(), tmp_path / "checkpoint", tmp_path / "best.safetensors"
    p2ptrain.train(whole, engine="torch")
    seen: list[Event] = []

    def stop(event: Event) -> None:
        seen.append(event)
        if isinstance(event, Step) and event.step == 3:
            raise p2ptrain.StopTraining

    made = groups()
    best_of = p2ptrain.SaveBest("loss", best)
    job = p2ptrain.Job(
        *(made.model, made.data, made.loss, made.optimizer, made.batch_size, made.micro_batch),
        scheduler=made.scheduler,
        clip_grad_norm=0.1,
        epochs=2,
        eval_data=made.data,
        callbacks=[stop, best_of],
        ema=0.9,
    )
    kept = {"checkpoint": checkpoint, "out": tmp_path / "out.safetensors"}
    p2ptrain.train(job, engine="torch", **kept)
    assert [type(event) for event in seen] == [Plan, Step, Step, Step, Eval, Done]
    assert best.exists()
    assert (tmp_path / "out.ema.safetensors").exists()
    rest = groups()
    rest = p2ptrain.Job(
        *(rest.model, rest.data, rest.loss, rest.optimizer, rest.batch_size, rest.micro_batch),
        scheduler=rest.scheduler,
        clip_grad_norm=0.1,
        epochs=2,
        ema=0.9,
    )
    p2ptrain.train(rest, engine="torch", resume=checkpoint)
    wanted = whole.model.state_dict()
    assert all(torch.equal(tensor, wanted[key]) for key, tensor in rest.model.state_dict().items())


def test_what_belongs_to_a_household_is_refused() -> None:
    with pytest.raises(p2ptrain.OptionError, match="no wait_for"):
        p2ptrain.train(pairs(), engine="torch", wait_for=3)
    with pytest.raises(p2ptrain.OptionError, match="no name"):
        p2ptrain.train(pairs(), engine="torch", name="here")
