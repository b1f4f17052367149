from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2ptrain.errors import OptionError
from p2ptrain.plan.cost.cost_model import CostModel
from p2ptrain.plan.cost.draft import draft_pipeline, peak_bytes
from p2ptrain.plan.problem.candidates import MAX_SIZES, candidate_splits
from p2ptrain.plan.types.allocation import MAX_SAMPLES, BatchSplit
from p2ptrain.plan.types.request import PlanRequest
from tests.support import planning_examples


@given(st.integers(1, 500), st.integers(1, 600))
def test_micro_batches_sum_to_the_batch(batch_size: int, micro_batch: int) -> None:
    split = BatchSplit(batch_size, micro_batch)
    samples = [split.samples(m) for m in range(split.micro_batches)]
    assert sum(samples) == batch_size
    assert samples[0] == split.first_samples
    assert samples[-1] == split.last_samples >= 1
    assert split.in_flight_samples(split.micro_batches) == batch_size


@given(st.integers(1, 60), st.integers(1, 20), st.integers(-1, 80))
def test_the_deepest_warmup_is_the_deepest_that_fits(batch: int, size: int, room: int) -> None:
    split = BatchSplit(batch, min(size, batch))
    fitting = [k for k in range(1, split.micro_batches + 1) if split.in_flight_samples(k) <= room]
    assert max(split.deepest(room), 0) == max(fitting, default=0)


@pytest.mark.parametrize(("batch_size", "micro_batch"), [(0, 1), (1, 0), (-1, 1)])
def test_impossible_sizes_are_refused(batch_size: int, micro_batch: int) -> None:
    with pytest.raises(OptionError, match="must be at least 1"):
        BatchSplit(batch_size, micro_batch)


def sizes(batch_size: int, micro_batch: int | None = None, min_micro_batch: int = 1) -> list[int]:
    cost = CostModel(*planning_examples.household(0, units=2, devices=2))  # measured: 1, 4, 16, 64
    request = PlanRequest(batch_size, micro_batch, min_micro_batch=min_micro_batch)
    return [split.micro_batch for split in candidate_splits(cost, request)]


def test_pieces_too_small_for_the_model_are_not_chosen() -> None:
    assert 1 not in sizes(512, min_micro_batch=2)
    assert sizes(17, min_micro_batch=2) == [17]  # 2, 4, 8 and 16 would leave a piece of one sample
    assert sizes(18, min_micro_batch=2)[0] == 2


def test_free_sizes_start_from_the_measured_ones() -> None:
    assert {1, 4, 16, 64} < set(sizes(512))
    assert len(sizes(512)) == MAX_SIZES
    assert sizes(8) == [1, 2, 4, 8]
    assert sizes(1) == [1]


def test_a_fixed_size_is_kept() -> None:
    assert sizes(512, 7) == [7]
    assert sizes(5, 7) == [5]


def test_pieces_larger_than_any_memory_are_refused() -> None:
    assert BatchSplit(2 * MAX_SAMPLES, MAX_SAMPLES).checked().micro_batches == 2
    with pytest.raises(OptionError, match="micro_batch must be at most 1,000,000,000,000, found"):
        BatchSplit(2 * MAX_SAMPLES, MAX_SAMPLES + 1).checked()


def test_depths_are_lowered_for_memory_and_never_grow() -> None:
    # Stage 0: 30 bytes of state + 5 a sample; room for 2 samples in flight, not for 5.
    profile = planning_examples.profile([(1, 1)] * 3, parameter_bytes=10, activation_bytes=5)
    cost = CostModel(profile, planning_examples.cluster("a", "b", "c", memory_bytes=41))
    draft = draft_pipeline(cost, BatchSplit(8, 1), (0, 1, 2, 3), (0, 1, 2))
    assert draft is not None
    assert draft.warmup == (2, 2, 1)
    assert peak_bytes(cost, draft) == {0: 40, 1: 40, 2: 35}
    assert draft_pipeline(cost, BatchSplit(8, 4), (0, 1, 2, 3), (0, 1, 2)) is None


def test_a_private_holder_pays_for_both_ends() -> None:
    profile = planning_examples.profile([(1, 1)] * 3, parameter_bytes=10, activation_bytes=5)
    for memory, warmup in ((70, (1, 1, 1)), (80, (3, 3, 1)), (90, (5, 3, 1))):
        cluster = planning_examples.Cluster(
            (
                planning_examples.ClusterDevice("a", memory, holder=True),
                planning_examples.ClusterDevice("b", planning_examples.PLENTY),
            ),
            planning_examples.FREE,
        )
        draft = draft_pipeline(
            CostModel(profile, cluster), BatchSplit(8, 1), (0, 1, 2, 3), (0, 1, 0)
        )
        assert draft is not None
        assert draft.warmup == warmup
