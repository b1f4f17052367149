"""A stage in asynchronous training: each mini-batch sees the weights that `delays` prescribes.

    forward t   reads version seen(t)                backward t   adds gradients to the same leaves
    update t    to the newest weights, from any device's gradients; then version t + 1

Version t is also what a snapshot of the stage after t updates holds, whatever later forwards have
written to buffers meanwhile: so snapshots of all stages at one version are a consistent cut. All
but `version`, `torn` and `ready` belongs to the compute thread.

Its parameters are kept at several versions at once, those that mini-batches in flight have seen
(`StashedWeights`):

    version 4   w4 ──┐            forward of a mini-batch: leaves of one version, not the newest's
    version 5   w5 ──┤ leaves     own parameters; gradients gather in them
    version 6   w6 ──┘ = the memory of the stage's own parameters, which the optimizer changes

Weight stashing as in PipeDream (SOSP 2019, section 3.3). A tensor is copied only when an update is
about to change it while an older version of it is still in use: what no update changes exists once.
Memory of versions that are no longer in use is used again.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from p2ptrain.errors import InternalError
from p2ptrain.job.asynchrony import WeightDelays
from p2ptrain.model.stage.finite import Broken
from p2ptrain.model.stage.mutated_state import BuffersByStep
from p2ptrain.model.stage.optimizer import StageOptimizer
from p2ptrain.model.stage.optimizer_form import PlainColumns
from p2ptrain.model.stage.program import Seed
from p2ptrain.model.stage.stage import Stage
from p2ptrain.model.wire.tensor_codec import copy_into
from p2ptrain.plan.types.weight_versions import Weights
from p2ptrain.recovery.version import Version
from p2ptrain.runtime.live_stage import TrainedStage


class StashedWeights:
    """See the module. Not thread-safe.

    Attributes:
        newest: number of the version that the stage's own parameters are.
    """

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], newest: int, *, stashes: bool = True
    ) -> None:
        """Keep versions of a stage's parameters.

        Args:
            parameters: the stage's own, by name; frozen ones have no versions.
            newest: number of what they are now.
            stashes: False keeps none: updates change what mini-batches under way have seen.
        """
        self.newest = newest
        self._own = {name: p for name, p in parameters.items() if p.requires_grad}
        self._stashes = stashes
        self._kept: dict[int, dict[str, nn.Parameter]] = {newest: self._leaves()}
        self._spare: dict[str, Tensor] = {}  # memory of versions that were forgotten
        self._wanted: frozenset[int] = frozenset()  # after the update under way

    @property
    def kept(self) -> tuple[int, ...]:
        """Numbers of the versions that are here, ascending."""
        return tuple(self._kept)

    @property
    def nbytes(self) -> int:
        """Memory of all versions, the newest included, each tensor's counted once."""
        leaves = [leaf for version in self._kept.values() for leaf in version.values()]
        found = {leaf.data_ptr(): leaf.nbytes for leaf in (*leaves, *self._spare.values())}
        return sum(found.values())

    def at(self, version: int) -> Mapping[str, nn.Parameter]:
        """The leaves of a version: what a forward reads, and where its backward adds gradients."""
        if not self._stashes:
            return self._kept[self.newest]
        if version not in self._kept:
            raise InternalError(f"version {version} is not among {self.kept}")
        return self._kept[version]

    def restart(self) -> None:
        """Nothing is under way: only the newest version is wanted."""
        self._forget_but({self.newest})

    def gathered(self, version: int) -> list[Tensor | None]:
        """Take the gradients that backwards with `version` have made, parameter by parameter."""
        gradients: list[Tensor | None] = []
        for leaf in self.at(version).values():
            gradients.append(leaf.grad)
            leaf.grad = None
        return gradients

    def give(self, gradients: Sequence[Tensor | None]) -> None:
        """Have the stage's own parameters take them, in the same order, for the next update."""
        for parameter, gradient in zip(self._own.values(), gradients, strict=True):
            parameter.grad = gradient

    def make_room(self, wanted: Collection[int]) -> None:
        """An update of what has a gradient is about to be made.

        Args:
            wanted: versions that something will still use after it; the others go.

        Raises:
            RuntimeError, MemoryError: there is no memory for one more version. Nothing is lost.
        """
        self._wanted = frozenset(wanted)
        self._forget_but({*self._wanted, self.newest})
        if not self._stashes or self.newest not in self._wanted:
            return
        for name, parameter in self._own.items():
            if parameter.grad is not None:
                parameter.data = copy_into(self._spare.get(name), parameter)
                self._spare.pop(name, None)

    def updated(self) -> None:
        """The update is made: the stage's own parameters are the next version."""
        before, self.newest = self.newest, self.newest + 1
        self._kept[self.newest] = self._leaves() if self._stashes else self._kept[before]
        self._forget_but({*self._wanted, self.newest})

    def average(self, versions: Sequence[int]) -> None:
        """Make the newest version the mean of these: added oldest first, divided by their number.

        A tensor that is the same in all of them stays to the bit.
        """
        with torch.no_grad():
            for name, own in self._own.items():
                parts = [self._kept[version][name] for version in versions]
                if all(part.data_ptr() == parts[0].data_ptr() for part in parts):
                    continue
                total = copy_into(None, parts[0])
                for part in parts[1:]:
                    total.add_(part)
                own.data.copy_(total.div_(len(parts)))

    def _leaves(self) -> dict[str, nn.Parameter]:
        """Of the stage's own parameters as they are: their memory, not their history.

        `.data` shares no version counter, so that autograd does not mind an update in place where
        that is wanted (`stashes`).
        """
        return {name: nn.Parameter(parameter.data) for name, parameter in self._own.items()}

    def _forget_but(self, wanted: Collection[int]) -> None:
        gone = [self._kept.pop(version) for version in self.kept if version not in wanted]
        used = {parameter.data_ptr() for parameter in self._own.values()}
        used |= {leaf.data_ptr() for version in self._kept.values() for leaf in version.values()}
        for version in gone:
            for name, leaf in version.items():
                if leaf.data_ptr() not in used:
                    self._spare[name] = leaf.data


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
