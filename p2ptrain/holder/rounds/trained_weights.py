"""The trained weights on the device with the data: fetched, given to callbacks, written.

They are read stage by stage from the devices that have them. As long as the weights that the job
began with stand here, training can go on from those if a device dies meanwhile; so they are
overwritten last, by everything at once where there is memory for it.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

from torch import Tensor

from p2ptrain.aio.tasks import run_in_background
from p2ptrain.errors import TrainingError
from p2ptrain.holder.reports import JobReports
from p2ptrain.holder.rounds.generation import HolderGeneration
from p2ptrain.holder.snapshots.checkpointer import split_state
from p2ptrain.holder.start.prepared_job import PreparedJob
from p2ptrain.job.callbacks import SaveBest, TrainedState, WantedState
from p2ptrain.model.stage.optimizer import AVERAGE
from p2ptrain.process.host_process import trim_heap
from p2ptrain.process.memory_budget import usable_memory_bytes
from p2ptrain.recovery.version import Version
from p2ptrain.state.checkpoint_files import Checkpoint, CheckpointProgress, save
from p2ptrain.state.transfer_server import AVERAGES, STAGE, TransferServer
from p2ptrain.state.weights_files import average_path, save_elsewhere, save_weights

HOME_SHARE = 0.25
"""Of free memory, for the trained weights beside those that the job began with."""


class TrainedWeights:
    """See the module. One a job.

    Args:
        states: has those that the job began with, as long as they are as they were.
        elsewhere: where weights are written that cannot be written where they should.
    """

    def __init__(
        self,
        prepared: PreparedJob,
        states: TransferServer,
        reports: JobReports,
        elsewhere: Path | None,
    ) -> None:
        self._prepared = prepared
        self._captured = prepared.captured
        self._states = states
        self._reports = reports
        self._elsewhere = elsewhere
        self._averages: Mapping[str, Tensor] | None = None  # once they are here

    def progress(self, step: int) -> CheckpointProgress:
        """What a checkpoint of update `step` says of the job."""
        evaluated = self._reports.reported.evaluated
        return replace(self._prepared.progress(step), evaluated=evaluated)

    async def arrived(self, generation: HolderGeneration) -> dict[str, Tensor] | None:
        """All of them beside the first ones, by name; None where memory is short for that."""
        trim_heap()
        whole_bytes = sum(tensor.nbytes for tensor in self._captured.state().values())
        if whole_bytes > HOME_SHARE * usable_memory_bytes():
            return None
        found: dict[str, Tensor] = {}
        await generation.bring_home(lambda part: found.update(split_state(part)[0]))
        return found

    async def bring_home(self, generation: HolderGeneration) -> None:
        """Everything first, and then over the first weights; stage by stage where memory is
        short."""
        await self.load(generation, await self.arrived(generation))

    async def load(
        self, generation: HolderGeneration, arrived: Mapping[str, Tensor] | None
    ) -> None:
        """Into the user's module: what has arrived, or else stage by stage."""
        self._averages = await self._averages_of(generation)
        first = Version(self._prepared.first_step, 0)
        self._states.let_go(generation.assignment.key.job, first)
        if arrived is not None:
            self._captured.load_state(arrived)
            return
        await generation.bring_home(lambda part: self._captured.load_state(split_state(part)[0]))

    def take(self, point: Checkpoint) -> None:
        """Into the user's module: a job's state that is here."""
        self._captured.load_state(point.model)
        if self._prepared.job.ema is not None:
            self._averages = _averages_in(point.optimizer)

    async def _averages_of(self, generation: HolderGeneration) -> dict[str, Tensor] | None:
        """Of the weights, by name; None where none are kept."""
        if self._prepared.job.ema is None:
            return None
        found: dict[str, Tensor] = {}
        await generation.bring_home(found.update, AVERAGES)
        return _averages_in({name.removeprefix("optimizer:"): t for name, t in found.items()})

    # -- for callbacks ---------------------------------------------------------------------------

    async def save_best(self, generation: HolderGeneration, best: SaveBest) -> None:
        """Write those that the stages have now; what hinders it is a warning."""
        state = await self.arrived(generation)
        if state is None:
            self._reports.warn(
                f"this device has too little memory to write {best.path}: it is left out"
            )
            return
        if self._prepared.job.eval_with_ema:
            state |= await self._averages_of(generation) or {}
        try:
            written = self._captured.state_dict(state)
            await run_in_background(partial(save_weights, best.path, written))
        except TrainingError as error:
            self._reports.warn(str(error))

    async def state(
        self, generation: HolderGeneration, step: int, wanted: WantedState
    ) -> TrainedState:
        """What the stages have now, after `step` updates.

        Raises:
            TrainingError: this device has too little memory for it.
        """
        if wanted is WantedState.ALL:
            checkpoint = await self.checkpoint(generation, step)

            def write(folder: Path) -> None:
                save(folder, checkpoint)

            return TrainedState(step, self._captured.state_dict(checkpoint.model), write)
        model = await self.arrived(generation)
        if model is None:
            raise TrainingError(
                "this device has too little memory for the weights that a callback works with: "
                "free some, or evaluate and save less often"
            )
        return TrainedState(step, self._captured.state_dict(model), None)

    async def checkpoint(self, generation: HolderGeneration, step: int) -> Checkpoint:
        """All that the stages have now, after `step` updates."""
        return Checkpoint(self.progress(step), *split_state(await generation.gather(STAGE)))

    # -- in a file -------------------------------------------------------------------------------

    def write(self, out: Path) -> None:
        """Write those of the user's module, elsewhere where they cannot be written there.

        Raises:
            TrainingError: they could not be written there; says where they are.
        """
        state = self._prepared.job.model.state_dict().items()  # extra state may be anything
        self._save(out, {name: value for name, value in state if isinstance(value, Tensor)})
        if self._averages is not None:
            self._save(average_path(out), self._captured.state_dict(self._averages))

    def _save(self, out: Path, tensors: Mapping[str, Tensor]) -> None:
        try:
            save_weights(out, tensors)
        except TrainingError as error:
            folders = self._elsewhere, Path(tempfile.gettempdir())
            place = save_elsewhere(out.name, tensors, folders)
            if place is None:
                raise
            raise TrainingError(f"{error}. They are in {place} instead") from error


def _averages_in(optimizer: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """By the names of the weights."""
    owners = ((name.rpartition("."), tensor) for name, tensor in optimizer.items())
    return {owner: tensor for (owner, _, slot), tensor in owners if slot == AVERAGE}
