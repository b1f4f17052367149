"""First contact of two devices over a short code, as a state machine without IO.

    client (dialled, sees the server's certificate in TLS)        server (sees no certificate)
      hello   {version, software, certificate, pake}       ───►
              ◄───  hello {version, pake}    or  refused {reason, ...}
      confirm {mac, signature}                             ───►   it knows the code
              ◄───  confirm {mac, signature} or  refused {wrong code, tries left}
      done    {name}                                       ───►   stores
              ◄───  done {name}                                   client stores

The key exchange is SPAKE2 (Abdalla and Pointcheval 2005; the `spake2` package, older than RFC
9382): both sides get the same key exactly when they know the same code, and a run tests at most one
guess. The package is not constant-time; a code with a few minutes and tries leaves too few runs to
measure. Its identities hold both certificates' fingerprints, so a relay that ends TLS on both
sides makes the keys differ (Python's ssl has no channel binding). Both MACs and signatures cover
the whole transcript. The client confirms first: a client that breaks off earlier has learned
nothing about the code, so an aborted attempt costs no try. Nothing is stored before both sides
have confirmed. Recipe: docs/internals/protocol.md.
"""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass
from enum import Enum
from typing import Annotated, Literal, TypeAlias, TypeVar

from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from spake2 import SPAKE2_A, SPAKE2_B
from spake2.ed25519_basic import NotOnCurve
from spake2.spake2 import SPAKEError

from p2ptrain._version import PROTOCOL_VERSION, __version__
from p2ptrain.errors import NotPaired, PairingError, ProtocolError, VersionMismatch
from p2ptrain.mesh.identity.identity import Identity, is_signed
from p2ptrain.mesh.trust.trust import Certificate
from p2ptrain.net import cbor
from p2ptrain.net.fields import PeerName, Software, Spoken, Version, mismatch
from p2ptrain.net.forms import Length, Range, Rare, Text, write_form
from p2ptrain.net.read_form import read_form
from p2ptrain.net.transport.tls import certificate_id

MESSAGE_BYTES = 33
"""One byte for the side, 32 for the point."""


class PakeSide(Enum):
    """Which half of the exchange: the device that dialled is the client."""

    CLIENT = "client"
    SERVER = "server"


class Spake2:
    """One run by the spake2 package (Ed25519 group); each method is called once."""

    def __init__(self, side: PakeSide, code: str, client_id: bytes, server_id: bytes) -> None:
        kind = SPAKE2_A if side is PakeSide.CLIENT else SPAKE2_B
        self._run = kind(code.encode(), idA=client_id, idB=server_id)

    def start(self) -> bytes:
        """The message for the other side; says nothing of the code."""
        return bytes(self._run.start())

    def finish(self, message: bytes) -> bytes:
        """The 32-byte key from the other side's message.

        Raises:
            ProtocolError: the message is no valid one (wrong length, side or point, or our own).
        """
        if len(message) != MESSAGE_BYTES:
            raise ProtocolError("a pairing message has the wrong length")
        try:
            return bytes(self._run.finish(message))
        except (SPAKEError, NotOnCurve, ValueError, AssertionError) as error:
            # The package reports bad points in all four ways.
            raise ProtocolError("a pairing message is not valid") from error


MESSAGE_LIMIT_BYTES = 4096

_LABEL = b"p2ptrain pairing 1"

T = TypeVar("T")

_Proof: TypeAlias = Annotated[bytes, Length(256)]


@dataclass(frozen=True, slots=True, kw_only=True)
class _PairingHello:
    kind: Literal["hello"]
    version: Version
    software: Annotated[Software, Rare()] = "unknown"
    certificate: Annotated[Certificate, Rare()] = b""
    pake: _Proof


@dataclass(frozen=True, slots=True, kw_only=True)
class _Confirm:
    kind: Literal["confirm"]
    mac: _Proof
    signature: _Proof


@dataclass(frozen=True, slots=True, kw_only=True)
class _PairingDone:
    kind: Literal["done"]
    name: PeerName


@dataclass(frozen=True, slots=True, kw_only=True)
class _PairingRefused:
    kind: Literal["refused"]
    reason: Annotated[str, Text(32)]
    version: Version = PROTOCOL_VERSION
    software: Software = __version__
    tries_left: Annotated[int, Range(0, 99)] | None


