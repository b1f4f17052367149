"""One job from beginning to end, on the device that holds the data.

capture, wait for members --> a plan from the coordinator --> rounds --> weights home
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from time import monotonic

from torch import Tensor

from p2ptrain.errors import (
    DeviceLost,
    OptionError,
    PeerError,
    ProtocolError,
    TrainingError,
)
from p2ptrain.logs import get_logger, timed
from p2ptrain.mesh.interface import MemberState, Mesh
from p2ptrain.model.optimizer import optimizer_state_ratio
from p2ptrain.net.message import Message, PartKind
from p2ptrain.observe.events import Done, Event, Failure, Warned
from p2ptrain.training.allocator import trim_heap
from p2ptrain.training.background import in_background
from p2ptrain.training.checkpoint import save_weights
from p2ptrain.training.checkpointer import Cadence, Checkpointer, split_state
from p2ptrain.training.holder_epoch import Finding, HolderEpoch, LossNotFinite, OutOfMemory
from p2ptrain.training.household_plan import less_memory
from p2ptrain.training.job import Job
from p2ptrain.training.options import TrainOptions
from p2ptrain.training.plan_request import PlanningAnswer, PlanningRequest
from p2ptrain.training.planning import (
    plan_event,
    request_plan,
    settle,
    survey_links,
    wait_for_members,
)
from p2ptrain.training.preparation import Prepared, prepare
from p2ptrain.training.privacy import private_units
from p2ptrain.training.protocol import END, FETCH_MODEL, text
from p2ptrain.training.rounds import Course
from p2ptrain.training.scope import task_scope
from p2ptrain.training.service import TrainingService
from p2ptrain.training.state_check import state_check
from p2ptrain.training.state_transfer import INITIAL
from p2ptrain.training.training_loop import TrainingLoop

log = get_logger(__name__)

END_TIMEOUT_SECONDS = 2.0
VERDICT_SECONDS = 3.0
REACHABLE = (MemberState.ALIVE, MemberState.SUSPECT)


class HolderRun:
    """Trains one job. Create it, then `run` once."""

    def __init__(
        self,
        mesh: Mesh,
        service: TrainingService,
        job: Job,
        options: TrainOptions,
        emit: Callable[[Event], None],
    ) -> None:
        self._mesh = mesh
        self._service = service
        self._job = job
        self._options = options
        self._emit = emit
        self._id = secrets.token_hex(8)
        self._unwritten: TrainingError | None = None
        self._steps_done = 0

    async def run(self) -> None:
        """Train; in the end the weights are in the user's module and in `options.out`.

        Raises:
            UserError: the job, the script's data or the options have to change.
            DeviceLost: a device that held a part is gone.
            PeerError: the household could not do it.
        """
        self._check_free()
        reason = "the training has ended"
        try:
            prepared = await self._prepare()
            self._offer(prepared)
            await self._train(prepared)
        except BaseException as error:
            reason = str(error) or type(error).__name__
            if isinstance(error, DeviceLost):
                self._emit(Failure(error.name))
            raise
        finally:
            self._service.states.withdraw(self._id)
            self._mesh.unroute(FETCH_MODEL)
            await self._let_go(reason)
            await self._service.drop("the job is over", self._id)

    # -- before ----------------------------------------------------------------------------------

    def _check_free(self) -> None:
        holder = self._service.holder_name
        if holder is not None:
            raise OptionError(
                f"this device has a part in the job of {holder}: wait until it has ended"
            )

    async def _prepare(self) -> Prepared:
        """Export the model while the household gathers and measures its links."""
        with timed(log, "captured_and_gathered"):
            async with task_scope() as group:
                capturing = in_background(lambda: prepare(self._job, self._options))
                prepared = group.create_task(capturing)
                group.create_task(self._gather_household())
        return prepared.result()

    async def _gather_household(self) -> None:
        if self._options.local:
            return
        with timed(log, "members_gathered"):
            await wait_for_members(
                self._mesh, self._options.wait_for, self._options.wait_timeout_seconds
            )
            if self._options.wait_for == 1:
                await settle(self._mesh)
        with timed(log, "links_surveyed"):
            await survey_links(self._mesh)

    def _offer(self, prepared: Prepared) -> None:
        """Let the others fetch the model and its weights."""
        description = prepared.captured.description
        model = description.to_bytes()
        self._service.know_model(description)
        self._service.states.offer(self._id, INITIAL, prepared.slice_state)
        self._mesh.route(FETCH_MODEL, partial(self._send_model, description.digest, model))

    async def _plan(self, request: PlanningRequest, prepared: Prepared) -> PlanningAnswer:
        with timed(log, "plan_answered"):
            answer = await request_plan(self._mesh, request, self._let_go)
        if answer.assignment.key.job != self._id:
            raise ProtocolError("the coordinator answered for another job")
        reason = "failure" if request.memory_bytes else "start"
        event = plan_event(answer, prepared.captured.description, reason)
        self._emit(event)
        for change in event.changes_results:
            self._emit(Warned(f"this plan divides micro-batches, which changes results: {change}"))
        return answer

    async def _send_model(self, digest: str, model: bytes, peer: str, message: Message) -> Message:
        if text(message.fields, "digest", 64) != digest:
            raise ProtocolError("this device holds another model")
        return Message(FETCH_MODEL, {}, (memoryview(model),), (PartKind.WEIGHT,))

    def _request(self, prepared: Prepared) -> PlanningRequest:
        job, description = self._job, prepared.captured.description
        private = private_units(description) if self._options.private else (0, 0)
        return PlanningRequest(
            job=self._id,
            digest=description.digest,
            model=type(job.model).__name__,
            input_bytes=prepared.input_bytes,
            target_bytes=prepared.target_bytes,
            optimizer_state_ratio=optimizer_state_ratio(job.optimizer),
            batch_size=job.batch_size,
            micro_batch=job.micro_batch or 0,
            least_piece=prepared.least_piece,
            planner=self._options.planner,
            private_first=private[0],
            private_last=private[1],
            optimizer=job.optimizer.to_fields(),
            seed=job.seed,
            clip=job.clip_grad_norm is not None,
            first_step=prepared.first_step,
            epoch=0,
            alone=self._options.local,
            sharing=prepared.sharing,
            memory_bytes={},
            wire=self._options.wire,
        )

    # -- while -----------------------------------------------------------------------------------

    async def _train(self, prepared: Prepared) -> None:
        """By a first plan, or by one after it for devices that have less memory than they said.

        Whoever holds too much notices in the first round, when no update is made yet: all begin
        again with the first weights.
        """
        request = self._request(prepared)
        while True:
            answer = await self._plan(request, prepared)
            try:
                return await self._train_by(answer, prepared)
            except OutOfMemory as error:
                if self._steps_done > prepared.first_step:
                    raise TrainingError(
                        f"{error} after step {self._steps_done}: free some there, offer less of it "
                        "with --memory, or use a smaller --micro-batch"
                    ) from error
                request = _with_less_memory(request, answer, error)
                self._emit(Warned(f"{error} in the first round: planning with what it has"))
            await self._let_go("a plan needs more memory than there is")

    async def _train_by(self, answer: PlanningAnswer, prepared: Prepared) -> None:
        check = state_check(prepared.captured.description, self._job.optimizer)
        epoch = HolderEpoch(answer.assignment, prepared.captured.description, self._service, check)
        started = monotonic()
        try:
            steps = await self._run_rounds(prepared, epoch)
            await self._bring_home(prepared, epoch)
            self._finish(prepared, steps, monotonic() - started)
        except LossNotFinite as error:
            raise TrainingError(await self._diagnosis(prepared, epoch, error)) from None
        except DeviceLost:
            raise
        except PeerError as error:
            raise await epoch.verdict(VERDICT_SECONDS) or error from error
        finally:
            epoch.close()

    async def _run_rounds(self, prepared: Prepared, epoch: HolderEpoch) -> int:
        """Returns the number of updates made by this run."""
        job = self._job
        course = Course(
            steps_per_epoch=job.steps_per_epoch,
            steps=prepared.steps,
            batch_size=job.batch_size,
            micro_batch=epoch.assignment.micro_batch,
            eval_samples=len(prepared.evaluation) if prepared.evaluation else 0,
        )
        if job.clip_grad_norm is not None:
            epoch.clip_to(job.clip_grad_norm)
        checkpointer = self._checkpointer(prepared, epoch)
        loop = TrainingLoop(prepared, course, epoch, checkpointer, self._emit)
        try:
            await loop.run()
        finally:
            self._steps_done = loop.steps_done
        self._unwritten = checkpointer.failure if checkpointer else None
        return loop.steps_done - prepared.first_step

    def _checkpointer(self, prepared: Prepared, epoch: HolderEpoch) -> Checkpointer | None:
        folder = self._options.checkpoint
        if folder is None:
            return None
        return Checkpointer(
            folder,
            Cadence(self._options.checkpoint_every, monotonic()),
            lambda step: epoch.gather(f"snapshot:{step}"),
            prepared.progress,
            lambda failure: self._emit(Warned(str(failure))),
        )

    # -- after -----------------------------------------------------------------------------------

    async def _let_go(self, reason: str) -> None:
        """Free every member, also those that an abandoned plan had made ready.

        Who is out of reach now notices when this device leaves, or starts another job.
        """
        message = Message(END, {"job": self._id, "reason": reason[:1000]})
        members = [m.id for m in self._mesh.members.values() if m.state in REACHABLE]
        try:
            async with asyncio.timeout(END_TIMEOUT_SECONDS):
                await asyncio.gather(*(self._tell(member, message) for member in members))
        except TimeoutError:
            log.info("end_not_delivered", reason=reason)

    async def _tell(self, member: str, message: Message) -> None:
        try:
            await self._mesh.send(member, message)
        except PeerError as error:
            log.info("end_not_delivered", member=member[:12], why=str(error))

    async def _bring_home(self, prepared: Prepared, epoch: HolderEpoch) -> None:
        def load(state: Mapping[str, Tensor]) -> None:
            model, _ = split_state(state)
            prepared.captured.load_state(model)

        trim_heap()
        await epoch.bring_home(load)

    def _finish(self, prepared: Prepared, steps: int, seconds: float) -> None:
        out = self._options.out
        if out is not None:
            save_weights(out, self._job.model.state_dict())
        if self._unwritten is not None:
            raise self._unwritten
        rate = steps * self._job.batch_size / seconds
        self._emit(Done(prepared.steps, seconds, rate, str(out) if out else None))

    async def _diagnosis(self, prepared: Prepared, epoch: HolderEpoch, error: LossNotFinite) -> str:
        finding = await epoch.diagnose(error.micro_batch)
        return f"{error}{_where(prepared, finding, error.micro_batch)}"


def _with_less_memory(
    request: PlanningRequest, answer: PlanningAnswer, error: OutOfMemory
) -> PlanningRequest:
    """`request` for after a device ran out of memory with the plan of `answer`.

    It gets less than that plan asked of it, whatever it believes to have, so that plans do not
    follow one another for ever.
    """
    asked = answer.plan["predicted"]["peak_bytes"][error.name]
    most = min(error.memory_bytes, less_memory(asked))
    return replace(
        request,
        memory_bytes={**request.memory_bytes, error.device: most},
        epoch=answer.assignment.key.epoch,
    )


def _where(prepared: Prepared, finding: Finding | None, micro_batch: int) -> str:
    """Where values stopped being finite, as far as is known, and what to do."""
    advice = "lower the learning rate, clip the gradients, or look at that unit's input"
    if finding is None:
        return f"; {advice}"
    units = prepared.captured.description.units
    if finding.unit is None:
        return (
            f"; the input data of its micro-batch {micro_batch} is not finite already where "
            f"{finding.device} gives it to unit {units[0].name}; look at the samples"
        )
    where = f"unit {units[finding.unit].name} on {finding.device}"
    if finding.parameters:
        return f"; the weights of {where} had stopped being finite by an earlier update; {advice}"
    return f"; values first stopped being finite in {where}; {advice}"
