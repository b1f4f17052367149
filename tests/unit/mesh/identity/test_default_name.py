"""A device is called as its machine is, where that says something."""

from __future__ import annotations

import pytest

from p2ptrain.mesh.identity.device_record import default_name, name_of_host
from p2ptrain.net.fields import NAME_LIMIT_CHARACTERS, checked_name


@pytest.mark.parametrize(
    ("host", "name"),
    [
        ("laptop", "laptop"),
        ("pi.fritz.box", "pi"),
        ("Anna's PC", "Anna's PC"),
        ("localhost", None),
        ("localhost.localdomain", None),
        ("", None),
        ("a/b", "a_b"),
        ("x" * 200, "x" * NAME_LIMIT_CHARACTERS),
    ],
)
def test_a_host_s_name(host: str, name: str | None) -> None:
    assert name_of_host(host) == name
    if name is not None:
        assert checked_name(name) == name


def test_there_is_always_a_name_that_can_be_used() -> None:
    assert checked_name(default_name("0123456789abcdef"))
