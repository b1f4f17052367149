"""What is compared: how a mini-batch's weights depend on the updates before it."""

from __future__ import annotations

from dataclasses import dataclass

from p2ptrain.plan.versions import Weights
from p2ptrain.training.asynchronous.delays import Asynchrony

STAGES = 3
BATCH = 64
PIECE = 16
"""Samples of a micro-batch, where mini-batches are divided."""


@dataclass(frozen=True)
class Setting:
    """One way to train.

    Attributes:
        how: None = in synchronous rounds.
        micro_batch: samples; 0 = mini-batches travel whole.
    """

    name: str
    how: Asynchrony | None
    stages: int = STAGES
    micro_batch: int = 0

    @property
    def command(self) -> str:
        """What `p2ptrain train` is given for it."""
        if self.stages == 1:
            return "--local"
        if self.how is None:
            return f"--micro-batch {self.micro_batch}"
        words = ["--mode async"]
        if self.how.weights is Weights.VERTICAL:
            words.append("--vertical-sync")
        if self.how.weights is Weights.DOUBLE:
            words.append(f"--versions 2 --micro-batch {self.micro_batch}")
        if self.how.weights is Weights.UNSTASHED:
            words.append("--no-stashing")
        if self.how.aggregate is not None:
            words.append(f"--aggregate {self.how.aggregate}")
        return " ".join(words)


SETTINGS = (
    Setting("one-device", None, stages=1),
    Setting("synchronous", None, micro_batch=PIECE),
    Setting("stashing", Asynchrony()),
    Setting("vertical-sync", Asynchrony(Weights.VERTICAL)),
    Setting("aggregation-1", Asynchrony(aggregate=1)),
    Setting("two-versions", Asynchrony(Weights.DOUBLE), micro_batch=PIECE),
)
"""The first is what all others are held against."""


def setting_of(name: str) -> Setting:
    """Raises KeyError."""
    return {setting.name: setting for setting in SETTINGS}[name]
