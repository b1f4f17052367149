"""Whether LZ4 pays on a link, for each kind of tensor: decided from what was measured.

Sending raw costs 1/link seconds a raw byte; compressed, it costs

    1/compression speed + ratio/link + 1/decompression speed      (ratio = wire bytes / raw bytes)

as both devices' processors also have a model to train. LZ4 is chosen while this is smaller by a
margin. ReLU activations shrink, dense gradients do not; only measuring tells. While a kind goes
raw, one block of it is compressed now and then just to know; while it is compressed, every block
is a measurement, so a change shows within a few blocks.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from p2ptrain.net.frame import Codec
from p2ptrain.net.message import PartKind


@dataclass(frozen=True, slots=True)
class ChooserSettings:
    """When to measure and when to switch.

    Attributes:
        enabled: False sends everything raw.
        least_part_bytes: smaller parts go raw: their share of the traffic is not worth a thread.
        sample_seconds: a kind that goes raw is sampled this often. Shorter: notices sooner that
            compression pays; longer: less processor time.
        gain_to_start, gain_to_stop: raw cost / compressed cost above which compression starts,
            and below which it stops; apart, so that it does not flutter.
        newest_weight: of the latest measurement in an estimate. Larger: follows faster.
        decompression_advantage: how many times faster LZ4 unpacks than packs, where the other
            side's speed is unknown.
    """

    enabled: bool = True
    least_part_bytes: int = 8 * 1024
    sample_seconds: float = 1.0
    gain_to_start: float = 1.15
    gain_to_stop: float = 1.02
    newest_weight: float = 0.4
    decompression_advantage: float = 3.0


@dataclass(frozen=True, slots=True)
class Choice:
    """What to do with a part, and why.

    Attributes:
        codec: how it travels.
        sample: compress one of its blocks and report it, whatever the codec.
        reason: for logs and tests.
    """

    codec: Codec
    sample: bool
    reason: str


@dataclass(slots=True)
class _KindState:
    ratio: float | None = None
    compressing: bool = False
    sampled_at: float | None = None


@dataclass(slots=True)
class CompressionChooser:
    """Decides for one direction of one link. Pure: times and measurements are arguments."""

    settings: ChooserSettings = field(default_factory=ChooserSettings)
    link_bytes_per_s: float | None = None
    compress_bytes_per_s: float | None = None
    decompress_bytes_per_s: float | None = None
    _kinds: dict[PartKind, _KindState] = field(default_factory=dict)

    def choose(self, kind: PartKind, part_bytes: int, now: float) -> Choice:
        """How a part of `kind` and `part_bytes` raw bytes goes out at time `now` (seconds)."""
        settings = self.settings
        if not settings.enabled or kind is PartKind.OPAQUE:
            return Choice(Codec.RAW, False, "never compressed")
        if part_bytes < settings.least_part_bytes:
            return Choice(Codec.RAW, False, "too small to matter")
        if self.link_bytes_per_s is None:
            return Choice(Codec.RAW, False, "the link has not been the limit yet")
        state = self._kinds.setdefault(kind, _KindState())
        gain = self._gain(state)
        if gain is None:
            return self._raw(state, now, "not measured yet")
        bar = settings.gain_to_stop if state.compressing else settings.gain_to_start
        state.compressing = gain >= bar
        if state.compressing:
            return Choice(Codec.LZ4, False, f"gain {gain:.2f} is at least {bar}")
        return self._raw(state, now, f"gain {gain:.2f} is below {bar}")

    def observe_compression(
        self, kind: PartKind, raw_bytes: int, wire_bytes: int, seconds: float
    ) -> None:
        """`raw_bytes` of `kind` were compressed to `wire_bytes` in `seconds`."""
        state = self._kinds.setdefault(kind, _KindState())
        state.ratio = self._blend(state.ratio, wire_bytes / raw_bytes)
        speed = raw_bytes / max(seconds, 1e-9)
        self.compress_bytes_per_s = self._blend(self.compress_bytes_per_s, speed)

    def observe_decompression(self, bytes_per_s: float) -> None:
        """The receiving device unpacks this many raw bytes a second."""
        self.decompress_bytes_per_s = self._blend(self.decompress_bytes_per_s, bytes_per_s)

    def observe_link(self, bytes_per_s: float | None) -> None:
        """What the link takes on the wire; None while it has never been the limit."""
        self.link_bytes_per_s = bytes_per_s

    def ratio(self, kind: PartKind) -> float | None:
        """Measured wire bytes / raw bytes of `kind`, if any."""
        return self._kinds[kind].ratio if kind in self._kinds else None

    def _raw(self, state: _KindState, now: float, reason: str) -> Choice:
        due = state.sampled_at is None or now - state.sampled_at >= self.settings.sample_seconds
        if due:
            state.sampled_at = now
        return Choice(Codec.RAW, due, reason)

    def _gain(self, state: _KindState) -> float | None:
        """Raw cost / compressed cost of a byte, or None before a measurement."""
        link, pack = self.link_bytes_per_s, self.compress_bytes_per_s
        if state.ratio is None or link is None or pack is None:
            return None
        unpack = self.decompress_bytes_per_s or pack * self.settings.decompression_advantage
        return (1 / link) / (1 / pack + state.ratio / link + 1 / unpack)

    def _blend(self, old: float | None, newest: float) -> float:
        return newest if old is None else old + self.settings.newest_weight * (newest - old)