@dataclass(frozen=True, slots=True)
class PairedDevice:
    """What an attempt that succeeded leaves to be stored."""

    certificate_der: bytes
    name: str

    @property
    def id(self) -> str:
        """The device's id."""
        return certificate_id(self.certificate_der)


class WrongCode(PairingError):
    """The two devices did not use the same code.

    Attributes:
        tries_left: as the other side says, or None.
    """

    def __init__(self, message: str, tries_left: int | None = None) -> None:
        super().__init__(message)
        self.tries_left = tries_left


class PairingBrokenOff(PairingError):
    """The other side ended it after our guess: a stranger's try, or only a connection cut."""


class PairingWindowClosed(PairingError):
    """The other side takes no codes now."""


class PairingBusy(PairingError):
    """Another attempt goes first: the other side's own, or those that the last tries may go to."""


class PairingClient:
    """The dialling side of one attempt: `hello`, `confirm`, `done`, `finished`, in this order."""

    def __init__(
        self,
        identity: Identity,
        name: str,
        code: str,
        server_certificate_der: bytes,
    ) -> None:
        self._identity = identity
        self._name = name
        self._server_certificate = server_certificate_der
        ids = _pake_ids(identity.id, certificate_id(server_certificate_der))
        self._pake = Spake2(PakeSide.CLIENT, code, *ids)
        self._hello = b""
        self._keys: _Keys | None = None

    def hello(self) -> bytes:
        """The first message."""
        hello = _PairingHello(
            kind="hello",
            version=PROTOCOL_VERSION,
            software=__version__,
            certificate=self._identity.certificate_der,
            pake=self._pake.start(),
        )
        self._hello = _encode(hello)
        return self._hello

    def confirm(self, answer: bytes) -> bytes:
        """The second message, to the server's hello. It gives one guess away.

        Raises:
            VersionMismatch, PairingError, ProtocolError: the server refuses or is malformed.
        """
        key = self._pake.finish(_decode(answer, _PairingHello).pake)
        self._keys = _Keys(key, self._hello, answer, self._server_certificate)
        signature = self._identity.sign(self._keys.to_sign(PakeSide.CLIENT))
        return _encode(
            _Confirm(kind="confirm", mac=self._keys.mac(PakeSide.CLIENT), signature=signature)
        )

    def done(self, answer: bytes) -> bytes:
        """The third message, to the server's confirmation.

        Raises:
            WrongCode: the codes differ, or an attacker sits between the two devices.
        """
        said = _decode(answer, _Confirm)
        assert self._keys is not None, "confirm comes first"
        if not self._keys.is_confirmed(PakeSide.SERVER, said, self._server_certificate):
            raise WrongCode("the other device does not know the code")
        return _encode(_PairingDone(kind="done", name=self._name))

    def finished(self, answer: bytes) -> PairedDevice:
        """Whom to store, from the server's last message: it has stored us."""
        return PairedDevice(self._server_certificate, _decode(answer, _PairingDone).name)


class PairingServer:
    """The listening side of one attempt: `hello`, `confirm`, `done`, in this order."""

    def __init__(self, identity: Identity, name: str) -> None:
        self._identity = identity
        self._name = name
        self._client_certificate = b""
        self._keys: _Keys | None = None

    @property
    def client_id(self) -> str:
        """The id that the client claims; proved only once `confirm` has returned."""
        return certificate_id(self._client_certificate)

    def hello(self, message: bytes, code: str) -> bytes:
        """The answer to the client's hello. `client_id` is known from here on.

        Raises:
            VersionMismatch: the client speaks another version; tell it with `refusal`.
            ProtocolError: the message is malformed.
        """
        said = _decode(message, _PairingHello)
        self._client_certificate = said.certificate
        ids = _pake_ids(self.client_id, self._identity.id)
        pake = Spake2(PakeSide.SERVER, code, *ids)
        answer = _encode(_PairingHello(kind="hello", version=PROTOCOL_VERSION, pake=pake.start()))
        key = pake.finish(said.pake)
        self._keys = _Keys(key, message, answer, self._identity.certificate_der)
        return answer

    def confirm(self, message: bytes) -> bytes:
        """The answer to the client's confirmation, the one guess of this attempt.

        Raises:
            WrongCode: count it.
            NotPaired: the client's signature is wrong; its guess was not looked at.
            ProtocolError: the message is malformed; its guess was not looked at.
        """
        said = _decode(message, _Confirm)
        keys, self._keys = self._keys, None  # one guess only
        if keys is None:
            raise ProtocolError("a pairing attempt allows one confirmation")
        if not keys.is_signed(PakeSide.CLIENT, said, self._client_certificate):
            raise NotPaired("the other device did not prove its own key")
        if not keys.is_confirmed(PakeSide.CLIENT, said, self._client_certificate):
            raise WrongCode("a device tried a wrong code")
        signature = self._identity.sign(keys.to_sign(PakeSide.SERVER))
        return _encode(_Confirm(kind="confirm", mac=keys.mac(PakeSide.SERVER), signature=signature))

    def done(self, message: bytes) -> tuple[PairedDevice, bytes]:
        """Whom to store, and the last message, to be sent once that is on disk."""
        paired = PairedDevice(self._client_certificate, _decode(message, _PairingDone).name)
        return paired, _encode(_PairingDone(kind="done", name=self._name))


