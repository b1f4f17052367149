"""First contact of two devices over a short code, as a state machine without IO.

    client (dialled, sees the server's certificate in TLS)        server (sees no certificate)
      hello   {version, software, certificate, pake}       ───►
              ◄───  hello {version, pake}    or  refused {reason, ...}
      confirm {mac, signature}                             ───►   it knows the code
              ◄───  confirm {mac, signature} or  refused {wrong code, tries left}
      done    {name}                                       ───►   stores
              ◄───  done {name}                                   client stores

The PAKE's identities hold both certificates' fingerprints, so a relay that ends TLS on both sides
makes the keys differ (there is no channel binding in Python's ssl). Both MACs and both signatures
cover the whole transcript. The client confirms first: whoever breaks off earlier has learned
nothing about the code, so an aborted attempt costs no try. Nothing is stored before both sides
have confirmed. Recipe: docs/protocol.md.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from p2ptrain._version import PROTOCOL_VERSION, __version__
from p2ptrain.errors import NotPaired, PairingError, ProtocolError, VersionMismatch
from p2ptrain.mesh.hello import mismatch
from p2ptrain.mesh.identity import CERTIFICATE_LIMIT_BYTES, Identity, device_id, is_signed
from p2ptrain.mesh.pake import Pake, Side, Spake2
from p2ptrain.mesh.text import peer_name
from p2ptrain.net import cbor

MESSAGE_LIMIT_BYTES = 4096
_LABEL = b"p2ptrain pairing 1"

MakePake: TypeAlias = Callable[[Side, str, bytes, bytes], Pake]


@dataclass(frozen=True, slots=True)
class PairedDevice:
    """What an attempt that succeeded leaves to be stored."""

    certificate_der: bytes
    name: str

    @property
    def id(self) -> str:
        """The device's id."""
        return device_id(self.certificate_der)


class WrongCode(PairingError):
    """The two devices did not use the same code.

    Attributes:
        tries_left: as the other side says, or None.
    """

    def __init__(self, message: str, tries_left: int | None = None) -> None:
        super().__init__(message)
        self.tries_left = tries_left


class BrokenOff(PairingError):
    """The other side ended it after our guess: a stranger's try, or only a connection cut."""


class WindowClosed(PairingError):
    """The other side takes no codes now."""


class Busy(PairingError):
    """Another attempt goes first: the other side's own, or those that the last tries may go to."""


class Client:
    """The dialling side of one attempt: `hello`, `confirm`, `done`, `finished`, in this order."""

    def __init__(
        self,
        identity: Identity,
        name: str,
        code: str,
        server_certificate_der: bytes,
        make_pake: MakePake = Spake2,
    ) -> None:
        self._identity = identity
        self._name = name
        self._server_certificate = server_certificate_der
        ids = _pake_ids(identity.id, device_id(server_certificate_der))
        self._pake = make_pake(Side.CLIENT, code, *ids)
        self._hello = b""
        self._keys: _Keys | None = None

    def hello(self) -> bytes:
        """The first message."""
        self._hello = _encode(
            "hello",
            version=PROTOCOL_VERSION,
            software=__version__,
            certificate=self._identity.certificate_der,
            pake=self._pake.start(),
        )
        return self._hello

    def confirm(self, answer: bytes) -> bytes:
        """The second message, to the server's hello. It gives one guess away.

        Raises:
            VersionMismatch, PairingError, ProtocolError: the server refuses or is malformed.
        """
        fields = _decode(answer, "hello")
        version = _field(fields, "version", int)
        if version != PROTOCOL_VERSION:
            raise _mismatch(version, "unknown")
        key = self._pake.finish(_field(fields, "pake", bytes))
        self._keys = _Keys(key, self._hello, answer, self._server_certificate)
        signature = self._identity.sign(self._keys.to_sign(Side.CLIENT))
        return _encode("confirm", mac=self._keys.mac(Side.CLIENT), signature=signature)

    def done(self, answer: bytes) -> bytes:
        """The third message, to the server's confirmation.

        Raises:
            WrongCode: the codes differ, or somebody sits between the two devices.
        """
        fields = _decode(answer, "confirm")
        assert self._keys is not None, "confirm comes first"
        if not self._keys.is_confirmed(Side.SERVER, fields, self._server_certificate):
            raise WrongCode("the other device does not know the code")
        return _encode("done", name=self._name)

    def finished(self, answer: bytes) -> PairedDevice:
        """Whom to store, from the server's last message: it has stored us."""
        name = peer_name(_field(_decode(answer, "done"), "name", str))
        return PairedDevice(self._server_certificate, name)


