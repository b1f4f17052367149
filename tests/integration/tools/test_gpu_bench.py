"""The benchmark of accelerators, on the processor."""

from __future__ import annotations

from pathlib import Path

from p2ptrain.devices.processor import HOST
from tools.gpu_bench import HEADER, Row, copies, our_step_seconds, plain_step_seconds
from tools.gpu_models import workloads


def test_a_step_of_plain_torch_and_of_ours_is_timed(tmp_path: Path) -> None:
    workload, *_ = workloads(small=True)
    plain = plain_step_seconds(workload, HOST, 6)
    ours = our_step_seconds(workload, "cpu", 6, tmp_path)
    row = str(Row(workload.name, 1e3 * plain, 1e3 * plain, 1e3 * ours, None, ""))
    assert len(row.split()) >= len(HEADER.split()) - 2
    assert plain > 0
    assert ours > 0


def test_copies_are_timed_beside_a_product() -> None:
    rate, beside = copies(HOST)
    assert "GB/s" in rate
    assert "hidden" in beside
