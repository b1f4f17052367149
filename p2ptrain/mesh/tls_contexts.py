"""The TLS contexts of this moment's trust: made when needed, thrown away when trust changes."""

from __future__ import annotations

import ssl

from p2ptrain.mesh.identity import Identity
from p2ptrain.mesh.trust_store import TrustStore
from p2ptrain.net.tls import Credentials, client_context, server_context


class TlsContexts:
    """For accepting and for dialling."""

    def __init__(self, identity: Identity, trust: TrustStore) -> None:
        self._identity = identity
        self._trust = trust
        self._made: tuple[ssl.SSLContext, ssl.SSLContext] | None = None

    def server(self) -> ssl.SSLContext:
        """Accept with this."""
        return self._both()[0]

    def client(self) -> ssl.SSLContext:
        """Dial with this."""
        return self._both()[1]

    def trust_changed(self) -> None:
        """From the next connection on the new trust counts."""
        self._made = None

    def _both(self) -> tuple[ssl.SSLContext, ssl.SSLContext]:
        if self._made is None:
            credentials = Credentials(self._identity.pem_file, self._identity.pem_file)
            # Our own certificate too: that is how a copy of this state folder is found out.
            pinned = [self._identity.certificate_der]
            pinned += [entry.certificate_der for entry in self._trust.trusted.values()]
            self._made = (
                server_context(credentials, pinned),
                client_context(credentials, pinned),
            )
        return self._made
