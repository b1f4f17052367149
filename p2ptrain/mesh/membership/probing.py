"""The failure detector's bookkeeping: which member is next, which probes run, which we relay.

SWIM (Das et al. 2002, section 4.3): every device probes one member per interval, in a shuffled
round-robin, so the time until a silent member is first probed is bounded and the load per device
is the same in any group. A probe without a direct answer goes through helpers. Helpers that fail to
reach the target report it (Lifeguard's nack), which separates a slow prober from a dead target.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random


@dataclass(slots=True)
class Probe:
    """One probe of our own under way.

    Attributes:
        due: when to go through helpers, or, once it did, when the probe has failed.
        indirect: helpers were asked (also where none was to be had).
        helpers: ids asked; `nacks` answered "not reached"; `lost` said their link has ended.
        again: of a suspect: an answer counts, silence says nothing new.
    """

    target: str
    started: float
    due: float
    indirect: bool = False
    helpers: tuple[str, ...] = ()
    nacks: set[str] = field(default_factory=set)
    lost: set[str] = field(default_factory=set)
    again: bool = False

    @property
    def silent_helpers(self) -> set[str]:
        """Those that have answered nothing."""
        return set(self.helpers) - self.nacks


@dataclass(frozen=True, slots=True)
class ProbeRelay:
    """One probe that we do for `origin`, who calls it `sequence`."""

    origin: str
    sequence: int
    target: str
    due: float


class Prober:
    """Probes and relays by sequence number; both are numbered from one counter."""

    def __init__(self, rng: Random, relays_limit: int) -> None:
        self._rng = rng
        self._relays_limit = relays_limit
        self._round: list[str] = []
        self._sequence = 0
        self.probes: dict[int, Probe] = {}
        self.relays: dict[int, ProbeRelay] = {}

    def next_target(self, candidates: Sequence[str]) -> str | None:
        """The next of `candidates` in this round; None where there are none."""
        wanted = set(candidates)
        while self._round:
            target = self._round.pop()
            if target in wanted:
                return target
        self._round = list(candidates)
        self._rng.shuffle(self._round)
        return self._round.pop() if self._round else None

    def start(self, target: str, now: float, due: float) -> int:
        """Begin a probe; returns its number."""
        self._sequence += 1
        self.probes[self._sequence] = Probe(target, now, due)
        return self._sequence

    def start_relay(self, origin: str, sequence: int, target: str, due: float) -> int | None:
        """Begin a probe for `origin`; None where too many are under way."""
        if len(self.relays) >= self._relays_limit:
            return None
        self._sequence += 1
        self.relays[self._sequence] = ProbeRelay(origin, sequence, target, due)
        return self._sequence

    def is_probing(self, target: str) -> bool:
        """True while a probe of `target` is under way that accuses it if it fails."""
        return any(probe.target == target and not probe.again for probe in self.probes.values())

    def answered(self, sequence: int, peer: str) -> Probe | None:
        """End and return the probe that `peer` (its target or a helper) answered."""
        probe = self.probes.get(sequence)
        if probe is None or (peer != probe.target and peer not in probe.helpers):
            return None
        return self.probes.pop(sequence)

    def relayed(self, sequence: int, peer: str) -> ProbeRelay | None:
        """End and return the relay whose target `peer` answered."""
        relay = self.relays.get(sequence)
        if relay is None or relay.target != peer:
            return None
        return self.relays.pop(sequence)

    def due_probes(self, now: float) -> list[tuple[int, Probe]]:
        """Probes to be decided now, oldest first."""
        return [(n, probe) for n, probe in self.probes.items() if probe.due <= now]

    def end(self, sequence: int) -> None:
        """End a probe."""
        del self.probes[sequence]

    def pop_relays(self, now: float | None = None, target: str | None = None) -> list[ProbeRelay]:
        """End and return the relays due by `now`, or those to `target`."""
        chosen = [
            number
            for number, relay in self.relays.items()
            if relay.target == target or (now is not None and relay.due <= now)
        ]
        return [self.relays.pop(number) for number in chosen]

    def forget(self, target: str) -> None:
        """End the probes of `target` without a verdict."""
        for number in [n for n, probe in self.probes.items() if probe.target == target]:
            del self.probes[number]

    def clear(self) -> None:
        """End everything without a verdict: after a freeze, silence proves nothing."""
        self.probes.clear()
        self.relays.clear()

    def next_due(self) -> float:
        """When the next probe or relay is due; infinity where none is."""
        first = float("inf")
        for probe in self.probes.values():
            first = min(first, probe.due)
        for relay in self.relays.values():
            first = min(first, relay.due)
        return first
