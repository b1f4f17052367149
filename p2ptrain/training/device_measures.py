"""What a device is asked about itself: unit times, links, memory, and the model they are of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from p2ptrain.errors import Error, ProtocolError, TrainingError
from p2ptrain.logs import get_logger, timed
from p2ptrain.mesh.interface import GONE, Mesh
from p2ptrain.model.description import ModelDescription
from p2ptrain.model.measure import work_on
from p2ptrain.net.message import Message, Priority
from p2ptrain.training.allocator import trim_heap
from p2ptrain.training.budget import (
    USABLE_SHARE,
    anonymous_bytes,
    available_memory_bytes,
    is_out_of_memory,
    usable_memory_bytes,
)
from p2ptrain.training.ceiling import Ceiling
from p2ptrain.training.company import Company
from p2ptrain.training.compute import ComputeThread
from p2ptrain.training.default_type import check_default_type
from p2ptrain.training.measured import LinksAnswer, LinksAsked, ProfileAnswer, ProfileAsked
from p2ptrain.training.operator_errors import OPERATORS_RAISE, first_line, unit_of
from p2ptrain.training.parts import limited, part_of
from p2ptrain.training.profiling import ProfileCache, measure
from p2ptrain.training.protocol import (
    FETCH_MODEL,
    MEASURE_LINKS,
    MEASURE_PROFILE,
    MODEL_LIMIT_BYTES,
)
from p2ptrain.training.recovery.holdings import Inventory

log = get_logger(__name__)

FETCH_TIMEOUT_SECONDS = 120.0
LINK_SECONDS = 0.12
"""How long one direction of a link is measured: 1.5 MB at 100 Mbit/s, well past its slow start."""


class DeviceMeasures:
    """One a device; keeps the newest answers.

    Args:
        memory_bytes: what p2ptrain may use here, or None: what is available.
        ceiling: told what jobs may take here.
    """

    def __init__(
        self,
        mesh: Mesh,
        compute: ComputeThread,
        profiles: ProfileCache,
        memory_bytes: int | None,
        ceiling: Ceiling | None = None,
    ) -> None:
        self._mesh = mesh
        self._compute = compute
        self._profiles = profiles
        self._memory_bytes = memory_bytes
        self._ceiling = ceiling
        self._idle_bytes = anonymous_bytes()
        self._models: dict[str, ModelDescription] = {}
        self._offers: dict[str, _Offer] = {}  # by model
        self._speeds: dict[str, tuple[float, float]] = {}  # to a peer: bytes/s, seconds
        self._company = Company(compute)

    async def close(self) -> None:
        """End what still runs."""
        await self._company.close()

    def know_model(self, description: ModelDescription) -> None:
        """Spare fetching a model that was captured here."""
        self._models = {description.digest: description}

    async def measure_profile(self, message: Message) -> Message:
        """Unit times of a model on this device, none without sizes; and the memory it offers.

        Raises:
            OptionError: an app has given this process another default type.
        """
        check_default_type()
        asked = ProfileAsked.read(message.fields)
        digest, sizes = asked.digest, asked.batch_sizes
        description = await self.model(digest, asked.holder)
        budget = self.budget_bytes()
        measured: Mapping[str, Any] = {}
        if sizes:
            measured = await self._measured(
                description, sizes, budget, largest_second=asked.largest_second
            )
        memory_bytes = self.budget_bytes()
        taken = max(anonymous_bytes() - self._idle_bytes, 0)
        self._offers = {digest: _Offer(measured, memory_bytes, taken)}
        if measured and asked.company:
            self._company.begin(work_on(description, _middle_size(measured), memory_bytes))
        answer = ProfileAnswer(measured, memory_bytes, taken)
        return Message(MEASURE_PROFILE, {}, (answer.to_part(),))

    async def _measured(
        self,
        description: ModelDescription,
        sizes: Sequence[int],
        budget_bytes: int,
        *,
        largest_second: bool,
    ) -> Mapping[str, Any]:
        """Raises TrainingError: the model itself fails, as it does in plain torch."""
        try:
            with timed(log, "measured"):
                return await measure(
                    *(description, sizes, self._compute, self._profiles, budget_bytes),
                    largest_second=largest_second,
                )
        except OPERATORS_RAISE as error:
            if is_out_of_memory(error):
                raise
            unit = unit_of(error)
            where = "its backward" if unit is None else f"unit {unit}"
            raise TrainingError(f"the model fails in {where}: {first_line(error)}") from error

    async def all_measured(self, peer: str, message: Message) -> None:
        """Nobody measures any more beside this device."""
        self._company.end()

    async def measure_links(self, peer: str, message: Message) -> Message:
        """What this device can send to each of the given members, one after the other.

        Asked `again`, because a link is doubted, it keeps the faster of both measurements.
        """
        asked, speeds = LinksAsked.read(message.fields), []
        for target in dict.fromkeys(asked.peers):
            try:
                speed = await self._mesh.measure_link(target, LINK_SECONDS)
                speeds.append((target, speed.bytes_per_s, speed.latency_s))
                before = self._speeds.get(target, (0.0, 0.0))[0] if asked.again else 0.0
                if speed.bytes_per_s > before:
                    self._speeds[target] = (speed.bytes_per_s, speed.latency_s)
            except (Error, TimeoutError) as error:
                log.info("link_not_measured", target=target[:12], why=str(error))
        return Message(MEASURE_LINKS, LinksAnswer(tuple(speeds)).fields())

    def facts(self, digest: str) -> Inventory:
        """What this device has measured and offers, and nothing of what it has of any job."""
        return self.complete(Inventory(self._mesh.self_id, 0, 0, ()), digest)

    def complete(self, inventory: Inventory, digest: str) -> Inventory:
        """With what this device has measured, and what it offers."""
        away = {m.id for m in self._mesh.members.values() if m.state in GONE}
        offer = self._offers.get(digest)
        return replace(
            inventory,
            linked=inventory.linked - away,
            budget_bytes=0 if offer is None else self._still_offered(offer),
            taken_bytes=0 if offer is None else offer.taken_bytes,
            speeds=tuple((peer, *speed) for peer, speed in self._speeds.items()),
            measured=None if offer is None else offer.measured or None,
        )

    async def model(self, digest: str, holder: str) -> ModelDescription:
        """A model by its digest, fetched from its holder where it is not known."""
        if digest not in self._models:
            with timed(log, "model_fetched"):
                reply = await self._mesh.call(
                    holder,
                    Message(FETCH_MODEL, {"digest": digest}),
                    timeout_seconds=FETCH_TIMEOUT_SECONDS,
                    priority=Priority.TENSOR,
                    reply_parts=limited(MODEL_LIMIT_BYTES),
                )
            blob = bytes(part_of(reply))
            with timed(log, "model_read"):
                read = partial(ModelDescription.from_bytes, blob)
                description = await self._compute.run((0,), read)
            if description.digest != digest:
                raise ProtocolError("the holder sent another model than it announced")
            self._models = {digest: description}
        return self._models[digest]

    def short_of(self, needed_bytes: int, *, engaged: bool) -> int | None:
        """The memory there is, where a part would need more of it, now that it is to begin.

        Args:
            engaged: what the job takes here now is free once the part begins.
        """
        trim_heap()
        free = available_memory_bytes() + (self._held_bytes() if engaged else 0)
        if needed_bytes <= self._most(free):
            return None
        return self.whole_budget_bytes() if engaged else self.budget_bytes()

    def expect(self, needed_bytes: int, *, engaged: bool) -> None:
        """Hold the process against what the part that begins was planned to need; as `short_of`."""
        if self._ceiling is not None:
            held_bytes = self._held_bytes() if engaged else 0
            self._ceiling.plan(needed_bytes, anonymous_bytes() - held_bytes)

    def budget_bytes(self) -> int:
        """What a job may take now, beside what it takes."""
        trim_heap()  # what measuring, or a job before, has used is free for the next
        return self._most(usable_memory_bytes())

    def whole_budget_bytes(self) -> int:
        """What a job may take now, with what it has taken since this device measured its model."""
        return self._most(int((available_memory_bytes() + self._held_bytes()) * USABLE_SHARE))

    def _still_offered(self, offer: _Offer) -> int:
        """Of what this device offered when it was idle.

        What others take meanwhile comes from the fifth that was left free. Only where they have
        taken more is it less: else no two plans would be made for the same memory.
        """
        if available_memory_bytes() + self._held_bytes() >= offer.memory_bytes:
            return offer.memory_bytes
        return min(offer.memory_bytes, self.whole_budget_bytes())

    def _held_bytes(self) -> int:
        """What a job has taken of this process since its model was measured."""
        taken = max((offer.taken_bytes for offer in self._offers.values()), default=0)
        return max(anonymous_bytes() - self._idle_bytes - taken, 0)

    def _most(self, free_bytes: int) -> int:
        """What a job may take of what is free."""
        return free_bytes if self._memory_bytes is None else min(self._memory_bytes, free_bytes)


@dataclass(frozen=True)
class _Offer:
    """What this device measured of a model and offered for it, last.

    Attributes:
        taken_bytes: what the job had taken by then.
    """

    measured: Mapping[str, Any]
    memory_bytes: int
    taken_bytes: int


def _middle_size(measured: Mapping[str, Any]) -> int:
    sizes = sorted(map(int, measured["times"]))
    return sizes[len(sizes) // 2]
