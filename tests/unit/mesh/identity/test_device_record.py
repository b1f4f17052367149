"""What a device remembers of itself and of others survives a restart, and damage where it may."""

from __future__ import annotations

from pathlib import Path

import pytest

from p2ptrain.errors import UserError
from p2ptrain.mesh.identity.device_record import ADDRESSES_FILE, DEVICE_FILE, DeviceRecord
from p2ptrain.mesh.identity.state_folder import StateFolder

KNOWN = {"ab" * 32: [("10.0.0.2", 47300), ("fe80::1%eth0", 4000)]}


@pytest.fixture
def folder(tmp_path: Path) -> StateFolder:
    return StateFolder(tmp_path / "state")


def test_name_term_and_addresses_survive_a_restart(folder: StateFolder) -> None:
    file = DeviceRecord(folder, "anna", "host")
    file.rename("anna-2")
    file.keep_term(7)
    file.save_addresses(KNOWN)
    again = DeviceRecord(folder, None, "host")
    assert (again.name, again.asked_name, again.term) == ("anna-2", "anna", 7)
    assert again.addresses() == KNOWN


@pytest.mark.parametrize("content", [b"", b"\xff\0", b"[1]", bytes(700), b'{"a"'])
def test_damaged_addresses_are_forgotten(folder: StateFolder, content: bytes) -> None:
    """They are only hints: a device finds the others without them."""
    folder.write(ADDRESSES_FILE, content)
    assert DeviceRecord(folder, "anna", "host").addresses() == {}


@pytest.mark.parametrize("content", [b"", b"\xff\0", b"[1]", bytes(700)])
def test_a_damaged_term_is_said(folder: StateFolder, content: bytes) -> None:
    """Without it a device might vote twice in one term."""
    folder.write(DEVICE_FILE, content)
    with pytest.raises(UserError, match=r"device\.json is broken"):
        DeviceRecord(folder, "anna", "host")
