"""The demo's job is a real one: disjoint real data, enough units for its devices."""

from __future__ import annotations

import importlib
from types import ModuleType

import pytest
import torch

from p2ptrain.cli.commands.demo import MEMBERS, STEPS


@pytest.fixture(scope="module")
def demo() -> ModuleType:
    """Not at the head of the file: scikit-learn takes seconds to load, in every run of any test."""
    return importlib.import_module("p2ptrain.demo.digits")


def test_train_and_test_images_are_all_of_them_once(demo: ModuleType) -> None:
    train, test = demo.digits()
    assert (len(train), len(test)) == (1437, 360)
    seen = torch.cat([train.tensors[0], test.tensors[0]]).flatten(1)
    assert torch.unique(seen, dim=0).shape[0] > 1780  # some digits were written alike


def test_the_demo_s_steps_are_the_job_s(demo: ModuleType) -> None:
    assert demo.job().total_steps() == STEPS


def test_the_network_is_the_same_every_time(demo: ModuleType) -> None:
    first, second = demo.job().model.state_dict(), demo.job().model.state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert any("running_mean" in name for name in first)


def test_there_are_more_layers_than_devices(demo: ModuleType) -> None:
    assert sum(1 for _ in demo.job().model.children()) > 1 + len(MEMBERS)
