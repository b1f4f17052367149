"""Which requests the page answers, and who may see it. Pure; time is an argument.

A token that counts once becomes a cookie that counts for a month.

A cookie is signed with a key of the state folder, so it outlives the
process that gave it, and a new key ends them all. One that was given to a browser on another device
(`--lan`) counts there alone, and lets it look and nothing else.

Requests are judged by their headers first. Another site's page in the same browser can send them
here, with this page's cookie if it were not SameSite, and can have its own name resolve to this
address (DNS rebinding). So Host must be one of ours, Origin ours where there is one, and always
there where something changes.
"""

from __future__ import annotations

import hmac
import secrets
from collections import deque
from collections.abc import Collection, Mapping
from enum import StrEnum

TOKEN_SECONDS = 600.0

TOKENS_LIMIT = 16

COOKIE_SECONDS = 30 * 24 * 3600

_COOKIE_CHARACTERS = 200


class Reach(StrEnum):
    """Where a browser is."""

    HERE = "here"
    """On this device: it may invite, remove and stop."""
    LAN = "lan"
    """In this network: it may look."""


class Sessions:
    """The tokens and cookies of one page."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._tokens: dict[str, tuple[Reach, float]] = {}  # and until when

    def new_token(self, reach: Reach, now: float) -> str:
        """One that counts once, for ten minutes; the oldest one goes where there are many."""
        self._tokens = {t: held for t, held in self._tokens.items() if held[1] > now}
        while len(self._tokens) >= TOKENS_LIMIT:
            del self._tokens[next(iter(self._tokens))]
        token = secrets.token_urlsafe(32)
        self._tokens[token] = reach, now + TOKEN_SECONDS
        return token

    def redeem(self, token: str, reach: Reach, now: float, unix: int) -> str | None:
        """The cookie for a token that came from there; None: it does not count, or no more."""
        found = None
        for known in self._tokens:
            if hmac.compare_digest(known.encode(), token.encode("utf-8", "surrogateescape")):
                found = known
        if found is None:
            return None
        where, until = self._tokens[found]
        if where is not reach:
            return None
        del self._tokens[found]
        return self._cookie(reach, unix) if now < until else None

    def is_known(self, cookie: str | None, reach: Reach, unix: int) -> bool:
        """Whether this page gave that cookie to a browser there, a month ago at most."""
        if cookie is None or len(cookie) > _COOKIE_CHARACTERS:
            return False
        said, _, mac = cookie.rpartition(".")
        signed = hmac.compare_digest(mac.encode("utf-8", "surrogateescape"), self._mac(said))
        if not signed:
            return False
        where, issued, _ = said.split(".")
        return (
            where == reach and unix - int(issued) + 60 >= 0 and unix - int(issued) < COOKIE_SECONDS
        )

    def _cookie(self, reach: Reach, unix: int) -> str:
        said = f"{reach}.{unix}.{secrets.token_urlsafe(12)}"
        return f"{said}.{self._mac(said).decode()}"

    def _mac(self, said: str) -> bytes:
        return (
            hmac.digest(self._key, said.encode("utf-8", "surrogateescape"), "sha256").hex().encode()
        )


class GuessLimit:
    """How many wrong tokens an address may try."""

    def __init__(self, most: int = 10, within_seconds: float = 60.0, addresses: int = 256) -> None:
        self._most = most
        self._within_seconds = within_seconds
        self._addresses = addresses
        self._wrong: dict[str, deque[float]] = {}  # times, by address, the newest last

    def is_over(self, address: str, now: float) -> bool:
        """Whether no more guesses of it are looked at now."""
        wrong = self._wrong.get(address, deque())
        while wrong and wrong[0] <= now - self._within_seconds:
            wrong.popleft()
        return len(wrong) >= self._most

    def wrong(self, address: str, now: float) -> None:
        """It tried a wrong one."""
        times = self._wrong.pop(address, deque(maxlen=self._most))
        times.append(now)
        self._wrong[address] = times
        while len(self._wrong) > self._addresses:
            del self._wrong[next(iter(self._wrong))]


MAX_BODY_BYTES = 16 * 1024

HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
"""Of every answer."""

JSON_ALONE = frozenset({"application/json"})
"""What a form of another site's page cannot send."""

_LOOKING = frozenset({"GET", "HEAD"})


def why_refused(
    method: str,
    path: str,
    host: str,
    headers: Mapping[str, str],
    hosts: Collection[str],
    *,
    entrances: Collection[str] = ("/",),
    content_types: Collection[str] = JSON_ALONE,
) -> str | None:
    """The reason, or None: its sender may be asked who it is.

    Args:
        hosts: what Host may be.
        entrances: paths that links of other sites may lead to.
        content_types: of a body that changes something.
    """
    if host not in hosts:
        return "this page is not known by that name"
    origin = headers.get("Origin")
    if origin is not None and origin != f"http://{host}":
        return "another site's page may not ask here"
    site = headers.get("Sec-Fetch-Site", "none")
    if site not in ("none", "same-origin") and not (
        path in entrances and _is_link(method, headers)
    ):
        return "another site's page may not ask here"
    if method not in _LOOKING:
        if origin is None:
            return "only this page itself may change something"
        if headers.get("Content-Type", "").partition(";")[0] not in content_types:
            return f"what changes something is {' or '.join(sorted(content_types))}"
    return None


def _is_link(method: str, headers: Mapping[str, str]) -> bool:
    """Whether a person has followed a link to the page."""
    is_top = headers.get("Sec-Fetch-Mode") == "navigate" and (
        headers.get("Sec-Fetch-Dest", "document") == "document"
    )
    return method == "GET" and is_top
