"""The benchmark of accelerators, on the processor."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

from p2ptrain.devices.processor import HOST
from tests.support.twin_device import TwinDevice
from tools.gpu_bench import HEADER, copies, measure, measure_beside, our_step_seconds
from tools.gpu_models import Workload, workloads


def test_a_step_of_ours_is_timed(tmp_path: Path) -> None:
    workload, *_ = workloads(small=True)
    assert our_step_seconds(workload, "cpu", 6, tmp_path) > 0


async def test_all_that_is_asked_of_an_accelerator_is_shown() -> None:
    chosen, shown = workloads(small=True)[:2], list[str]()
    twin = TwinDevice()
    twin.prepare_thread()
    alone = measure(twin, chosen, 6, lambda _: 0.5, shown.append)
    assert alone == [0.5, 0.5]
    assert "Twin of an accelerator (twin)" in shown[0]
    assert any(line.startswith("conv2d in bfloat16") for line in shown)
    assert any("GB/s" in line for line in shown)
    table = shown[shown.index(HEADER) + 1 :]
    assert [line.split()[0] for line in table] == [workload.name for workload in chosen]
    assert all(len(line.split()) == len(HEADER.split()) - 2 for line in table)

    async def members() -> AsyncIterator[tuple[Workload, float, str]]:
        yield chosen[0], 0.25, "used: bench, helper"

    await measure_beside(chosen, alone, members(), shown.append)
    assert "250.00 beside, 2.00 times as fast: used: bench, helper" in shown[-2]
    assert shown[-1].endswith("no time left")


def test_copies_are_timed_beside_a_product() -> None:
    rate, beside = copies(HOST)
    assert "GB/s" in rate
    assert "hidden" in beside
