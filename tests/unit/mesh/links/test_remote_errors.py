"""Errors travel by name; only those of our own tree come out as what they were."""

from __future__ import annotations

import importlib

import pytest

from p2ptrain.errors import DeviceLost, Error, PeerError, PlanError
from p2ptrain.mesh.links import router


class NeedsTwo(PeerError):
    """Of some room of the house, made from more than a text."""

    def __init__(self, device: str, why: str) -> None:
        super().__init__(f"{device}: {why}")


@pytest.mark.parametrize(
    ("sent", "arrives"),
    [
        (PlanError("too little memory"), PlanError),
        (DeviceLost("b is gone", name="b"), DeviceLost),
        (NeedsTwo("b", "damaged"), PeerError),
    ],
)
def test_what_arrives_says_the_same(sent: Error, arrives: type[Error]) -> None:
    fresh = importlib.reload(router)  # whatever was imported before
    found = fresh.from_fields(fresh.to_fields(sent))
    assert type(found) is arrives
    assert str(found) == str(sent)
