"""A password-authenticated key exchange.

SPAKE2 (Abdalla and Pointcheval 2005; the `spake2` package, older than RFC 9382): both sides end
with the same key exactly when they knew the same code, and each run tests at most one guess.
The package is not constant-time; a code lives ten minutes and five wrong tries, which leaves too
few runs to measure. Key confirmation is not inside: see pairing.py.
"""

from __future__ import annotations

from enum import Enum

from spake2 import SPAKE2_A, SPAKE2_B
from spake2.ed25519_basic import NotOnCurve
from spake2.spake2 import SPAKEError

from p2ptrain.errors import ProtocolError

MESSAGE_BYTES = 33
"""One byte for the side, 32 for the point."""


class Side(Enum):
    """Which half of the exchange: the device that dialled is the client."""

    CLIENT = "client"
    SERVER = "server"


class Spake2:
    """One run by the spake2 package (Ed25519 group); each method is called once."""

    def __init__(self, side: Side, code: str, client_id: bytes, server_id: bytes) -> None:
        kind = SPAKE2_A if side is Side.CLIENT else SPAKE2_B
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
