"""How a mini-batch falls into micro-batches."""

from __future__ import annotations

from dataclasses import dataclass

from p2ptrain.errors import OptionError

MAX_MICRO_BATCHES = 100_000
"""Of a round, in questions and plans from outside: each has tasks on every stage, and millions of
tasks would take minutes and all memory to simulate."""

MAX_SAMPLES = 10**12
"""Of a mini-batch or a piece of one, in questions and plans from outside: more than any memory
holds, and still exact in floating point."""


@dataclass(frozen=True, slots=True)
class BatchSplit:
    """`batch_size` samples in micro-batches of `micro_batch`, the last one possibly smaller.

    A micro-batch larger than the batch is the whole batch.
    """

    batch_size: int
    micro_batch: int

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise OptionError(f"batch_size must be at least 1, found {self.batch_size}")
        if self.micro_batch < 1:
            raise OptionError(f"micro_batch must be at least 1, found {self.micro_batch}")

    def checked(self) -> BatchSplit:
        """This one. Raises OptionError where a round of it cannot be simulated."""
        check_samples("micro_batch", self.first_samples)
        if self.micro_batches > MAX_MICRO_BATCHES:
            raise OptionError(
                f"{self.micro_batches} micro-batches of {self.micro_batch} samples are more than "
                f"{MAX_MICRO_BATCHES}: choose larger ones, or a smaller batch"
            )
        return self

    @property
    def micro_batches(self) -> int:
        """Micro-batches of a round."""
        return -(-self.batch_size // self.micro_batch)

    @property
    def first_samples(self) -> int:
        """Samples of every micro-batch but the last."""
        return min(self.micro_batch, self.batch_size)

    @property
    def last_samples(self) -> int:
        """Samples of the last micro-batch."""
        return self.batch_size - (self.micro_batches - 1) * self.micro_batch

    def samples(self, micro_batch: int) -> int:
        """Samples of micro-batch number `micro_batch`, counted from 0."""
        is_last = micro_batch == self.micro_batches - 1
        return self.last_samples if is_last else self.micro_batch

    def in_flight_samples(self, warmup: int) -> int:
        """Most samples forwarded and not yet backwarded with that warm-up depth."""
        return min(warmup * self.micro_batch, self.batch_size)

    def deepest(self, samples: int) -> int:
        """The deepest warm-up that keeps at most `samples` in flight; 0 = not even one."""
        if samples >= self.batch_size:
            return self.micro_batches
        return min(samples // self.micro_batch, self.micro_batches - 1)


def check_samples(name: str, samples: int) -> None:
    """Raises OptionError for more than a mini-batch, or a piece of one, may have."""
    if samples > MAX_SAMPLES:
        raise OptionError(f"{name} must be at most {MAX_SAMPLES:,}, found {samples}")
