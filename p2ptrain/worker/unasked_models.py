"""Models of other devices that any member may ask this device to measure: run and judged in a box.

How a model ends its process is the answer to the device that asked and a warning for the user of
this device. Such a model is not run again for a while. (For how long one device may ask in all:
`messages.requesters`.)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from time import monotonic
from typing import Any

import torch

from p2ptrain.errors import PeerError, TrainingError, size_text
from p2ptrain.logs import get_logger
from p2ptrain.process.box import Box, BoxTask, Ended, How
from p2ptrain.process.compute_thread import ComputeThread
from p2ptrain.profiling.boxed_measure import WORK, ProfileRequest
from p2ptrain.profiling.profile_cache import BOX_SECONDS, MAX_SECONDS, ProfileCache, measure_boxed
from p2ptrain.profiling.unit_chain import WHOLE

log = get_logger(__name__)

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class UnaskedConfig:
    """Bounds.

    Attributes:
        waiting: most questions that wait for the one being answered.
        remembered: most models whose end is remembered.
        crash_seconds: for so long a model that has crashed is not run again.
        short_seconds: for so long one that took too much memory or time is not.
    """

    waiting: int = 4
    remembered: int = 256
    crash_seconds: float = 24 * 3600.0
    short_seconds: float = 60.0


@dataclass(frozen=True, slots=True)
class FetchedModel:
    """As it came.

    Attributes:
        digest: SHA-256 of `content`.
        source: id of the device that sent it.
    """

    digest: str
    content: bytes
    source: str


class RefusedModels:
    """Which models are not run again, and why. Pure but for its memory."""

    def __init__(self, config: UnaskedConfig) -> None:
        self._config = config
        self._ended: dict[str, tuple[str, float]] = {}  # digest: why, until when

    def why(self, digest: str, now: float) -> str | None:
        """Why this model is not run; None where it is."""
        reason, until = self._ended.get(digest, ("", now))
        return reason if until > now else None

    def note(self, digest: str, how: How, why: str, now: float) -> None:
        """It has ended its process."""
        kept = self._config.crash_seconds if how is How.CRASH else self._config.short_seconds
        self._ended.pop(digest, None)
        self._ended[digest] = (why, now + kept)
        while len(self._ended) > self._config.remembered:
            del self._ended[next(iter(self._ended))]


class UnaskedWork:
    """One a device.

    Args:
        box: where models run.
        warn: warns the user of this device; takes the source's id and what its model did.
    """

    def __init__(
        self,
        box: Box,
        compute: ComputeThread,
        profiles: ProfileCache,
        warn: Callable[[str, str], None],
        config: UnaskedConfig = UnaskedConfig(),
        now: Callable[[], float] = monotonic,
    ) -> None:
        self._box, self._compute, self._profiles = box, compute, profiles
        self._warn, self._config, self._now = warn, config, now
        self._refusals = RefusedModels(config)
        self._asked = 0

    def check(self, digest: str) -> None:
        """Raises TrainingError: that model has ended its process here, not long ago."""
        why = self._refusals.why(digest, self._now())
        if why is not None:
            raise TrainingError(why)

    async def measure(
        self,
        model: FetchedModel,
        batch_sizes: Sequence[int],
        memory_bytes: int,
        *,
        largest_second: bool,
        briefly: bool = False,
    ) -> Mapping[str, Any]:
        """As `profiling.measure`.

        Raises:
            TrainingError: the model fails, or has ended the process that measured it.
            PeerError: too many ask.
            NoBox: there is none.
        """
        self.check(model.digest)
        if self._asked > self._config.waiting:
            raise PeerError("this device measures other models already: ask again later")
        self._asked += 1
        try:
            return await measure_boxed(
                *(model.content, model.digest, batch_sizes, self._compute, self._profiles),
                *(memory_bytes, self._box),
                largest_second=largest_second,
                briefly=briefly,
            )
        except Ended as ended:
            why = _why(ended, memory_bytes)
            self._refusals.note(model.digest, ended.how, f"this model {why}", self._now())
            self._warn(model.source, why)
            raise TrainingError(f"this model {why}") from None
        finally:
            self._asked -= 1

    async def work(self, model: FetchedModel, samples: int, memory_bytes: int) -> None:
        """Run it as training would, for as long as others may still measure."""
        asked = ProfileRequest(model.content, (samples,), memory_bytes, torch.get_num_threads())
        question = BoxTask(WORK, asked.to_bytes(), memory_bytes, MAX_SECONDS)
        try:
            await self._box.ask(question)
        except Ended as ended:
            log.info("company_ended", how=ended.how.value)


def _why(ended: Ended, memory_bytes: int) -> str:
    where = _where(ended.place)
    if ended.how is How.MEMORY:
        return f"takes more than {size_text(memory_bytes)} of memory {where}"
    if ended.how is How.TIME:
        return f"computes for more than {BOX_SECONDS:.0f} s {where}"
    return f"ends the process that runs it {where} ({ended.by})"


def _where(place: int | None) -> str:
    if place is None:
        return "before its first layer"
    return "in all its layers together" if place == WHOLE else f"in layer {place}"
