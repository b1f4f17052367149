"""Which devices can work together: every one must have a link to every other."""

from __future__ import annotations

from collections.abc import Collection, Mapping

RELINK_SECONDS = 2.0
"""How long a broken link may take to be dialled again before somebody is left out for it."""


def clique(
    devices: Collection[str], links: Mapping[str, Collection[str]], holder: str
) -> tuple[frozenset[str], dict[str, tuple[str, ...]]]:
    """Those that stay, and for each that is left out the peers that it has no link to.

    Whoever lacks most links goes first, of equals the greatest id; never the holder.

    Arguments:
        links: by device, the peers that it says it has a link to. Both ends must say so.
    """
    left = set(devices) | {holder}
    out: dict[str, tuple[str, ...]] = {}
    while True:
        missing = {
            device: tuple(
                sorted(peer for peer in left - {device} if not _linked(device, peer, links))
            )
            for device in sorted(left)
        }
        worst = max(
            (device for device in missing if device != holder and missing[device]),
            key=lambda device: (len(missing[device]), device),
            default=None,
        )
        if worst is None:
            return frozenset(left), out
        out[worst] = missing[worst]
        left.discard(worst)


def _linked(one: str, other: str, links: Mapping[str, Collection[str]]) -> bool:
    return other in links.get(one, ()) and one in links.get(other, ())
