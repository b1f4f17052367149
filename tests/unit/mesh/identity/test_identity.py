"""A device's identity: what the certificate says, and what happens to its file."""

from __future__ import annotations

import os
import ssl
from pathlib import Path

import pytest
from cryptography import x509

from p2ptrain.errors import UserError
from p2ptrain.mesh.identity.identity import (
    CERTIFICATE_LIMIT_BYTES,
    IDENTITY_FILE,
    is_signed,
    load_or_create,
)
from p2ptrain.mesh.identity.state_folder import StateFolder
from p2ptrain.net.transport.tls import certificate_id


def test_it_is_made_once_and_kept(tmp_path: Path) -> None:
    first = load_or_create(StateFolder(tmp_path / "state"))
    again = load_or_create(StateFolder(tmp_path / "state"))
    assert first.id == again.id == certificate_id(first.certificate_der)
    assert is_signed(again.certificate_der, b"said", first.sign(b"said"))


def test_signatures_of_others_or_over_other_words_do_not_count(tmp_path: Path) -> None:
    one, other = (load_or_create(StateFolder(tmp_path / name)) for name in "ab")
    assert not is_signed(other.certificate_der, b"said", one.sign(b"said"))
    assert not is_signed(one.certificate_der, b"other", one.sign(b"said"))
    assert not is_signed(one.certificate_der, b"said", b"")
    assert not is_signed(b"no certificate", b"said", one.sign(b"said"))
    assert not is_signed(bytes(CERTIFICATE_LIMIT_BYTES + 1), b"said", one.sign(b"said"))


def test_the_certificate_is_no_authority_and_names_no_device(tmp_path: Path) -> None:
    """S3: CA:FALSE; S20: no name of person or host."""
    identity = load_or_create(StateFolder(tmp_path))
    certificate = x509.load_der_x509_certificate(identity.certificate_der)
    constraints = certificate.extensions.get_extension_for_class(x509.BasicConstraints).value
    assert constraints.ca is False
    subject = certificate.subject.rfc4514_string()
    assert subject.startswith("CN=p2ptrain ")
    for secret in (os.uname().nodename, str(Path.home().name)):
        assert secret not in subject


def test_openssl_takes_the_file(tmp_path: Path) -> None:
    identity = load_or_create(StateFolder(tmp_path))
    ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_cert_chain(identity.pem_file)


@pytest.mark.parametrize("cut", [0, 10, 300, 500])
def test_a_broken_file_says_what_to_do(tmp_path: Path, cut: int) -> None:
    folder = StateFolder(tmp_path / "state")
    load_or_create(folder)
    content = (folder.path / IDENTITY_FILE).read_bytes()
    folder.write(IDENTITY_FILE, content[:cut])
    with pytest.raises(UserError, match=r"device\.pem is broken .* pair this device again"):
        load_or_create(folder)


def test_key_and_certificate_of_two_devices_are_refused(tmp_path: Path) -> None:
    folders = [StateFolder(tmp_path / name) for name in "ab"]
    pems = [(load_or_create(f).pem_file).read_bytes().split(b"-----BEGIN PRIV") for f in folders]
    both = (pems[0][0] + b"-----BEGIN PRIV" + pems[1][1]).splitlines(keepends=True)[1:-1]
    folders[0].write(IDENTITY_FILE, b"".join(both))
    with pytest.raises(UserError, match="do not belong together"):
        load_or_create(folders[0])
