"""What has no meaning without a barrier, said before any other device is asked for anything."""

from __future__ import annotations

from p2ptrain.errors import OptionError
from p2ptrain.model.description import ModelDescription
from p2ptrain.model.written import written_names
from p2ptrain.plan.versions import Weights
from p2ptrain.training.asynchronous.delays import Asynchrony
from p2ptrain.training.job import Job
from p2ptrain.training.options import TrainOptions

_NAMES = {
    Weights.STASHED: "aggregation",
    Weights.VERTICAL: "vertical sync",
    Weights.DOUBLE: "two versions",
    Weights.UNSTASHED: "no stashing",
}


def check_asynchronous(job: Job, description: ModelDescription, options: TrainOptions) -> None:
    """Raises OptionError: the job cannot be trained asynchronously, and why."""
    if job.clip_grad_norm is not None:
        raise OptionError(
            "clip_grad_norm needs the gradients of all layers before an update, and async "
            "training does not wait for them: use --mode sync, or leave it out"
        )
    if job.skip_nonfinite:
        raise OptionError(
            "skip_nonfinite skips an update on all devices at once, and async training does not "
            "wait for them: use --mode sync, or leave it out"
        )
    tied = _tied(description)
    if tied and not options.local:
        raise OptionError(
            f"{tied[0]} is used by several layers: on different devices its copies would be "
            "updated at different times and drift apart. Use --mode sync"
        )
    written = _written_parameters(description)
    if written:
        raise OptionError(
            f"the model writes to its parameter {written[0]} while it computes: with async, "
            "batches at the same time would write to different copies of it. Use --mode sync"
        )


def unshared(how: Asynchrony, description: ModelDescription) -> str:
    """Why every stage needs a device of its own; "" where devices may take mini-batches in turn."""
    if not how.may_share:
        return f"asynchronous training with {_NAMES[how.weights]} has one device for each part"
    if written_names(description, 0, len(description.units)):
        return (
            "its running statistics are of all mini-batches in order, which devices that take "
            "them in turn do not see"
        )
    return ""


def _tied(description: ModelDescription) -> list[str]:
    """Trainable tensors that several units use, so that a plan may put them into several stages."""
    return sorted(description.shared_between(range(len(description.units) + 1)))


def _written_parameters(description: ModelDescription) -> list[str]:
    trainable = {tensor.name for tensor in description.tensors if tensor.trainable}
    return sorted(trainable & written_names(description, 0, len(description.units)))
