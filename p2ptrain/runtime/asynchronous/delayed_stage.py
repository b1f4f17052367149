"""A stage in asynchronous training: each mini-batch sees the weights that `delays` prescribes.

    forward t   reads version seen(t)                backward t   adds gradients to the same leaves
    update t    to the newest weights, from any device's gradients; then version t + 1

Version t is also what a snapshot of the stage after t updates holds, whatever later forwards have
written to buffers meanwhile: so snapshots of all stages at one version are a consistent cut. All
but `version`, `torn` and `ready` belongs to the compute thread.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from torch import Tensor

from p2ptrain.errors import InternalError
from p2ptrain.job.asynchrony import WeightDelays
from p2ptrain.model.stage.finite import Broken
from p2ptrain.model.stage.mutated_state import BuffersByStep
from p2ptrain.model.stage.optimizer import StageOptimizer
from p2ptrain.model.stage.optimizer_form import PlainColumns
from p2ptrain.model.stage.program import Seed
from p2ptrain.model.stage.stage import Stage
from p2ptrain.model.stage.weight_stashing import StashedWeights
from p2ptrain.plan.types.weight_versions import Weights
from p2ptrain.recovery.version import Version
from p2ptrain.runtime.live_stage import TrainedStage


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
        generation: int,
        index: int,
        delays: WeightDelays,
        *,
        shared: bool = False,
    ) -> None:
        """Take a stage at `version` into training.

        Args:
            generation: the one that computes from now on.
            index: the stage's number.
            delays: the rule.
            shared: other devices have the stage too, and take some of the mini-batches.
        """
        super().__init__(stage, optimizer, version)
        stashes = delays.how.weights is not Weights.UNSTASHED
        self.versions = StashedWeights(stage.parameters(), version.step, stashes=stashes)
        self._generation = generation
        self._index = index
        self._delays = delays
        self._shared = shared
        self._seen: dict[int, int] = {}  # by mini-batch under way here, the version that it saw
        self._buffers = BuffersByStep(self._written())
        self._has_updated = False

    def begin(self) -> None:
        """Nothing is under way in the whole pipeline, and the next mini-batch comes now."""
        self._delays = replace(self._delays, start=self.version.step)
        self.versions.restart()
        self._buffers.forget(self.version.step)
        self._buffers.note(self.version.step - 1)

    def needed(self, step: int) -> int:
        """Updates that have been made before mini-batch `step`'s forward."""
        return self._delays.seen(self._index, step)

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
        version = self._seen.setdefault(step, self._delays.seen(self._index, step))
        parameters = self.versions.at(version)
        outputs = self.stage.forward(
            key, inputs, targets, weight=weight, seed=seed, parameters=parameters
        )
        if is_last:
            self._buffers.note(step)
        return outputs

    def gradients(self, step: int) -> list[Tensor | None]:
        """All backwards of mini-batch `step` have run here: what they give, for `update`."""
        return self.versions.gathered(self._seen.pop(step))

    def broken(self, gradients: Sequence[Tensor | None], numbers: PlainColumns) -> Broken | None:
        """What the next update, with these gradients, has or would leave not finite."""
        finite = self.finite
        norm = finite.gradient_norm(dict(zip(self.optimizer.parameters, gradients, strict=True)))
        if isinstance(norm, Broken):
            return norm
        found = finite.broken_buffer(self._buffers.after(self.version.step))
        if found is not None or finite.is_safe(norm, numbers):
            return found
        found = finite.look()
        if found is not None or finite.is_safe(norm, numbers):
            return found
        self.versions.give(gradients)
        return finite.tried(numbers)

    def update(self, gradients: Sequence[Tensor | None], numbers: PlainColumns) -> None:
        """Apply the next mini-batch's gradients, wherever they come from.

        Raises:
            RuntimeError, MemoryError: there is no memory for it; unless `torn`, it is as it was.
        """
        step = self.version.step
        self.versions.give(gradients)
        if not self._has_updated:
            self.optimizer.reserve()
        self.versions.make_room(self._wanted(step + 1))
        with self._whole_or_torn():
            self.optimizer.step(numbers)
            self.optimizer.zero_grad()
            self.versions.updated()
            averaged = self._delays.averaged(self._index, step + 1)
            if averaged:
                self.versions.average(averaged)
            self._buffers.forget(step)
        self.version = Version(step + 1, self._generation)
        self._has_updated = True

    def check_step(self, step: int) -> None:
        """Raises InternalError: it is not mini-batch `step`'s turn to be applied."""
        if step != self.version.step:
            raise InternalError(f"update {step} at {self.version}")

    def _wanted(self, updates: int) -> Collection[int]:
        """Versions that something still uses after so many updates.

        Where devices take turns none makes an update that its next forward must not see, so that
        no forward to come needs an older version than the newest.
        """
        if self._shared:
            return self._seen.values()
        return range(self._delays.oldest(self._index, updates), updates)

    def _written_before(self) -> Mapping[str, Tensor]:
        return self._buffers.after(self.version.step - 1)
