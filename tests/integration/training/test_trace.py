"""`--trace`: what three devices did, as a file that Perfetto takes; the same curve as without."""

from __future__ import annotations

import json
from pathlib import Path
from time import perf_counter

import pytest

from p2ptrain import events
from p2ptrain.job.train_options import TrainOptions
from tests.integration.training.group_plans import divided, force
from tests.integration.training.household import devices
from tests.integration.training.jobs import STEPS, momentum_job, undisturbed
from tests.support.chrome_traces import check_trace


async def test_a_pipeline_with_a_group_is_traced(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    force(monkeypatch, [divided(4), divided(2, 2)])
    file, job, began = tmp_path / "trace.json", momentum_job(), perf_counter()
    async with devices(3) as household:
        await household.holder_run(job, TrainOptions(wait_for=3, trace=file)).run()
    seconds = perf_counter() - began
    trace = check_trace(file.read_text())
    assert set(trace.processes.values()) == {"a", "b", "c"}
    micro_batches = household.plan.micro_batches
    for device in "abc":
        done = [bar["name"].split(" ")[0] for bar in trace.of(device, "compute")]
        assert done.count("forward") >= STEPS * micro_batches
        assert done.count("backward") == STEPS * micro_batches
        assert done.count("update") >= STEPS
        assert trace.of(device, "wait")
    assert len(trace.of("b", "sum")) == STEPS == len(trace.of("c", "sum"))
    carried = {(sender, bar["name"], receiver) for sender, bar, receiver, _ in trace.arrows}
    assert carried >= {
        ("a", "output", "b"),
        ("a", "target", "c"),
        ("b", "gradient", "a"),
        ("b", "sum", "c"),
        ("c", "sum", "b"),
    }
    assert max(bar["ts"] + bar["dur"] for bar in trace.bars) < seconds * 1e6
    errors = {name: of["clock_error_us"] for name, of in trace.other["devices"].items()}
    assert errors["a"] == 0.0
    # One clock for all three here: what is received begins after it was sent, but for the error.
    for _, sent, _, received in trace.arrows:
        assert received["ts"] + received["dur"] >= sent["ts"] - max(errors.values()) - 1.0
    assert all(of["dropped_spans"] == 0 for of in trace.other["devices"].values())
    assert household.losses == pytest.approx(undisturbed(momentum_job()).losses, abs=1e-6)


async def test_a_device_alone_is_traced_and_a_folder_that_is_gone_ends_no_job(
    tmp_path: Path,
) -> None:
    for folder in (tmp_path, tmp_path / "gone"):
        async with devices(1) as household:
            options = TrainOptions(local=True, trace=folder / "trace.json")
            await household.holder_run(momentum_job(), options).run()
        assert len(household.losses) == STEPS
    trace = json.loads((tmp_path / "trace.json").read_text())
    done = {event["name"].split(" ")[0] for event in trace["traceEvents"]}
    assert done >= {"forward", "backward", "update"}
    said = [event.message for event in household.events if isinstance(event, events.Warning)]
    assert any("the trace cannot be written" in message for message in said), said
