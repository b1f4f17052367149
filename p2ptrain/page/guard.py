"""Which requests the page answers: decided by their headers, before anything else is looked at.

Another site's page in the same browser can send requests here, with this page's cookie if it were
not SameSite, and can have its own name resolve to this address (DNS rebinding). So Host must be one
of ours, Origin ours where there is one, and always there where something changes. Pure.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

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
