"""FTPipeHD's settings: when it repartitions the model and copies it (sections III-D, III-E)."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from p2ptrain.errors import OptionError

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
