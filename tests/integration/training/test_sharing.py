"""What plans a job allows, read from models as they are captured."""

from __future__ import annotations

from p2ptrain.holder.start.model_limits import read_sharing
from p2ptrain.messages.plan_request import SharingLimits
from tests.support import odd_models, stage_pipeline, zoo


def test_models_are_read() -> None:
    plain = read_sharing(stage_pipeline.captured(zoo.make("mlp")).description)
    assert plain == SharingLimits()
    normed = read_sharing(stage_pipeline.captured(zoo.make("cnn")).description)
    assert not normed.unshared
    assert len(normed.effects) == 1
    pairs = read_sharing(stage_pipeline.captured(odd_models.make("pairwise_in_batch")).description)
    assert not pairs.divisible
    assert read_sharing(
        stage_pipeline.captured(odd_models.make("normalised_weights")).description
    ).unshared