_REASONS: dict[type[Exception], str] = {
    WrongCode: "wrong code",
    PairingWindowClosed: "closed",
    PairingBusy: "busy",
    VersionMismatch: "version",
}


def refusal(error: Exception, tries_left: int | None = None) -> bytes:
    """What the server answers instead, where it refuses."""
    reason = _REASONS.get(type(error), "malformed")
    return _encode(_PairingRefused(kind="refused", reason=reason, tries_left=tries_left))


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
        self._mac_keys = {PakeSide.CLIENT: material[:32], PakeSide.SERVER: material[32:]}

    def mac(self, side: PakeSide) -> bytes:
        """What `side` proves its key with."""
        return hmac.digest(self._mac_keys[side], self._transcript, "sha256")

    def to_sign(self, side: PakeSide) -> bytes:
        """What `side` signs with its device key."""
        return _LABEL + side.value.encode() + self._transcript

    def is_signed(self, side: PakeSide, said: _Confirm, certificate_der: bytes) -> bool:
        """Whether the signature of a confirmation is by that certificate's key."""
        return is_signed(certificate_der, self.to_sign(side), said.signature)

    def is_confirmed(self, side: PakeSide, said: _Confirm, certificate_der: bytes) -> bool:
        """Whether a confirmation proves code and device key."""
        mac_fits = hmac.compare_digest(self.mac(side), said.mac)
        return mac_fits and self.is_signed(side, said, certificate_der)


def _pake_ids(client_id: str, server_id: str) -> tuple[bytes, bytes]:
    """The PAKE identities: role, version and both fingerprints in each."""
    both = f"{PROTOCOL_VERSION} {client_id} {server_id}".encode()
    return b"client " + both, b"server " + both


def _encode(form: object) -> bytes:
    return cbor.dumps(write_form(form))


def _decode(message: bytes, form: type[T]) -> T:
    """A message that must be of that form.

    Raises:
        VersionMismatch: it is another version's hello, of which no more is read.
        VersionMismatch, WrongCode, PairingWindowClosed, PairingError: the other side refuses.
        ProtocolError: it is something else.
    """
    fields = cbor.loads(message, MESSAGE_LIMIT_BYTES, 2)
    if isinstance(fields, dict) and fields.get("kind") == "refused":
        raise _refused(read_form(_PairingRefused, fields, "a pairing message", extra=True))
    if form is _PairingHello:
        spoken = read_form(Spoken, fields, "a pairing hello", extra=True)
        if spoken.version != PROTOCOL_VERSION:
            raise VersionMismatch(mismatch(spoken.version, spoken.software))
    return read_form(form, fields, "a pairing message", extra=True)


def _refused(said: _PairingRefused) -> PairingError | VersionMismatch:
    match said.reason:
        case "version":
            return VersionMismatch(mismatch(said.version, said.software))
        case "closed":
            return PairingWindowClosed(
                "the other device does not accept a code now: run `p2ptrain invite` on it"
            )
        case "busy":
            return PairingBusy("the other device is pairing with this one already")
        case "wrong code":
            why = "the code is wrong: give the one that the other device shows"
            return WrongCode(why, said.tries_left)
    return PairingError("the other device stopped the pairing")
