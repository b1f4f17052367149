from __future__ import annotations

import pytest

from p2ptrain.net.frame import Block, Codec
from p2ptrain.net.link.compression import ChooserSettings, Compressed, CompressionChooser
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


def observe(
    made: CompressionChooser,
    kind: PartKind,
    ratio: float,
    blocks: int = 1,
    codec: Codec = Codec.LZ4,
) -> None:
    for _ in range(blocks):
        block = Block(b"", bytes(int(MIB * ratio)), MIB)
        made.observe_compression(kind, codec, Compressed((block,), MIB / LZ4_SPEED))


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


@pytest.mark.parametrize("settings", [ChooserSettings(), ChooserSettings(enabled=False)])
def test_never(settings: ChooserSettings) -> None:
    made = chooser(settings=settings)
    observe(made, PartKind.OPAQUE, 0.1)
    observe(made, ACTIVATION, 0.1)
    assert made.choose(PartKind.OPAQUE, MIB, 0.0).codec is Codec.RAW
    assert not made.choose(PartKind.OPAQUE, MIB, 0.0).samples
    small = made.choose(ACTIVATION, 1000, 0.0)
    assert (small.codec, small.samples) == (Codec.RAW, ())
    assert (made.choose(ACTIVATION, MIB, 0.0).codec is Codec.LZ4) == settings.enabled


def test_nothing_is_sampled_while_the_link_keeps_up() -> None:
    assert not chooser(None).choose(ACTIVATION, MIB, 0.0).samples


def test_samples_now_and_then_only() -> None:
    made = chooser()
    times = [step * 0.1 for step in range(40)]
    sampled = [now for now in times if made.choose(GRADIENT, MIB, now).samples]
    assert sampled == pytest.approx([0.0, 1.0, 2.0, 3.0])


def test_trials_in_vain_become_rare_until_the_link_changes() -> None:
    made = chooser()
    tried = []
    for now in range(100):
        for codec in made.choose(GRADIENT, MIB, float(now)).samples:
            observe(made, GRADIENT, 1.0, codec=codec)
            tried.append((now, codec))
    times = [now for now, codec in tried if codec is Codec.LZ4]
    assert times == [0, 1, 3, 7, 15, 31, 47, 63, 79, 95]
    made.observe_link(HOME_LINK / 3)
    assert made.choose(GRADIENT, MIB, 99.0).samples


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
    observe(made, ACTIVATION, 0.88)
    gain_before = made.choose(ACTIVATION, MIB, 0.0)
    observe(made, ACTIVATION, 0.92, blocks=10)
    assert gain_before.codec is made.choose(ACTIVATION, MIB, 0.0).codec
    fresh = chooser()
    observe(fresh, ACTIVATION, 0.92)
    assert fresh.choose(ACTIVATION, MIB, 0.0).codec is Codec.RAW


def test_stops_when_the_link_becomes_fast() -> None:
    made = chooser()
    observe(made, ACTIVATION, 0.5)
    assert made.choose(ACTIVATION, MIB, 0.0).codec is Codec.LZ4
    made.observe_link(LOOPBACK)
    assert made.choose(ACTIVATION, MIB, 0.0).codec is Codec.RAW


def test_sorted_bytes_are_taken_where_they_shrink_more() -> None:
    made = chooser()
    observe(made, GRADIENT, 1.0)
    observe(made, GRADIENT, 0.80, codec=Codec.SHUFFLED)
    assert made.choose(GRADIENT, MIB, 0.0).codec is Codec.SHUFFLED
    observe(made, GRADIENT, 0.6, blocks=20)
    assert made.choose(GRADIENT, MIB, 0.0).codec is Codec.LZ4
    assert made.ratio(GRADIENT, Codec.SHUFFLED) == pytest.approx(0.80, abs=1e-4)


def test_what_is_not_in_use_is_tried_again() -> None:
    made = chooser()
    observe(made, ACTIVATION, 0.5)
    times = [step * 0.1 for step in range(21)]
    choices = [(now, made.choose(ACTIVATION, MIB, now)) for now in times]
    assert {choice.codec for _, choice in choices} == {Codec.LZ4}
    tried = {now: choice.samples for now, choice in choices if choice.samples}
    assert list(tried) == pytest.approx([0.0, 1.0, 2.0])
    assert set(tried.values()) == {(Codec.SHUFFLED,)}


def drive(made: CompressionChooser, begin: float, ratio: float, until: bool) -> float | None:
    """Send MiB parts at the link's pace, 5 s; when compression began (or ended), None = never."""
    now = begin
    while now < begin + 5.0:
        choice = made.choose(ACTIVATION, MIB, now)
        if (choice.codec is not Codec.RAW) == until:
            return now - begin
        for codec in {choice.codec, *choice.samples} - {Codec.RAW}:
            observe(made, ACTIVATION, ratio, 2 if codec is choice.codec else 1, codec)
        assert made.link_bytes_per_s is not None
        now += MIB * (1.0 if choice.codec is Codec.RAW else ratio) / made.link_bytes_per_s
    return None


def test_within_a_second_it_stops_when_it_no_longer_pays_and_starts_on_a_slower_link() -> None:
    made = chooser(LOOPBACK)
    assert drive(made, 0.0, ratio=0.6, until=True) is None  # the link is fast
    made.observe_link(HOME_LINK)
    started = drive(made, 5.0, ratio=0.6, until=True)
    assert started is not None
    assert started < 1.0
    stopped = drive(made, 6.0, ratio=1.0, until=False)  # data that do not shrink any more
    assert stopped is not None
    assert stopped < 1.0
    assert drive(made, 7.0, ratio=1.0, until=True) is None
    again = drive(made, 12.0, ratio=0.6, until=True)  # noticed by trying now and then
    assert again is not None
    assert again < 3.0
