"""Damage of any kind to a file of the state folder is found out, named, and changes nothing."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2ptrain.errors import UserError
from p2ptrain.files import SealBroken, is_sealed, open_json, seal_json, seal_lines
from p2ptrain.mesh.identity.device_record import DEVICE_FILE, DeviceRecord
from p2ptrain.mesh.identity.identity import IDENTITY_FILE, load_or_create
from p2ptrain.mesh.identity.state_folder import BrokenFile, StateFolder
from p2ptrain.mesh.trust.trust_store import TRUST_FILE, TrustStore

values = st.dictionaries(
    st.text(max_size=8).filter(lambda key: key not in ("sealed", "xxh3")),
    st.recursive(
        st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(max_size=20),
        lambda inner: st.lists(inner, max_size=3),
        max_leaves=5,
    ),
    max_size=4,
)


@given(values)
def test_what_is_sealed_is_read_by_us_and_by_anybody(value: dict[str, object]) -> None:
    content = seal_json(value)
    assert open_json(content) == value
    anybodys = json.loads(content)
    assert {key: anybodys[key] for key in value} == value


@given(values, st.data())
def test_a_flipped_bit_or_a_cut_is_always_found_out(
    value: dict[str, object], data: st.DataObject
) -> None:
    for seal, read in ((seal_json, open_json), (_seal_as_lines, is_sealed)):
        content = seal(value)
        at = data.draw(st.integers(0, 8 * len(content) - 1))
        damaged = bytearray(content)
        damaged[at // 8] ^= 1 << at % 8
        with pytest.raises(SealBroken):
            read(bytes(damaged))
    cut = data.draw(st.integers(0, len(seal_json(value)) - 1))
    with pytest.raises(SealBroken):
        open_json(seal_json(value)[:cut])


def _seal_as_lines(value: dict[str, object]) -> bytes:
    return seal_lines(json.dumps(value).encode() + b"\n")


def test_every_bit_of_one_file() -> None:
    content = seal_json({"name": "anna", "term": 7})
    for at in range(8 * len(content)):
        damaged = bytearray(content)
        damaged[at // 8] ^= 1 << at % 8
        with pytest.raises(SealBroken):
            open_json(bytes(damaged))


@pytest.mark.parametrize("content", [b'{"term": 7}', b'{\n "term": 7\n}', b'{"term": 7}\n'])
def test_files_of_older_versions_have_no_seal(content: bytes) -> None:
    assert open_json(content) == {"term": 7}


@pytest.mark.parametrize("content", [b"", b"{", b"\xff", b"[" * 100_000])
def test_what_is_no_json_is_damaged(content: bytes) -> None:
    with pytest.raises(SealBroken, match="not JSON"):
        open_json(content)


def load_identity(folder: StateFolder) -> object:
    return load_or_create(folder).id


def load_device(folder: StateFolder) -> object:
    file = DeviceRecord(folder, None, "host")
    return file.name, file.term


def load_trust(folder: StateFolder) -> object:
    return TrustStore(folder, load_or_create(folder)).book


@pytest.fixture
def folder(tmp_path: Path) -> StateFolder:
    folder = StateFolder(tmp_path / "anna")
    identity = load_or_create(folder)
    DeviceRecord(folder, "anna", "host").keep_term(7)
    other = load_or_create(StateFolder(tmp_path / "bert"))
    TrustStore(folder, identity).add_paired(other.certificate_der, "bert")
    return folder


@pytest.mark.parametrize(
    ("name", "load"),
    [(IDENTITY_FILE, load_identity), (DEVICE_FILE, load_device), (TRUST_FILE, load_trust)],
)
def test_a_damaged_file_is_refused_by_its_name(
    folder: StateFolder, name: str, load: Callable[[StateFolder], object]
) -> None:
    """R21: identity, term and trust are as they were, or the start says which file is broken."""
    before, draw = load(folder), Random(21)
    whole = folder.read(name)
    assert whole is not None
    damages = [whole[: draw.randrange(len(whole))] for _ in range(20)]
    for _ in range(100):
        flipped = bytearray(whole)
        flipped[draw.randrange(len(whole))] ^= 1 << draw.randrange(8)
        damages.append(bytes(flipped))
    for content in damages:
        (folder.path / name).write_bytes(content)
        with pytest.raises(UserError, match=rf"{name} is broken .* restore it from a copy"):
            load(folder)
    folder.write(name, whole)
    assert load(folder) == before


def test_a_file_of_an_older_version_is_read_and_sealed(folder: StateFolder) -> None:
    before = load_identity(folder)
    sealed = folder.read(IDENTITY_FILE)
    assert sealed is not None
    lines = sealed.splitlines(keepends=True)
    folder.write(IDENTITY_FILE, b"".join(lines[1:-1]))
    assert load_identity(folder) == before
    assert folder.read(IDENTITY_FILE) == sealed


def test_an_identity_without_a_seal_never_changes_without_a_word(folder: StateFolder) -> None:
    """Its certificate is signed: what of it changed is found out all the same."""
    before, draw = load_identity(folder), Random(4)
    sealed = folder.read(IDENTITY_FILE)
    assert sealed is not None
    plain = b"".join(sealed.splitlines(keepends=True)[1:-1])
    found: set[object] = set()
    for _ in range(100):
        flipped = bytearray(plain)
        flipped[draw.randrange(len(plain))] ^= 1 << draw.randrange(8)
        (folder.path / IDENTITY_FILE).write_bytes(bytes(flipped))
        with contextlib.suppress(BrokenFile):
            found.add(load_identity(folder))
    assert found <= {before}  # where only the armour changed