class Server:
    """The listening side of one attempt: `hello`, `confirm`, `done`, in this order."""

    def __init__(self, identity: Identity, name: str, make_pake: MakePake = Spake2) -> None:
        self._identity = identity
        self._name = name
        self._make_pake = make_pake
        self._client_certificate = b""
        self._keys: _Keys | None = None

    @property
    def client_id(self) -> str:
        """The id that the client claims; proved only once `confirm` has returned."""
        return device_id(self._client_certificate)

    def hello(self, message: bytes, code: str) -> bytes:
        """The answer to the client's hello. `client_id` is known from here on.

        Raises:
            VersionMismatch: the client speaks another version; tell it with `refusal`.
            ProtocolError: the message is malformed.
        """
        fields = _decode(message, "hello")
        version = _field(fields, "version", int)
        if version != PROTOCOL_VERSION:
            raise _mismatch(version, _field(fields, "software", str))
        self._client_certificate = _field(fields, "certificate", bytes)
        if len(self._client_certificate) > CERTIFICATE_LIMIT_BYTES:
            raise ProtocolError("the certificate in a pairing hello is too long")
        ids = _pake_ids(self.client_id, self._identity.id)
        pake = self._make_pake(Side.SERVER, code, *ids)
        answer = _encode("hello", version=PROTOCOL_VERSION, pake=pake.start())
        key = pake.finish(_field(fields, "pake", bytes))
        self._keys = _Keys(key, message, answer, self._identity.certificate_der)
        return answer

    def confirm(self, message: bytes) -> bytes:
        """The answer to the client's confirmation, the one guess of this attempt.

        Raises:
            WrongCode: count it.
            NotPaired: the client's signature is wrong; its guess was not looked at.
            ProtocolError: the message is malformed; its guess was not looked at.
        """
        fields = _decode(message, "confirm")
        keys, self._keys = self._keys, None  # one guess only
        if keys is None:
            raise ProtocolError("a pairing attempt allows one confirmation")
        if not keys.is_signed(Side.CLIENT, fields, self._client_certificate):
            raise NotPaired("the other device did not prove its own key")
        if not keys.is_confirmed(Side.CLIENT, fields, self._client_certificate):
            raise WrongCode("a device tried a wrong code")
        signature = self._identity.sign(keys.to_sign(Side.SERVER))
        return _encode("confirm", mac=keys.mac(Side.SERVER), signature=signature)

    def done(self, message: bytes) -> tuple[PairedDevice, bytes]:
        """Whom to store, and the last message, to be sent once that is on disk."""
        name = peer_name(_field(_decode(message, "done"), "name", str))
        return PairedDevice(self._client_certificate, name), _encode("done", name=self._name)


_REASONS: dict[type[Exception], str] = {
    WrongCode: "wrong code",
    WindowClosed: "closed",
    Busy: "busy",
    VersionMismatch: "version",
}


def refusal(error: Exception, tries_left: int | None = None) -> bytes:
    """What the server answers instead, where it refuses."""
    return _encode(
        "refused",
        reason=_REASONS.get(type(error), "malformed"),
        version=PROTOCOL_VERSION,
        software=__version__,
        tries_left=tries_left,
    )


class _Keys:
    """MAC keys and transcript of one attempt."""

    def __init__(
        self, shared: bytes, client_hello: bytes, server_hello: bytes, server_certificate: bytes
    ) -> None:
        digest = hashlib.sha256(_LABEL)
        for piece in (client_hello, server_hello, server_certificate):
            digest.update(len(piece).to_bytes(4, "big") + piece)
        self._transcript = digest.digest()
        kdf = HKDF(hashes.SHA256(), length=64, salt=self._transcript, info=_LABEL)
        material = kdf.derive(shared)
        self._mac_keys = {Side.CLIENT: material[:32], Side.SERVER: material[32:]}

    def mac(self, side: Side) -> bytes:
        """What `side` proves its key with."""
        return hmac.digest(self._mac_keys[side], self._transcript, "sha256")

    def to_sign(self, side: Side) -> bytes:
        """What `side` signs with its device key."""
        return _LABEL + side.value.encode() + self._transcript

    def is_signed(self, side: Side, fields: dict[str, Any], certificate_der: bytes) -> bool:
        """Whether the signature of a confirmation is by that certificate's key."""
        return is_signed(certificate_der, self.to_sign(side), _field(fields, "signature", bytes))

    def is_confirmed(self, side: Side, fields: dict[str, Any], certificate_der: bytes) -> bool:
        """Whether a confirmation proves code and device key."""
        mac_fits = hmac.compare_digest(self.mac(side), _field(fields, "mac", bytes))
        return mac_fits and self.is_signed(side, fields, certificate_der)


def _pake_ids(client_id: str, server_id: str) -> tuple[bytes, bytes]:
    """The PAKE identities: role, version and both fingerprints in each."""
    both = f"{PROTOCOL_VERSION} {client_id} {server_id}".encode()
    return b"client " + both, b"server " + both


def _mismatch(version: int, software: str) -> VersionMismatch:
    return VersionMismatch(mismatch(version, software))


def _encode(kind: str, **fields: Any) -> bytes:
    return cbor.dumps({"kind": kind, **fields})


def _decode(message: bytes, kind: str) -> dict[str, Any]:
    """The fields of a message that must be of `kind`.

    Raises:
        VersionMismatch, WrongCode, WindowClosed, PairingError: the other side refuses.
        ProtocolError: it is something else.
    """
    fields = cbor.loads(message, MESSAGE_LIMIT_BYTES, 2)
    if not isinstance(fields, dict):
        raise ProtocolError("a pairing message is malformed")
    if fields.get("kind") == "refused":
        raise _refused(fields)
    if fields.get("kind") != kind:
        raise ProtocolError(f"a pairing message is not the expected {kind}")
    return fields


def _refused(fields: dict[str, Any]) -> PairingError | VersionMismatch:
    reason = _field(fields, "reason", str)
    if reason == "version":
        return _mismatch(_field(fields, "version", int), _field(fields, "software", str))
    if reason == "closed":
        return WindowClosed("the other device takes no codes now: run `p2ptrain invite` there")
    if reason == "busy":
        return Busy("the other device's own attempt to pair goes on")
    if reason == "wrong code":
        left = fields.get("tries_left")
        return WrongCode(
            "the code is wrong: type the one that the other device shows",
            left if isinstance(left, int) and 0 <= left < 100 else None,
        )
    return PairingError("the other device broke the pairing off")


def _field(fields: dict[str, Any], key: str, kind: type[Any]) -> Any:
    value = fields.get(key)
    if type(value) is not kind:
        raise ProtocolError(f"a pairing message's {key} is malformed")
    return value
