"""One epoch made ready on this device: what its stages begin with fetched, the stages built."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial

from p2ptrain import failpoints
from p2ptrain.errors import Error, PeerError
from p2ptrain.logs import get_logger, timed
from p2ptrain.mesh.interface import Mesh
from p2ptrain.model.description import ModelDescription
from p2ptrain.model.optimizer import optimizer_state_ratio
from p2ptrain.model.optimizer_spec import OptimizerSpec, optimizer_from_fields
from p2ptrain.training.assignment import Assignment, StagePlace
from p2ptrain.training.budget import is_out_of_memory
from p2ptrain.training.compute import ComputeThread
from p2ptrain.training.digests import DamagedState
from p2ptrain.training.engagement import Engagement
from p2ptrain.training.epoch_links import Shell
from p2ptrain.training.fetching import SourceFailed, fetch
from p2ptrain.training.job_store import Found, JobStore
from p2ptrain.training.recovery.device_events import PartFetched, PrepareFailed
from p2ptrain.training.recovery.fetches import Fetch
from p2ptrain.training.recovery.holdings import Kind
from p2ptrain.training.recovery.version import Version
from p2ptrain.training.scope import task_scope
from p2ptrain.training.stage_sizes import StageTooLarge, refuse_large_stages
from p2ptrain.training.state_check import state_check
from p2ptrain.training.state_transfer import StateServer
from p2ptrain.training.versions import Named

log = get_logger(__name__)

Model = Callable[[str, str], Awaitable[ModelDescription]]
"""(digest, holder) -> its description, fetched where it is not known."""


class NotReady(PeerError):
    """It will not stand.

    Attributes:
        event: the same for the rules.
    """

    def __init__(self, event: PrepareFailed) -> None:
        super().__init__(event.reason)
        self.event = event


class MakingReady:
    """The way from an assignment to stages that may begin. `fetch`, then `build`; or `give_up`.

    Attributes:
        moved_bytes: what came from other devices so far, whole.
        fetched_bytes: what came of it at all.
    """

    def __init__(
        self,
        assignment: Assignment,
        shell: Shell,
        states: StateServer,
        store: JobStore,
        model: Model,
        budget_bytes: Callable[[], int],
        damaged: Callable[[Version], None],
        planned_bytes: int,
        short_of: Callable[[int], int | None] | None,
    ) -> None:
        """Nothing is done yet.

        Args:
            planned_bytes: what the plan takes here.
            short_of: bytes -> the memory there is for stages, where that is too little; None: none
                is built of what is fetched.
            store: where what is fetched goes.
            budget_bytes: what a job may take now.
            damaged: told that a copy here does not fit its digest.
        """
        self.assignment = assignment
        self._shell = shell
        self._states = states
        self._store = store
        self._model = model
        self._budget_bytes = budget_bytes
        self.moved_bytes = self.fetched_bytes = 0
        self._damaged = damaged
        self._planned_bytes = planned_bytes
        self._short_of = short_of
        self._built: Engagement | None = None

    @property
    def _compute(self) -> ComputeThread:
        return self._shell.compute

    @property
    def _mesh(self) -> Mesh:
        return self._shell.mesh

    async def fetch(
        self,
        fetches: tuple[Fetch, ...],
        arrived: Callable[[PartFetched], None],
        short_bytes: int | None,
    ) -> None:
        """Read what other devices have; `arrived` hears of each part, which can be read from here.

        Args:
            short_bytes: the memory there is, where that is too little for the plan.

        Raises:
            NotReady: something is in the way.
        """
        epoch = self.assignment.key.epoch
        if short_bytes is not None:
            raise NotReady(PrepareFailed(epoch, "out of memory", memory_bytes=short_bytes))
        try:
            if self._short_of is not None and self.assignment.holder != self._mesh.self_id:
                await self._know_sizes(self._short_of)
            with timed(log, "weights_fetched"):
                await self._fetch(fetches, arrived)
        except Exception as error:  # told to the holder, which plans around it
            raise self._not_ready(error) from error

    async def _know_sizes(self, short_of: Callable[[int], int | None]) -> None:
        """Of a model of another device's, whatever the plan says."""
        description, spec = await self._description(), await self._spec()

        def look() -> None:
            refuse_large_stages(
                self.assignment,
                description,
                self._mesh.self_id,
                optimizer_state_ratio(spec),
                self._planned_bytes,
                short_of,
            )

        with timed(log, "sizes_known"):
            await self._compute.run((0,), look)

    async def _fetch(
        self, fetches: tuple[Fetch, ...], arrived: Callable[[PartFetched], None]
    ) -> None:
        assignment, version = self.assignment, self.assignment.version
        description = await self._description()
        versions = self._store.versions(description)
        spec = await self._spec()
        check = await self._compute.run((0,), partial(state_check, description, spec))
        self._store.check = check

        def count(nbytes: int) -> None:
            self.fetched_bytes += nbytes

        async def fetch_one(wanted: Fetch) -> None:
            state = await fetch(self._mesh, self._states, assignment, wanted, check, count)
            units = (wanted.first, wanted.end)
            self.moved_bytes += sum(tensor.nbytes for tensor in state.tensors.values())
            versions.put(Kind.FETCHED, *units, version, state.tensors, state.digests)
            self._store.offer(version)
            if failpoints.armed:
                await failpoints.reach("fetch.between", device=self._mesh.self_id)
            arrived(PartFetched(assignment.key.epoch, wanted.first, wanted.end, version))

        async with task_scope() as group:
            for wanted in fetches:
                if wanted.peer != self._mesh.self_id:
                    group.create_task(fetch_one(wanted))

    async def build(self) -> Engagement:
        """The stages, from what is here now. Raises NotReady."""
        assignment = self.assignment
        try:
            description = await self._description()
            versions = self._store.versions(description)
            self._built = Engagement(
                assignment, description, self._shell, versions, self._planned_bytes
            )

            async def parts(place: StagePlace) -> Named:
                found = await self._here(place)
                return await self._compute.run((0,), found.own)

            with timed(log, "stages_built"):
                await self._built.prepare(parts, await self._spec())
        except Exception as error:  # told to the holder, which plans around it
            if isinstance(error, DamagedState):
                self._damaged(assignment.version)
            raise self._not_ready(error) from error
        if failpoints.armed:
            await failpoints.reach("build.after", device=self._mesh.self_id)
        return self._built

    async def _here(self, place: StagePlace) -> Found:
        try:
            return await self._store.find(self.assignment.version, place.first, place.end)
        except SourceFailed:
            raise
        except PeerError as error:  # this device was to have it
            raise SourceFailed(self._mesh.self_id, str(error)) from error

    def give_up(self, why: str) -> None:
        """Neither others wait for what was to be handed on, nor anything arrives here."""
        self._states.relays.give_up(self.assignment, self._mesh.self_id, why)
        if self._built is not None:
            self._built.disconnect()
            self._built = None

    async def _description(self) -> ModelDescription:
        return await self._model(self.assignment.digest, self.assignment.holder)

    async def _spec(self) -> OptimizerSpec:
        read = partial(optimizer_from_fields, self.assignment.optimizer)
        return await self._compute.run((0,), read)

    def _not_ready(self, error: Exception) -> NotReady:
        memory_bytes, source = None, None
        if isinstance(error, StageTooLarge):
            memory_bytes = error.memory_bytes
            log.warning("stage_too_large", why=str(error))
        elif is_out_of_memory(error):
            memory_bytes = self._budget_bytes()
        elif isinstance(error, SourceFailed):
            source = error.peer
        elif isinstance(error, DamagedState):
            source = self._mesh.self_id
        elif not isinstance(error, Error):
            log.error("not_made_ready", why=repr(error), exc_info=error)
        reason = str(error) or type(error).__name__
        return NotReady(PrepareFailed(self.assignment.key.epoch, reason, source, memory_bytes))
