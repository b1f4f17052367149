from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from p2ptrain.devices.processor import HOST
from p2ptrain.devices.request import MACHINE_VARIABLE
from p2ptrain.model.capture.capture import capture
from p2ptrain.model.graph.description import ModelDescription
from p2ptrain.plan.types.cluster import REFERENCE
from p2ptrain.process.compute_thread import ComputeThread
from p2ptrain.profiling import profile_cache
from p2ptrain.profiling.measure_units import measure_units
from p2ptrain.profiling.profile_cache import (
    Measuring,
    ProfileCache,
    accelerator_sizes,
    batch_sizes_to_measure,
    measure,
)
from tests.support.twin_device import TwinDevice

AT_ONCE = Measuring(0.0, 0.0, 0.0, 0.0)
"""One pass of a size."""


@pytest.mark.parametrize(
    ("batch_size", "devices", "least", "sizes"),
    [
        (1024, 5, 1, [4, 16, 128]),
        (256, 3, 1, [4, 16, 64]),
        (256, 4, 1, [4, 16, 64]),  # nothing new to measure when one more is there
        (256, 5, 1, [4, 16, 64]),
        (128, 5, 1, [4, 16, 32]),
        (64, 5, 1, [4, 8, 16]),
        (16, 5, 1, [1, 2, 16]),  # a stage may compute all of them at once
        (16, 5, 2, [2, 16]),  # BatchNorm
        (64, 1, 1, [4, 16, 64]),
        (3, 5, 1, [1, 2, 3]),
        (1, 5, 1, [1]),
    ],
)
def test_sizes_go_up_to_a_device_s_part_of_the_mini_batch(
    batch_size: int, devices: int, least: int, sizes: list[int]
) -> None:
    assert batch_sizes_to_measure(batch_size, 0, devices, least) == sizes


def test_of_a_fixed_micro_batch_a_quarter_is_measured_too() -> None:
    assert batch_sizes_to_measure(64, 10) == [3, 10]
    assert batch_sizes_to_measure(64, 4, 3, least=2) == [2, 4]


@pytest.mark.parametrize(
    ("batch_size", "micro_batch", "sizes"), [(64, 4, [4]), (64, 10, [4, 10]), (3, 3, [3])]
)
def test_of_micro_batches_that_nobody_divides_only_their_own_sizes_are_measured(
    batch_size: int, micro_batch: int, sizes: list[int]
) -> None:
    assert batch_sizes_to_measure(batch_size, micro_batch, 3, divided=False) == sizes


@pytest.mark.parametrize(
    ("asked", "most", "sizes"),
    [
        ([4, 16, 64], 200, [4, 8, 16, 32, 64, 128, 200]),
        ([4, 16, 64], 1 << 20, [4 << power for power in range(11)]),
        ([3, 10], 0, [3, 10]),  # no others occur
        ([1], 1, [1]),
    ],
)
def test_an_accelerator_measures_powers_of_two_up_to_the_largest_micro_batch(
    asked: list[int], most: int, sizes: list[int]
) -> None:
    assert accelerator_sizes(asked, most) == sizes


async def test_an_accelerator_s_profile_is_kept_by_its_kind(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    found = []
    with counted(monkeypatch) as made:
        for device in (TwinDevice(kind="card"), TwinDevice(kind="other card"), HOST):
            for _ in range(2):
                compute = ComputeThread(device=device)
                cache = ProfileCache(tmp_path, AT_ONCE)
                found.append(await measure(described(), [1, 2], compute, cache, 10**9))
                await compute.close()
    assert len(made) == 3
    assert [one["processor"] for one in found[:4]] == ["card"] * 2 + ["other card"] * 2
    assert found[0] == found[1] != found[2]
    (on_card,), (on_host,) = found[0]["units"], found[4]["units"]
    assert on_host.pop("passing_bytes"), "counted on the host alone"
    assert on_card == on_host, "it keeps as much for the backward"
    assert found[0]["wall_by_cpu"] == 1.0


async def test_what_was_measured_alone_does_not_count_where_members_share_the_cores(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cache, compute = ProfileCache(None, AT_ONCE), ComputeThread()
    with counted(monkeypatch) as made:
        for machine in ("", "one", "another"):
            if machine:
                monkeypatch.setenv(MACHINE_VARIABLE, machine)
            await measure(described(), [1, 2], compute, cache, 10**9)
    await compute.close()
    assert len(made) == 2


@lru_cache
def described() -> ModelDescription:
    example = torch.randn(4, 10), torch.zeros(4, dtype=torch.int64)
    return capture(nn.Linear(10, 5), cross_entropy, example, evaluation=False).description


@contextmanager
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """The sizes of each measurement that was really made."""
    made: list[Any] = []

    def measured(*args: Any, **kwargs: Any) -> Any:
        made.append(kwargs["batch_sizes"])
        return measure_units(*args, **kwargs)

    monkeypatch.setattr(profile_cache, "measure_units", measured)
    yield made


def only_key(folder: Path) -> str:
    (kept,) = folder.glob("*.json")
    return kept.stem


async def test_overheads_take_as_much_more_wall_time_as_units(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def on_a_quarter(*args: Any, **kwargs: Any) -> Any:
        return replace(measure_units(*args, **kwargs), wall_by_cpu=4.0)

    monkeypatch.setattr(profile_cache, "measure_units", on_a_quarter)
    monkeypatch.setattr(profile_cache, "measure_overheads", lambda *_, **__: REFERENCE)
    compute = ComputeThread()
    measured = await measure(described(), [1], compute, ProfileCache(None, AT_ONCE), 10**9)
    await compute.close()
    assert measured["overheads"] == asdict(REFERENCE.times_slowdown(4.0))


async def test_a_profile_is_measured_once_and_one_of_an_earlier_version_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    compute = ComputeThread()
    with counted(monkeypatch) as made:
        first = await measure(described(), [1, 2], compute, ProfileCache(tmp_path, AT_ONCE), 10**9)
        assert first["wall_by_cpu"] >= 1
        assert (
            await measure(described(), [1, 2], compute, ProfileCache(tmp_path, AT_ONCE), 10**9)
            == first
        )
        assert len(made) == 1
        old = {name: value for name, value in first.items() if name != "method"}
        ProfileCache(tmp_path).put(only_key(tmp_path), old)
        again = await measure(described(), [1, 2], compute, ProfileCache(tmp_path, AT_ONCE), 10**9)
        assert again["method"] == first["method"]
        assert len(made) == 2
    await compute.close()
