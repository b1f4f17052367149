"""A stage in training on this device: its version, and the state of its next update.

    version v; the round may be given up until "apply"        version v + 1
    |-- forwards, backwards --|-- ready: gradients complete --|-- apply --|
        buffers written (copies at v kept)     (holder decides)

Optimistic: the update is made before it counts (optimizer post-validation, Qi et al. 2023,
section 4), and the next round begins:

    |-- forwards, backwards --|-- advance --|-- of the next round --|-- apply --|
                                  (copies of all that changes; the holder decides)

On an accelerator such an update is given to it before the host knows whether gradients are finite:

    |-- forwards, backwards --|-- lead: norms, update --|-- next round --|-- apply --|
                                   (norms arrive; the stage is ready)

Overlapped: the update begins before all sums of the group, and the next forward makes it:

    |-- forwards, backwards --|-- begin_update --|-- update_some, end_update --|-- apply --|
                                                  (ready as soon as all sums are there)

An update changes everything or, where it fails half-way, leaves the stage `torn`: none of it counts
then. All but `version`, `ready` and `torn` belongs to the compute thread, or to a caller that has
made sure that the thread does nothing of this stage (`ComputeThread.flush`).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property

import torch
from torch import Tensor

from p2ptrain.devices.interface import HostCopies
from p2ptrain.errors import InternalError
from p2ptrain.messages.round_orders import RoundOrder
from p2ptrain.model.stage import cross_stage_gradients
from p2ptrain.model.stage.finite import Broken, FiniteUpdates
from p2ptrain.model.stage.mutated_state import SavedBuffers, written_names
from p2ptrain.model.stage.optimizer import StageOptimizer
from p2ptrain.model.stage.stage import Stage
from p2ptrain.model.wire.tensor_codec import copy_into
from p2ptrain.recovery.commit import AS_IT_IS, LEFT_OUT, SKIPPED, Coefficient
from p2ptrain.recovery.version import Version
from p2ptrain.state.snapshot_store import Named


class TrainedStage(ABC):
    """One stage's tensors and their version, however updates come about.

    Attributes:
        version: which state they are.
        ready: what the next update makes of them, where one waits for others; None = none does.
        torn: an update has failed half-way; never while one is being made, which others may see.
        coefficient: what clipping multiplied the last update's gradients with.
        finite: looks after its updates.
    """

    def __init__(self, stage: Stage, optimizer: StageOptimizer, version: Version) -> None:
        """Take a stage at `version` into training."""
        self.stage = stage
        self.optimizer = optimizer
        self.version = version
        self.ready: Version | None = None
        self.torn = False
        self.coefficient: Coefficient | None = None
        self.finite = FiniteUpdates(optimizer, self._written())
        self._unchanging: dict[str, Tensor] = {}  # in host memory, where the stage is elsewhere

    def apply(self, coefficient: Coefficient | None) -> None:
        """Make the update that the stage is ready for; only where one can wait."""
        raise InternalError("an update without gradients")

    def present(self) -> dict[str, Tensor]:
        """Parameters, buffers and optimizer state: the tensors themselves."""
        tensors = {f"model:{name}": tensor for name, tensor in self.stage.state().items()}
        tensors |= {f"optimizer:{name}": t for name, t in self.optimizer.state().items()}
        return {name: tensor.detach() for name, tensor in tensors.items()}

    def named(self) -> dict[str, Tensor]:
        """The same as of `version`, whatever forwards since have written."""
        before = {f"model:{name}": tensor for name, tensor in self._written_before().items()}
        return self.present() | before

    def copied(self, slot: Named) -> Named:
        """Copies in host memory of what the last update gave, in that of `slot` where it fits.

        What never changes is not copied. Ask before a forward comes after an update that does not
        count yet, where it writes.
        """
        newest = self._newest()
        if not self.stage.device.is_host:
            return self._copied_out(newest, slot)
        return {
            name: copy_into(slot.get(name), tensor) if self._changes(name) else tensor
            for name, tensor in newest.items()
        }

    def on_host(self, tensors: Named) -> Named:
        """The same in host memory, where others read them: copies, where they are not there."""
        return tensors if self.stage.device.is_host else self._copied_out(tensors, {})

    def _copied_out(self, tensors: Named, slot: Named) -> Named:
        """Of what never changes, one copy for all."""
        wanted = {n: t for n, t in tensors.items() if n not in self._unchanging}
        copies = self.stage.device.copy_out(
            [*wanted.values()], [_fitting(slot.get(n), t) for n, t in wanted.items()], written=True
        )
        copies.wait()
        pairs = zip(wanted.items(), copies.tensors, strict=True)
        # torch keeps counters on the host, where they are changed in place.
        made = {n: t.clone() if c is None or c is t else c for (n, t), c in pairs}
        self._unchanging |= {n: tensor for n, tensor in made.items() if not self._changes(n)}
        here = self._unchanging | made
        return {name: here[name] for name in tensors}

    def _newest(self) -> Mapping[str, Tensor]:
        """Of the last update, whether it counts or not."""
        return self.named()

    def _changes(self, name: str) -> bool:
        """Whether a round and its update may change that tensor."""
        kind, _, rest = name.partition(":")
        return kind == "optimizer" or rest in self._changing

    @cached_property
    def _changing(self) -> frozenset[str]:
        stage = self.stage
        written = written_names(stage.description, stage.first, stage.end)
        return written | frozenset(self.optimizer.parameters)

    @contextmanager
    def _whole_or_torn(self) -> Iterator[None]:
        """What changes the tensors must be made to its end."""
        try:
            yield
        except BaseException:
            self.torn = True
            raise

    @abstractmethod
    def _written_before(self) -> Mapping[str, Tensor]:
        """What forwards have written since, as it was at `version`."""

    def _written(self) -> dict[str, Tensor]:
        """What they write; what a group writes lies beside the buffers until the update."""
        stage = self.stage
        if stage.statistics is not None:
            return {}
        state = stage.state()
        names = written_names(stage.description, stage.first, stage.end)
        return {name: state[name] for name in sorted(names)}


def _fitting(slot: Tensor | None, tensor: Tensor) -> Tensor | None:
    """The slot, if it is laid out as the tensor."""
    if slot is None or (slot.dtype, slot.shape) != (tensor.dtype, tensor.shape):
        return None
    return slot if slot.stride() == tensor.stride() else None


class LiveStage(TrainedStage):
    """One stage in synchronous rounds.

    Attributes:
        version: which state it is; changes in `apply` alone.
        ready: what `apply` makes of it; None while gradients are missing.
        is_ahead: the tensors are those of the next version already, or on the way there.
        norms: of the gradients and the buffers of an update that leads.
    """

    def __init__(
        self, stage: Stage, optimizer: StageOptimizer, version: Version, generation: int
    ) -> None:
        """Take a stage at `version` into training; `generation` computes from now on."""
        super().__init__(stage, optimizer, version)
        self.is_ahead = False
        self.norms: HostCopies | None = None
        self._generation = generation
        self._order: RoundOrder | None = None
        self._saved = SavedBuffers(self._written())
        self._before: dict[str, Tensor] = {}  # where ahead: of `version`, what updates change
        self._left: set[str] | None = None  # tensors that a begun update has not changed yet

    def save(self, micro_batches: int) -> None:
        """A round of so many micro-batches begins: keep what its forwards will write."""
        self._saved.save()
        if self.stage.statistics is not None:
            self.stage.statistics.begin(micro_batches)

    def broken(self, order: RoundOrder, summed: float | None) -> Broken | None:
        """What the round's update has or would leave not finite; all gradients are complete.

        Args:
            summed: norm of the gradients, where the sum over the group has shown it.
        """
        finite, numbers = self.finite, order.numbers
        if order.scale:
            self.optimizer.unscale(order.scale)
            summed = None  # that was of the scaled ones
        norm = finite.gradient_norm(self.optimizer.gradients()) if summed is None else summed
        if isinstance(norm, Broken):
            return norm
        if not math.isfinite(norm):
            named = finite.gradient_norm(self.optimizer.gradients())
            return named if isinstance(named, Broken) else Broken("gradient", "")
        found = finite.broken_buffer()
        if found is not None or finite.is_safe(norm, numbers):
            return found
        self.end_update()  # one that was begun: what it gives is looked at instead
        found = finite.look()
        if found is not None or self.is_ahead or finite.is_safe(norm, numbers):
            return found
        scale = min(1.0, order.clip / norm) if order.clip and norm else 1.0
        return finite.tried(numbers, scale)

    def get_ready(self, order: RoundOrder) -> None:
        """All gradients of the round are complete, sums over the group and over stages too.

        Raises:
            InternalError: some micro-batch is not finished, or it is another update's turn.
        """
        if not self.is_ahead or order is not self._order:  # else it was begun
            self._check_turn(order)
            self._order = order
        self.ready = Version(order.round.step + 1, self._generation)

    def advance(self) -> None:
        """Make the update that the stage is ready for before it counts; `named` stays as it was.

        For updates without a coefficient.

        Raises:
            RuntimeError, MemoryError: there is no memory for what it was; unless `torn`, nothing
                has changed.
        """
        self._keep_before()
        self._step(None)
        self.is_ahead = True

    def begin_update(self, order: RoundOrder) -> None:
        """Make ready to update what has its sums before all are there; `named` stays as it was.

        All backwards of the round are over. For updates without a coefficient.

        Raises:
            InternalError: they are not, or it is another update's turn.
            RuntimeError, MemoryError: there is no memory for what it was; nothing has changed.
        """
        self._check_turn(order)
        self._keep_before()
        self._order, self._left = order, set(self.optimizer.parameters)
        self.is_ahead = True

    def lead(self, order: RoundOrder) -> None:
        """Make the round's update while the norms of what it is made of are on their way.

        As `begin_update`.
        """
        self.norms = self.stage.device.copy_out(self.finite.norms(self.optimizer.gradients()))
        self.begin_update(order)
        with self._whole_or_torn():
            self.optimizer.step(order.numbers)
        self._left = set()

    def led_safely(self) -> bool:
        """Whether the norms, which have arrived, show that what `lead` gives is finite."""
        assert self._order is not None
        gradient, buffers = self._arrived_norms()
        return math.isfinite(buffers) and self.finite.is_safe(gradient, self._order.numbers)

    def broken_lead(self) -> Broken | None:
        """What of it is not finite, where they do not show that."""
        assert self._order is not None
        gradient, _ = self._arrived_norms()
        return self.broken(self._order, gradient if math.isfinite(gradient) else None)

    def _arrived_norms(self) -> tuple[float, float]:
        assert self.norms is not None
        gradient, buffers = (0.0 if n is None else n.item() for n in self.norms.tensors)
        return gradient, buffers

    def update_some(self, names: Iterable[str]) -> None:
        """Update those of these parameters that the update has not changed yet."""
        some = [name for name in names if self._left is not None and name in self._left]
        if not some:
            return
        assert self._order is not None
        assert self._left is not None
        with self._whole_or_torn():
            if self._order.counts_nothing:
                self.optimizer.zero_grad(some)
            self.optimizer.step(self._order.numbers, some)
            self.optimizer.zero_grad(some)
            self._left.difference_update(some)

    def end_update(self) -> None:
        """Make what is left of an update that was begun: all sums are there."""
        if self._left is not None:
            self.update_some(tuple(self._left))
            with self._whole_or_torn():
                self.optimizer.zero_grad()
                self._round_counts()
            self._left = None

    def _check_turn(self, order: RoundOrder) -> None:
        if self.stage.held() or self.is_ahead or order.round.step != self.version.step:
            raise InternalError(f"not ready for update {order.round.step} at {self.version}")

    def _keep_before(self) -> None:
        changing = {name: tensor for name, tensor in self.named().items() if self._changes(name)}
        if not changing:  # all of it is frozen
            return
        if self._before.keys() == changing.keys():
            torch._foreach_copy_(list(self._before.values()), [*changing.values()])
        else:  # the first update makes the optimizer's state
            slot = self._before
            self._before = {n: copy_into(slot.get(n), tensor) for n, tensor in changing.items()}

    def apply(self, coefficient: Coefficient | None) -> None:
        """Make the update that the stage is ready for, as far as that is not done; it counts.

        Where all of it is done this touches no tensor, and may be called while forwards run.
        """
        if self.ready is None:
            raise InternalError("an update without gradients")
        if coefficient == LEFT_OUT:
            self._leave_out()
        elif coefficient == SKIPPED:
            self._skip()
        elif not self.is_ahead:
            self._step(coefficient)
        self.end_update()
        self.is_ahead = False
        self.version, self.coefficient = self.ready, coefficient
        self.ready = self._order = None

    def named(self) -> dict[str, Tensor]:
        """As of `version`, whatever forwards, or an update that does not count, have written."""
        if not self.is_ahead:
            return super().named()
        unchanged = {n: tensor for n, tensor in self.present().items() if not self._changes(n)}
        return unchanged | self._before

    def _newest(self) -> Mapping[str, Tensor]:
        return self.present() if self.is_ahead else self.named()

    def _step(self, coefficient: Coefficient | None) -> None:
        assert self._order is not None
        with self._whole_or_torn():
            if coefficient is not None and coefficient != AS_IT_IS:
                cross_stage_gradients.scale_(
                    self.optimizer.gradients().values(),
                    cross_stage_gradients.to_tensor(*coefficient),
                )
            if self._order.counts_nothing:
                self.optimizer.zero_grad()
            self.optimizer.step(self._order.numbers)
            self.optimizer.zero_grad()
            self._round_counts()

    def _leave_out(self) -> None:
        """The update changes nothing, and neither do the round's forwards. Never while ahead."""
        with self._whole_or_torn():
            self.optimizer.zero_grad()
            current = self.stage.state()
            for name, before in self._saved.before().items():
                current[name].detach().copy_(before)
            self._saved.forget()

    def _skip(self) -> None:
        """The update changes no weight, and what the round's forwards wrote counts."""
        with self._whole_or_torn():
            self.optimizer.zero_grad()
            self.optimizer.skip()
            self._round_counts()

    def _round_counts(self) -> None:
        """What its forwards wrote does."""
        if self.stage.statistics is not None:
            self.stage.statistics.merge()
        self.stage.take_update()
        self._saved.forget()

    def _written_before(self) -> Mapping[str, Tensor]:
        return self._saved.before()
