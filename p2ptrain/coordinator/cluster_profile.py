"""What is measured of a cluster before a plan: links and profiles."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from time import monotonic

from p2ptrain.aio.tasks import task_scope
from p2ptrain.coordinator.link_survey import MeasuredLinks, Pair
from p2ptrain.coordinator.measured_cluster import MeasuredDevice
from p2ptrain.errors import Error, PeerError
from p2ptrain.logs import get_logger
from p2ptrain.mesh.interface import Mesh
from p2ptrain.messages.calls import Hangs, call_while_it_works, read_part
from p2ptrain.messages.job_requests import (
    MOST_SAMPLES,
    LinksAnswer,
    LinksAsked,
    ProfileAnswer,
    ProfileAsked,
)
from p2ptrain.messages.kinds import MEASURE_LINKS, MEASURE_PROFILE, MEASURED
from p2ptrain.messages.plan_request import JobPlanRequest
from p2ptrain.net.fields import LARGE, limited
from p2ptrain.net.message import Message, PartsAllocator
from p2ptrain.plan.types.cluster import ClusterLink
from p2ptrain.plan.types.plan import LeftOut
from p2ptrain.profiling.profile_cache import batch_sizes_to_measure
from p2ptrain.recovery.work_signs import USUAL, SignLimits

log = get_logger(__name__)

LINK_TIMEOUT_SECONDS = 20.0

HANGS_SECONDS = 60.0
"""So long a device that hung is not asked again."""


class ClusterProfiler:
    """Asks the devices, and remembers the links.

    Args:
        limits: how long a device that is asked may show nothing.
        profile_seconds: for which devices are waited for that measure the model.
        alone_seconds: the same for the only device: without it there is no plan.

    Attributes:
        hangs: is called for a device that does not do what it is asked for.
    """

    def __init__(
        self,
        mesh: Mesh,
        limits: SignLimits = USUAL,
        *,
        profile_seconds: float = 60.0,
        alone_seconds: float = 600.0,
    ) -> None:
        self.hangs: Callable[[Hangs], None] = lambda _error: None
        self._mesh = mesh
        self._limits = limits
        self._profile_seconds, self._alone_seconds = profile_seconds, alone_seconds
        self._hung: dict[str, tuple[Hangs, float]] = {}  # by device: until when
        self._links = MeasuredLinks()
        self._surveying = asyncio.Lock()

    def links(self, names: Mapping[str, str]) -> dict[tuple[str, str], ClusterLink]:
        """By names, of the devices in `names` (id -> name); estimated where not measured."""
        return {
            (names[one], names[other]): link
            for (one, other), link in self._links.speeds(list(names)).items()
        }

    def measured_links(self, names: Mapping[str, str]) -> dict[tuple[str, str], ClusterLink]:
        """As `links`, and nothing of what was not measured."""
        return {
            (names[one], names[other]): link
            for (one, other), link in self._links.measured(names).items()
        }

    def learn(self, sender: str, speeds: Sequence[tuple[str, float, float]]) -> None:
        """What a device measured before, perhaps for another holder.

        Args:
            speeds: (receiver, bytes/s, seconds).
        """
        for receiver, bytes_per_s, latency_s in speeds:
            self._links.note(sender, receiver, ClusterLink(bytes_per_s, latency_s), monotonic())

    async def measure_links(self, devices: Sequence[str]) -> None:
        """Between these devices, as far as they were not measured lately."""
        async with self._surveying:
            missing = self._links.missing(devices, monotonic())
            for pairs in missing:
                await self._measure_round(pairs, again=False)
            for pairs in self._links.doubtful(devices) if missing else ():
                await self._measure_round(pairs, again=True)

    async def _measure_round(self, pairs: Sequence[Pair], *, again: bool) -> None:
        async with task_scope() as group:
            for one, other in pairs:
                group.create_task(self._measure_link(one, other, again=again))
                group.create_task(self._measure_link(other, one, again=again))

    @property
    def hanging(self) -> list[Hangs]:
        """Of devices that hung a moment ago."""
        now = monotonic()
        return [error for error, until in self._hung.values() if now < until]

    async def _asked(
        self,
        device: str,
        message: Message,
        seconds: float,
        reply_parts: PartsAllocator | None = None,
    ) -> Message:
        """Its answer. Raises as `call_while_it_works`, for one that hung a moment ago at once."""
        for error in self.hanging:
            if error.device == device:
                raise Hangs(device, error.name, error.why)
        try:
            return await call_while_it_works(
                self._mesh,
                device,
                message,
                timeout_seconds=seconds,
                reply_parts=reply_parts,
                limits=self._limits,
            )
        except Hangs as error:
            if device not in self._hung:
                self.hangs(error)
            self._hung[device] = error, monotonic() + HANGS_SECONDS
            raise

    async def measure_new_links(self, new: Sequence[str], others: Sequence[str]) -> None:
        """Between `new` devices and all, one link at a time, as far as never measured.

        The others train meanwhile, and not one of their links is measured.
        """
        async with self._surveying:
            for device in new:
                for other in [*others, *new]:
                    if other != device and not self._links.knows(device, other):
                        await self._measure_link(device, other)
                        await self._measure_link(other, device)

    async def _measure_link(self, sender: str, receiver: str, *, again: bool = False) -> None:
        try:
            reply = await self._asked(
                sender,
                Message(MEASURE_LINKS, LinksAsked((receiver,), again).fields()),
                LINK_TIMEOUT_SECONDS,
            )
            record = self._links.record_again if again else self._links.record
            for target, bytes_per_s, latency_s in LinksAnswer.read(reply.fields).speeds:
                record(sender, target, ClusterLink(bytes_per_s, latency_s), monotonic())
        except (Error, TimeoutError) as error:
            log.info("link_not_measured", sender=sender[:12], why=str(error))

    async def profile(
        self, request: JobPlanRequest, holder: str, names: Mapping[str, str], count: int
    ) -> dict[str, MeasuredDevice | LeftOut]:
        """Unit times of the devices in `names` (id -> name), measured side by side.

        Every other one continues from the smallest batch to the largest: slow ones come no further,
        and what devices of one kind find is put together (`profile_pooling.py`). Who is done works
        on until all are (`device_profile.py`). FTPipeHD measures the holder alone: the others say
        only how much memory they offer.

        Args:
            count: devices that may take part.
        """
        sizes = batch_sizes_to_measure(
            request.batch_size,
            request.micro_batch,
            count,
            request.min_micro_batch,
            divided=request.may_divide or request.asynchrony is not None,
        )
        is_alone = request.ftpipehd is not None
        keeps_company = len(names) > 1 and not is_alone
        every_other = set(sorted(names)[::2])
        asked = {
            device: ProfileAsked(
                request.job,
                request.digest,
                holder,
                () if is_alone and device != holder else tuple(sizes),
                largest_second=device in every_other,
                company=keeps_company,
                most=0 if request.micro_batch else min(request.batch_size, MOST_SAMPLES),
            )
            for device in names
        }
        seconds = self._profile_seconds if count > 1 else self._alone_seconds
        answers = await asyncio.gather(
            *(self._profile(device, name, asked[device], seconds) for device, name in names.items())
        )
        if keeps_company:
            await self._report_measured(names)
        return dict(zip(names, answers, strict=True))

    async def _report_measured(self, names: Mapping[str, str]) -> None:
        for device, name in names.items():
            try:
                await self._mesh.send(device, Message(MEASURED))
            except PeerError as error:
                log.info("not_informed", device=name, why=str(error))

    async def _profile(
        self, device: str, name: str, asked: ProfileAsked, seconds: float
    ) -> MeasuredDevice | LeftOut:
        try:
            measure = Message(MEASURE_PROFILE, asked.fields())
            parts = limited(LARGE.most_bytes)
            reply = await self._asked(device, measure, seconds, parts)
            answer = await read_part(ProfileAnswer, reply)
            facts = answer.memory, answer.taken_bytes, answer.compute
            return MeasuredDevice(device, name, answer.measured, *facts)
        except TimeoutError:
            return LeftOut(name, f"did not answer within {seconds:.0f} s")
        except Error as error:
            return LeftOut(name, str(error))
