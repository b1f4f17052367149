"""What plans a job allows, read from models as they are captured."""

from __future__ import annotations

from p2ptrain.holder.start.model_limits import sharing_of
from p2ptrain.messages.plan_request import Sharing
from tests.support import odd_models, stage_pipeline, zoo


def test_models_are_read() -> None:
    plain = sharing_of(stage_pipeline.captured(zoo.make("mlp")).description)
    assert plain == Sharing()
    normed = sharing_of(stage_pipeline.captured(zoo.make("cnn")).description)
    assert not normed.unshared
    assert len(normed.effects) == 1
    pairs = sharing_of(stage_pipeline.captured(odd_models.make("pairwise_in_batch")).description)
    assert not pairs.divisible
    assert sharing_of(
        stage_pipeline.captured(odd_models.make("normalised_weights")).description
    ).unshared
