"""Which device fetches which units from which, once sources and destinations are known.

A device takes from its own memory what it has. What several devices of a stage lack travels once
from its source to the first of them, and on along the stage, each from the one before:

    source d                 d ──► b ──► c          b: from d      c: relayed by b
    stage  [b c]
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from p2ptrain.errors import InternalError
from p2ptrain.net.fields import check_units
from p2ptrain.net.forms import Count, Id
from p2ptrain.recovery.choose_version import VersionChoice
from p2ptrain.recovery.placement import PlacedStage


@dataclass(frozen=True, slots=True)
class Fetch:
    """Units [first, end) from `peer`; from this device's own memory where that is itself.

    Attributes:
        relayed: the peer does not have them yet: it passes on what it gets.
    """

    first: Count
    end: Count
    peer: Id
    relayed: bool = False

    def __post_init__(self) -> None:
        check_units(self.first, self.end)


def plan_fetches(
    choice: VersionChoice, stages: Sequence[PlacedStage]
) -> dict[str, tuple[Fetch, ...]]:
    """By device, what it fetches, in the order of the units: of a unit's places the least used."""
    load: Counter[str] = Counter()
    wanted: dict[str, list[tuple[int, str, bool]]] = {}
    for stage in stages:
        for unit in range(stage.first, stage.end):
            places = choice.places[unit]
            if not places:
                raise InternalError(f"layer {unit} is nowhere at version {choice.version.step}")
            relay: str | None = None
            for device in stage.devices:
                if device in places:
                    source, relayed = device, False
                elif relay is not None:
                    source, relayed, relay = relay, True, device
                else:
                    source = min(places, key=lambda place: (load[place], places.index(place)))
                    relayed, relay = False, device
                    load[source] += 1
                wanted.setdefault(device, []).append((unit, source, relayed))
    return {device: _joined(entries) for device, entries in wanted.items()}


def _joined(entries: Sequence[tuple[int, str, bool]]) -> tuple[Fetch, ...]:
    """Neighbouring units from one peer become one fetch."""
    joined = []
    numbered = enumerate(sorted(entries))
    for (_, peer, relayed), run in groupby(numbered, lambda one: (one[1][0] - one[0], *one[1][1:])):
        units = [unit for _, (unit, _, _) in run]
        joined.append(Fetch(units[0], units[-1] + 1, peer, relayed))
    return tuple(joined)


def relayable_fetches(wanted: Mapping[str, Sequence[Fetch]]) -> dict[str, tuple[Fetch, ...]]:
    """The same fetches, where a device passes on only what it fetches in one piece itself.

    What else it was to pass on is fetched from where it fetches it.
    """
    return {
        device: tuple(part for fetch in own for part in _passed(fetch, wanted))
        for device, own in wanted.items()
    }


def _passed(fetch: Fetch, wanted: Mapping[str, Sequence[Fetch]]) -> Iterator[Fetch]:
    if not fetch.relayed:
        yield fetch
        return
    before = wanted[fetch.peer]
    if any((own.first, own.end) == (fetch.first, fetch.end) for own in before):
        yield fetch
        return
    for own in before:
        first, end = max(own.first, fetch.first), min(own.end, fetch.end)
        if first < end:
            yield from _passed(Fetch(first, end, own.peer, own.relayed), wanted)
