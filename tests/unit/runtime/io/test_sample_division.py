"""Every sample has one device for each part, and travels from it to the one that needs it, once."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from p2ptrain.messages.assignment import StageAssignment
from p2ptrain.messages.tensors import SampleRange
from p2ptrain.plan.types.allocation import Allocation
from p2ptrain.runtime.io.sample_division import SampleDivision

MICRO_BATCH = 6
MICRO_BATCHES = 5


def shares_of(whole: int) -> st.SearchStrategy[tuple[int, ...]]:
    """One to four shares of at least 1 that sum to `whole`."""
    borders = st.sets(st.integers(1, whole - 1), max_size=3).map(sorted)
    return borders.map(
        lambda cuts: tuple(b - a for a, b in zip([0, *cuts], [*cuts, whole], strict=True))
    )


def place(name: str) -> st.SearchStrategy[StageAssignment]:
    """A stage whose devices are called name0, name1, ..."""

    def build(allocation: Allocation, shares: tuple[int, ...]) -> StageAssignment:
        devices = tuple(f"{name}{index}" for index in range(len(shares)))
        return StageAssignment(0, 1, 1, devices, shares, allocation)

    return st.one_of(
        st.builds(build, st.just(Allocation.SAMPLES), shares_of(MICRO_BATCH)),
        st.builds(build, st.just(Allocation.MICRO_BATCHES), shares_of(MICRO_BATCHES)),
    )


def test_the_picture_of_the_module() -> None:
    before = SampleDivision(StageAssignment(0, 1, 1, ("a", "b"), (3, 1)))
    after = SampleDivision(StageAssignment(1, 2, 1, ("c", "d"), (2, 2)))
    a, b = before.slices(0, 4)
    assert (a, b) == (SampleRange("a", 0, 3), SampleRange("b", 3, 4))
    assert after.overlaps(0, 4, a) == (SampleRange("c", 0, 2), SampleRange("d", 2, 3))
    assert after.overlaps(0, 4, b) == (SampleRange("d", 3, 4),)


@settings(derandomize=True, deadline=None, max_examples=60)
@given(place("s"), place("r"), st.integers(0, 3 * MICRO_BATCHES), st.integers(1, MICRO_BATCH))
def test_every_sample_travels_once(
    sender: StageAssignment, receiver: StageAssignment, micro_batch: int, size: int
) -> None:
    senders, receivers = SampleDivision(sender), SampleDivision(receiver)
    travelled: list[int] = []
    for part in receivers.slices(micro_batch, size):
        for source in senders.overlaps(micro_batch, size, part):
            owner = senders.part(source.device, micro_batch, size)
            assert owner is not None
            assert owner.first <= source.first < source.end <= owner.end
            back = receivers.overlaps(micro_batch, size, owner)
            assert SampleRange(part.device, source.first, source.end) in back
            travelled += range(source.first, source.end)
    assert travelled == list(range(size))


@settings(derandomize=True, deadline=None, max_examples=30)
@given(place("s"))
def test_a_round_gives_every_device_its_share(stage: StageAssignment) -> None:
    division = SampleDivision(stage)
    taken = dict.fromkeys(stage.devices, 0)
    for micro_batch in range(MICRO_BATCHES):
        for part in division.slices(micro_batch, MICRO_BATCH):
            taken[part.device] += part.size
    if len(stage.devices) == 1:
        expected = [MICRO_BATCH * MICRO_BATCHES]
    elif stage.allocation is Allocation.SAMPLES:
        expected = [share * MICRO_BATCHES for share in stage.shares]
    else:
        expected = [share * MICRO_BATCH for share in stage.shares]
    assert list(taken.values()) == expected


def test_a_smaller_last_micro_batch_leaves_the_last_devices_without_a_part() -> None:
    division = SampleDivision(StageAssignment(0, 1, 1, ("a", "b", "c"), (3, 2, 1)))
    assert division.slices(4, 4) == (SampleRange("a", 0, 3), SampleRange("b", 3, 4))
    assert division.part("c", 4, 4) is None
