"""A stage in asynchronous training: each mini-batch sees the weights that `delays` says.

    forward t   reads version seen(t)                backward t   adds gradients to the same leaves
    update t    to the newest weights, wherever the gradients come from; then version t + 1

Version t is also what a copy of the stage after t updates holds, whatever forwards of later
mini-batches have written to buffers meanwhile: so copies of all stages at one version are a
consistent cut. All but `version`, `torn` and `ready` is for the compute thread.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from p2ptrain.errors import InternalError
from p2ptrain.model.optimizer import StageOptimizer
from p2ptrain.model.program import Seed
from p2ptrain.model.stage import Stage
from p2ptrain.model.weight_versions import WeightVersions
from p2ptrain.model.written import BuffersByStep
from p2ptrain.plan.versions import Weights
from p2ptrain.training.asynchronous.delays import Asynchrony, Delays
from p2ptrain.training.live_stage import TrainedStage
from p2ptrain.training.recovery.version import Version


class DelayedStage(TrainedStage):
    """See the module.

    Attributes:
        versions: of its parameters.
    """

    def __init__(
        self,
        stage: Stage,
        optimizer: StageOptimizer,
        version: Version,
        epoch: int,
        place: tuple[int, int],
        how: Asynchrony,
    ) -> None:
        """Take a stage at `version` into training.

        Args:
            epoch: the one that computes from now on.
            place: the stage's number, and how many there are.
        """
        super().__init__(stage, optimizer, version)
        stashes = how.weights is not Weights.UNSTASHED
        self.versions = WeightVersions(stage.parameters(), version.step, stashes=stashes)
        self._epoch = epoch
        self._index, self._stages = place
        self._delays = Delays(how, self._stages, version.step)
        self._buffers = BuffersByStep(self._written())
        self._has_updated = False

    def begin(self) -> None:
        """Nothing is under way in the whole pipeline, and the next mini-batch comes now."""
        self._delays = Delays(self._delays.how, self._stages, self.version.step)
        self.versions.restart()
        self._buffers.forget(self.version.step)
        self._buffers.note(self.version.step - 1)

    def forward(
        self,
        key: int,
        step: int,
        inputs: Sequence[Tensor],
        targets: Sequence[Tensor],
        *,
        weight: float | None,
        seed: Seed,
        is_last: bool,
    ) -> list[Tensor]:
        """`Stage.forward` of one piece of mini-batch `step`, with the weights that it sees.

        Args:
            is_last: whether it is the mini-batch's last piece.
        """
        parameters = self.versions.at(self._delays.seen(self._index, step))
        outputs = self.stage.forward(
            key, inputs, targets, weight=weight, seed=seed, parameters=parameters
        )
        if is_last:
            self._buffers.note(step)
        return outputs

    def update(self, lr_factor: float) -> None:
        """All backwards of the next mini-batch have run: apply its gradients.

        Raises:
            RuntimeError, MemoryError: there is no memory for it; unless `torn`, it is as it was.
        """
        step, index = self.version.step, self._index
        self.versions.gather(self._delays.seen(index, step))
        if not self._has_updated:
            self.optimizer.reserve()
        self.versions.make_room(self._delays.oldest(index, step + 1))
        self.torn = True
        self.optimizer.step(lr_factor)
        self.optimizer.zero_grad()
        self.versions.updated()
        averaged = self._delays.averaged(index, step + 1)
        if averaged:
            self.versions.average(averaged)
        self._buffers.forget(step)
        self.version = Version(step + 1, self._epoch)
        self._has_updated = True
        self.torn = False

    def check_step(self, step: int) -> None:
        """Raises InternalError: it is not mini-batch `step`'s turn to be applied."""
        if step != self.version.step:
            raise InternalError(f"update {step} at {self.version}")

    def _written_before(self) -> Mapping[str, Tensor]:
        return self._buffers.after(self.version.step - 1)
