"""The identity of this device: a P-256 key and a self-signed certificate, whose hash is the id.

The certificate names no user, host or model, never expires (home devices start with wrong clocks)
and carries CA:FALSE: as a trust anchor with CA:TRUE its key could mint further identities that
every household would accept.
"""

from __future__ import annotations

import datetime
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from p2ptrain.files import SealBroken, is_sealed, seal_lines
from p2ptrain.mesh.identity.state_folder import BrokenFile, StateFolder
from p2ptrain.net.transport.tls import can_be_pinned, certificate_id

IDENTITY_FILE = "device.pem"

CERTIFICATE_LIMIT_BYTES = 1024
"""Largest certificate accepted from any device; ours take about 400 bytes."""

_SIGNATURE = ec.ECDSA(hashes.SHA256())

_NOT_BEFORE = datetime.datetime(2000, 1, 1, tzinfo=datetime.UTC)

_NOT_AFTER = datetime.datetime(9999, 12, 31, 23, 59, 59, tzinfo=datetime.UTC)


@dataclass(frozen=True, slots=True)
class Identity:
    """This device's key and certificate.

    Attributes:
        id: 64 hex digits, SHA-256 of `certificate_der`.
        certificate_der: the certificate, which any device may see.
        private_key: never leaves this device.
        pem_file: certificate and key as PEM, for `SSLContext.load_cert_chain`.
    """

    id: str
    certificate_der: bytes
    private_key: ec.EllipticCurvePrivateKey
    pem_file: Path

    def sign(self, data: bytes) -> bytes:
        """ECDSA signature over SHA-256 of `data`."""
        return self.private_key.sign(data, _SIGNATURE)


def is_signed(certificate_der: bytes, data: bytes, signature: bytes) -> bool:
    """Whether `signature` over `data` is by the key of this certificate.

    Anything malformed counts as not signed: certificates and signatures come from peers.
    """
    key = _public_key(certificate_der)
    if key is None:
        return False
    try:
        key.verify(signature, data, _SIGNATURE)
    except (ValueError, TypeError, InvalidSignature, UnsupportedAlgorithm):
        return False
    return True


def can_be_a_device(certificate_der: bytes) -> bool:
    """Whether this is a certificate that a device can have: connections are made with no other."""
    return _public_key(certificate_der) is not None and can_be_pinned(certificate_der)


def _public_key(certificate_der: bytes) -> ec.EllipticCurvePublicKey | None:
    """The key of a certificate that came from anywhere; None where there is none of our kind."""
    if len(certificate_der) > CERTIFICATE_LIMIT_BYTES:
        return None
    try:
        key = x509.load_der_x509_certificate(certificate_der).public_key()
    except (ValueError, TypeError, UnsupportedAlgorithm, x509.InvalidVersion):
        return None
    return key if isinstance(key, ec.EllipticCurvePublicKey) else None


def load_or_create(folder: StateFolder) -> Identity:
    """The identity kept in `folder`; a new one on the first start.

    Raises:
        UserError: the file is broken, or others may read it.
    """
    file = folder.path / IDENTITY_FILE
    content = folder.read(IDENTITY_FILE)
    if content is None:
        content = seal_lines(_create())
        folder.write(IDENTITY_FILE, content)
    try:
        sealed = is_sealed(content)
    except SealBroken as error:
        raise BrokenFile(file, str(error)) from error
    identity = _parse(content, file)
    if not sealed:  # of an older version
        folder.write(IDENTITY_FILE, seal_lines(content))
    return identity


def _create() -> bytes:
    """A fresh certificate and key as PEM, one file so that they can never be of two devices."""
    key = ec.generate_private_key(ec.SECP256R1())
    certificate = _self_signed(key)
    return certificate.public_bytes(serialization.Encoding.PEM) + key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )


def _self_signed(key: ec.EllipticCurvePrivateKey) -> x509.Certificate:
    public = key.public_key()
    key_identifier = x509.SubjectKeyIdentifier.from_public_key(public)
    # A subject of its own for each key: OpenSSL looks trust anchors up by subject.
    label = f"p2ptrain {key_identifier.digest.hex()[:16]}"
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, label)])
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(public)
        .serial_number(x509.random_serial_number())
        .not_valid_before(_NOT_BEFORE)
        .not_valid_after(_NOT_AFTER)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(key_identifier, critical=False)
        .sign(key, hashes.SHA256())
    )


def _parse(pem: bytes, file: Path) -> Identity:
    try:
        certificate = x509.load_pem_x509_certificate(pem)
        key = serialization.load_pem_private_key(pem, password=None)
        certificate.verify_directly_issued_by(certificate)
    except (ValueError, TypeError, UnsupportedAlgorithm, x509.InvalidVersion) as error:
        raise BrokenFile(file, "it holds no certificate and key") from error
    except InvalidSignature as error:
        raise BrokenFile(file, "its certificate is not as it was signed") from error
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise BrokenFile(file, "its key is of another kind")
    if certificate.public_key() != key.public_key():
        raise BrokenFile(file, "certificate and key do not belong together")
    der = certificate.public_bytes(serialization.Encoding.DER)
    return Identity(certificate_id(der), der, key, file)
