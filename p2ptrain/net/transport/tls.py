"""TLS contexts of a household: version 1.3 only, trust by pinned certificates, nothing resumed.

A device's certificate is self-signed with CA:FALSE, so that a paired device cannot sign further
identities; the pinned certificates are the whole trust store. After every handshake the SHA-256 of
the peer's certificate is its identity. Contexts are never changed: where trust changes, a new one
is made, so that nothing learnt under the old trust (tickets, store entries) survives.
"""

from __future__ import annotations

import hashlib
import ssl
from collections.abc import Iterable
from pathlib import Path

from p2ptrain.errors import InternalError
from p2ptrain.logs import get_logger

log = get_logger(__name__)

_NO_CHECK_TIME = 0x200000
"""OpenSSL's X509_V_FLAG_NO_CHECK_TIME, for which `ssl` has no name."""


def certificate_id(certificate_der: bytes) -> str:
    """A device's id: 64 lower-case hex digits, SHA-256 of its certificate."""
    return hashlib.sha256(certificate_der).hexdigest()


def can_be_pinned(certificate_der: bytes) -> bool:
    """Whether OpenSSL takes it for a certificate."""
    return _is_taken(_context(ssl.PROTOCOL_TLS_CLIENT), certificate_der)


def server_context(own: Path, pinned_der: Iterable[bytes]) -> ssl.SSLContext:
    """For accepting: a client shows a pinned certificate, or none and may then only try to pair.

    Args:
        own: this device's certificate and private key, as a PEM file (`ssl` reads files only).
        pinned_der: of those that may connect.
    """
    context = _context(ssl.PROTOCOL_TLS_SERVER)
    context.num_tickets = 0
    context.verify_mode = ssl.CERT_OPTIONAL
    context.load_cert_chain(own, password=_no_prompt)
    _pin(context, pinned_der)
    return context


def client_context(own: Path, pinned_der: Iterable[bytes]) -> ssl.SSLContext:
    """For dialling a paired device, whose certificate must be among `pinned_der`."""
    context = _context(ssl.PROTOCOL_TLS_CLIENT)
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_cert_chain(own, password=_no_prompt)
    _pin(context, pinned_der)
    return context


def unpaired_client_context() -> ssl.SSLContext:
    """For a first contact: encrypted to the device that answers; pairing then proves who that is.

    It shows no certificate, so that a stranger learns nothing about this device.
    """
    context = _context(ssl.PROTOCOL_TLS_CLIENT)
    context.verify_mode = ssl.CERT_NONE
    return context


def _context(protocol: int) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False  # devices have no host names; the certificate itself is pinned
    # A small computer without a battery takes 1970 for today until it finds the internet.
    context.verify_flags |= _NO_CHECK_TIME
    return context


def _pin(context: ssl.SSLContext, pinned_der: Iterable[bytes]) -> None:
    for certificate_der in pinned_der:
        if not _is_taken(context, certificate_der):
            # Of one device only: the device that vouched for it must not keep all others apart.
            log.warning("certificate_not_pinned", id=certificate_id(certificate_der)[:16])


def _is_taken(context: ssl.SSLContext, certificate_der: bytes) -> bool:
    try:
        context.load_verify_locations(cadata=certificate_der)
    except (ssl.SSLError, ValueError) as error:  # ValueError: there is nothing in it
        log.debug("certificate_refused", error=str(error))
        return False
    return True


def _no_prompt() -> str:
    raise InternalError("the device key is encrypted; p2ptrain keeps it as a plain 0600 file")
