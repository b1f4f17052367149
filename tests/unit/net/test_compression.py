from __future__ import annotations

import pytest

from p2ptrain.net.compression import ChooserSettings, CompressionChooser
from p2ptrain.net.frame import Codec
from p2ptrain.net.message import PartKind

MIB = 2**20
HOME_LINK = 12.5e6  # bytes/s of 100 Mbit/s
LOOPBACK = 2e9
LZ4_SPEED = 500e6  # raw bytes/s packed
ACTIVATION, GRADIENT = PartKind.ACTIVATION, PartKind.GRADIENT


def chooser(
    link: float | None = HOME_LINK, settings: ChooserSettings | None = None
) -> CompressionChooser:
    made = CompressionChooser(settings or ChooserSettings())
    made.observe_link(link)
    return made


def observe(made: CompressionChooser, kind: PartKind, ratio: float, blocks: int = 1) -> None:
    for _ in range(blocks):
        made.observe_compression(kind, MIB, int(MIB * ratio), MIB / LZ4_SPEED)


def test_compresses_what_shrinks_on_a_slow_link() -> None:
    made = chooser()
    observe(made, ACTIVATION, 0.65)
    choice = made.choose(ACTIVATION, MIB, 0.0)
    assert choice.codec is Codec.LZ4
    assert "gain" in choice.reason


def test_kinds_are_decided_apart() -> None:
    made = chooser()
    observe(made, ACTIVATION, 0.65)
    observe(made, GRADIENT, 0.97)
    assert made.choose(ACTIVATION, MIB, 0.0).codec is Codec.LZ4
    assert made.choose(GRADIENT, MIB, 0.0).codec is Codec.RAW
    assert made.ratio(GRADIENT) == pytest.approx(0.97)
    assert made.ratio(PartKind.WEIGHT) is None


def test_a_fast_link_stays_raw() -> None:
    made = chooser(LOOPBACK)
    observe(made, ACTIVATION, 0.1)
    assert made.choose(ACTIVATION, MIB, 0.0).codec is Codec.RAW


def test_both_sides_processors_count() -> None:
    made = chooser()
    observe(made, ACTIVATION, 0.8)
    assert made.choose(ACTIVATION, MIB, 0.0).codec is Codec.LZ4
    made.observe_decompression(20e6)  # a very slow receiver
    assert made.choose(ACTIVATION, MIB, 0.0).codec is Codec.RAW


@pytest.mark.parametrize("settings", [ChooserSettings(), ChooserSettings(enabled=False)])
def test_never(settings: ChooserSettings) -> None:
    made = chooser(settings=settings)
    observe(made, PartKind.OPAQUE, 0.1)
    observe(made, ACTIVATION, 0.1)
    assert made.choose(PartKind.OPAQUE, MIB, 0.0).codec is Codec.RAW
    assert not made.choose(PartKind.OPAQUE, MIB, 0.0).sample
    small = made.choose(ACTIVATION, 1000, 0.0)
    assert (small.codec, small.sample) == (Codec.RAW, False)
    assert (made.choose(ACTIVATION, MIB, 0.0).codec is Codec.LZ4) == settings.enabled


def test_nothing_is_sampled_while_the_link_keeps_up() -> None:
    assert not chooser(None).choose(ACTIVATION, MIB, 0.0).sample


def test_samples_now_and_then_only() -> None:
    made = chooser()
    times = [step * 0.1 for step in range(40)]
    sampled = [now for now in times if made.choose(GRADIENT, MIB, now).sample]
    assert sampled == pytest.approx([0.0, 1.0, 2.0, 3.0])


def test_stops_within_a_second_when_it_no_longer_pays() -> None:
    made = chooser()
    observe(made, ACTIVATION, 0.5, blocks=100)
    assert made.choose(ACTIVATION, MIB, 0.0).codec is Codec.LZ4
    block_seconds = 128 * 1024 / HOME_LINK
    blocks = 0
    while made.choose(ACTIVATION, MIB, 0.0).codec is Codec.LZ4:
        observe(made, ACTIVATION, 1.0)
        blocks += 1
    assert blocks * block_seconds < 0.2
    assert blocks > 1  # one odd block changes nothing


def test_does_not_flutter_around_the_border() -> None:
    made = chooser()
    observe(made, ACTIVATION, 0.84)
    gain_before = made.choose(ACTIVATION, MIB, 0.0)
    observe(made, ACTIVATION, 0.90, blocks=10)
    assert gain_before.codec is made.choose(ACTIVATION, MIB, 0.0).codec
    fresh = chooser()
    observe(fresh, ACTIVATION, 0.90)
    assert fresh.choose(ACTIVATION, MIB, 0.0).codec is Codec.RAW


def test_stops_when_the_link_becomes_fast() -> None:
    made = chooser()
    observe(made, ACTIVATION, 0.5)
    assert made.choose(ACTIVATION, MIB, 0.0).codec is Codec.LZ4
    made.observe_link(LOOPBACK)
    assert made.choose(ACTIVATION, MIB, 0.0).codec is Codec.RAW
