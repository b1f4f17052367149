"""Which weights a mini-batch sees in each stage, when no round waits for another. Pure.

Stage p of n does n-p forwards before its first backward, then strictly alternates; each backward is
followed by an update. Below each task the number of updates in its weights (STASHED):

    stage 0   F0 F1 F2 .  .  B0 F3 B1 F4 B2 F5 B3      forward t: max(0, t-2), its backward too
              0  0  0        0  1  0  2  0  3  1
    stage 2   .  .  F0 B0 F1 B1 F2 B2 F3 B3 F4 B4      t
                    0  0  1  1  2  2  3  3  4  4

STASHED, VERTICAL   PipeDream (SOSP 2019, section 3.3): weight stashing, and with vertical sync
DOUBLE              PipeDream-2BW (ICML 2021): one update late everywhere, n micro-batches or more
UNSTASHED           forward as STASHED, backward with the newest: a gradient of no function
aggregate           FTPipeHD (section III-C): every k(n-p) updates the newest weights of stage p
                    become the mean of its n-p newest versions

The devices of a group take mini-batches in turn, and each makes every update, in order: so the
stage has one version t on all of them. Its depth counts its devices. Counting begins again whenever
the pipeline begins empty: after a failure, and after an evaluation. `FtpipehdOptions`: when
FTPipeHD repartitions the model, and when it copies (sections III-D, III-E).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from p2ptrain.errors import OptionError
from p2ptrain.plan.types.weight_versions import Weights, updates_late

USUAL_PIECES = 8
"""Micro-batches of a mini-batch where stages keep two versions and their size is not fixed."""


@dataclass(frozen=True, slots=True)
class AsyncOptions:
    """How a job trains without a barrier.

    Attributes:
        aggregate: k of FTPipeHD's weight aggregation; None = there is none.

    Raises:
        OptionError: two choices that exclude each other, or a k below 1.
    """

    weights: Weights = Weights.STASHED
    aggregate: int | None = None

    def __post_init__(self) -> None:
        if self.aggregate is None:
            return
        if self.aggregate < 1:
            raise OptionError(f"aggregate counts updates: give 1 or more, not {self.aggregate}")
        if self.weights not in (Weights.STASHED, Weights.VERTICAL):
            raise OptionError(
                "aggregate takes the mean of the weights that a stage keeps for mini-batches under "
                f"way, which are not kept with {self.weights.value} weights"
            )

    @property
    def may_share(self) -> bool:
        """Whether a stage may have several devices: the others would have to keep all versions."""
        return self.weights is Weights.STASHED and self.aggregate is None

    def piece(self, batch_size: int, micro_batch: int = 0) -> int:
        """Samples that travel together.

        The whole mini-batch; with two versions a micro-batch, of which there must be as many as
        stages at least: `micro_batch`, or what makes USUAL_PIECES where that is 0.
        """
        if self.weights is not Weights.DOUBLE:
            return batch_size
        return micro_batch or -(-batch_size // min(USUAL_PIECES, batch_size))


@dataclass(frozen=True, slots=True)
class WeightDelays:
    """The rule for one stretch of mini-batches, from an empty pipeline on.

    A version is named by its updates since the job began.

    Attributes:
        depths: K_p of each stage: forwards before the first backward, which is most that is under
            way in it; its devices and those of all later stages, so n-p in a straight pipeline.
        start: updates made when the stretch began.
    """

    how: AsyncOptions
    depths: tuple[int, ...]
    start: int

    def seen(self, stage: int, step: int) -> int:
        """The version that mini-batch `step`'s forward uses at a stage, and but for UNSTASHED its
        backward.
        """
        return max(self.start, step - self._lag(stage))

    def oldest(self, stage: int, updates: int) -> int:
        """After so many updates, the oldest version that something will still use."""
        if self.how.weights is Weights.UNSTASHED:
            return updates
        return self.seen(stage, updates)

    def averaged(self, stage: int, updates: int) -> range:
        """The versions whose mean takes the place of the newest, `updates`; empty if none does."""
        every, depth = self.how.aggregate, self.depths[stage]
        made = updates - self.start
        if every is None or depth < 2 or made % (every * depth):
            return range(0)
        return range(updates - depth + 1, updates + 1)

    def _lag(self, stage: int) -> int:
        return updates_late(self.how.weights, self.depths[stage], self.depths[0])


PLANNER = "ftpipehd"


@dataclass(frozen=True, slots=True)
class FtpipehdOptions:
    """How a job with `--mode async --planner ftpipehd` proceeds; the defaults are the paper's.

    Attributes:
        first_repartition: mini-batches before the model is first repartitioned.
        repartition: mini-batches from then on between two looks at the cuts.
        chain: updates between two copies of every stage at its neighbour.
        whole: updates between two copies of the whole model at the device with the data.

    Raises:
        OptionError: a number below 1.
    """

    first_repartition: int = 10
    repartition: int = 100
    chain: int = 50
    whole: int = 100

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if value < 1:
                words = name.replace("_", " ")
                raise OptionError(f"{words} counts mini-batches: give 1 or more, not {value}")

    def copies(self, last: int, step: int) -> bool:
        """Whether stages are copied after `step` updates, those after `last` having been so last.

        As soon as one can be after each `chain`-th: the copy before may still have been under way.
        """
        return is_due(self.chain, last, step) or self.copies_whole(last, step)

    def copies_whole(self, last: int, step: int) -> bool:
        """The same of the whole model."""
        return is_due(self.whole, last, step)


def is_due(every: int, last: int, step: int) -> bool:
    """After `step` updates, where it was last so after `last`: as soon as one can be after each
    `every`-th."""
    return step // every > last // every
