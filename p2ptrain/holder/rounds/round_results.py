"""What the stages report to the holder, collected round by round: the shell of `recovery.commit`.

A round is complete when every device has reported it for every stage it holds. The first failure of
a stage or a device ends every wait: only a new plan helps then.

Clipping by the global norm: torch.nn.utils.clip_grad_norm_ takes the norm of the vector of the
tensors' norms, in the order of `model.parameters()`. So each stage sends the norms of its tensors,
not partial sums, and the coefficient is bit-identical to that of one device.

Where a micro-batch stopped being finite is asked stage by stage, of all devices of a stage at once:
a device of a group may wait, in the thread that would look, for a reduction of one that failed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor

from p2ptrain.aio.tasks import task_scope
from p2ptrain.errors import Error, ProtocolError
from p2ptrain.logs import get_logger
from p2ptrain.messages.assignment import StageAssignment
from p2ptrain.messages.findings import NonFiniteFinding
from p2ptrain.messages.round_orders import RoundReport
from p2ptrain.model.stage import cross_stage_gradients
from p2ptrain.recovery.commit import CommitTracker, Seat


@dataclass(slots=True)
class _RoundReports:
    """Reports of one round, and who waits for the last of them."""

    reports: dict[Seat, RoundReport] = field(default_factory=dict)
    complete: asyncio.Event = field(default_factory=asyncio.Event)


class RoundTracker:
    """Gathers reports of these `seats`. One reader, which takes the rounds in order.

    Attributes:
        heard: reports so far.
    """

    def __init__(self, seats: Collection[Seat]) -> None:
        self._committing = CommitTracker(seats)
        self._rounds: dict[int, _RoundReports] = {}
        self.heard = 0
        self._failure: BaseException | None = None
        self._failed = asyncio.Event()

    def expect(self, round_index: int) -> None:
        """A round is ordered."""
        self._committing.order(round_index)
        self._rounds[round_index] = _RoundReports()

    @property
    def waits_for(self) -> frozenset[str]:
        """Devices that have not finished the oldest round ordered; none where there is none."""
        return frozenset(device for _, device in self._committing.missing)

    def report(self, seat: Seat, report: RoundReport) -> None:
        """A device has finished a round of its stage.

        Raises:
            ProtocolError: it has no such stage, or it reported before, or it was not asked.
        """
        self.heard += 1
        is_over = self._committing.done(seat, report.round)
        gathering = self._rounds[report.round]
        gathering.reports[seat] = report
        if is_over:
            gathering.complete.set()

    def fail(self, error: BaseException) -> None:
        """End all waits with `error`; later failures are consequences and ignored."""
        if self._failure is None:
            self._failure = error
            self._failed.set()

    async def failed(self) -> None:
        """Wait for the first failure and raise it."""
        await self._failed.wait()
        assert self._failure is not None
        raise self._failure

    async def complete(self, round_index: int) -> Mapping[Seat, RoundReport]:
        """Wait for all reports of a round that was ordered, and forget them."""
        await self._rounds[round_index].complete.wait()
        return self._rounds.pop(round_index).reports


class NormGatherer:
    """Norms of one round after the other.

    Args:
        order: every trainable parameter's canonical name, in the model's order.
        names: stage -> the names whose norms it sends, in its order.
        dtypes: name -> dtype of its gradient.
        max_norm: the job's `clip_grad_norm`.

    Attributes:
        norm: of all gradients together, of the last round whose norms are all here.
    """

    def __init__(
        self,
        order: Sequence[str],
        names: Sequence[Sequence[str]],
        dtypes: dict[str, torch.dtype],
        max_norm: float,
    ) -> None:
        self._order = order
        self._names = names
        self._dtypes = dtypes
        self._max_norm = max_norm
        self._norms: dict[str, Tensor] = {}
        self._reported = 0
        self.norm: float | None = None

    def add(self, stage: int, first: int, norms: Sequence[Any]) -> Tensor | None:
        """Some of a stage's norms (None: no gradient); the coefficient once all are here.

        Raises:
            ProtocolError: more norms than that stage has parameters, or not numbers.
        """
        names = self._names[stage] if 0 <= stage < len(self._names) else ()
        if first < 0 or first + len(norms) > len(names):
            raise ProtocolError(f"stage {stage} sent norms of parameters it does not have")
        for name, norm in zip(names[first : first + len(norms)], norms, strict=False):
            if norm is not None:
                if not isinstance(norm, float):
                    raise ProtocolError("a norm is a number")
                self._norms[name] = torch.tensor(norm, dtype=self._dtypes[name])
        self._reported += len(norms)
        if self._reported < sum(len(names) for names in self._names):
            return None
        return self._coefficient()

    def _coefficient(self) -> Tensor:
        norms = [self._norms[name] for name in self._order if name in self._norms]
        self._norms, self._reported = {}, 0
        if not norms:
            self.norm = 0.0
            return torch.tensor(1.0)
        self.norm = cross_stage_gradients.total_norm(norms).item()
        return cross_stage_gradients.clip_coefficient(norms, self._max_norm)


log = get_logger(__name__)

Ask: TypeAlias = Callable[[int, str], Awaitable[NonFiniteFinding | None]]
"""Stage and device -> what that device has found; raises Error, TimeoutError."""


async def diagnose(stages: Sequence[StageAssignment], ask: Ask) -> NonFiniteFinding | None:
    """The first unit whose values are not finite, if a device still knows: one of its stage's."""
    for index, place in enumerate(stages):
        async with task_scope() as scope:
            asked = [scope.create_task(_asked(index, device, ask)) for device in place.devices]
            found = None
            for answer in asyncio.as_completed(asked):
                if (found := await answer) is not None:
                    break
            for task in asked:
                task.cancel()
        if found is not None:
            return found
    return None


async def _asked(index: int, device: str, ask: Ask) -> NonFiniteFinding | None:
    """None also where it does not answer: the loss is reported all the same."""
    try:
        return await ask(index, device)
    except (Error, TimeoutError) as error:
        log.info("not_diagnosed", device=device[:12], why=str(error) or "it took too long")
        return None


DIVERGED = 4.0
"""Times a loss is as far from zero as the first one, where it is far above it."""

DIVERGED_STEPS = 4
"""In a row: a single mini-batch says little."""


class LossWatch:
    """Notices, once, that the loss of an asynchronous training stays far above the first one.

    Args:
        depth: mini-batches under way; with one all weights are as new as in rounds.
    """

    def __init__(self, depth: int) -> None:
        self._is_over = depth < 2
        self._first: float | None = None
        self._above = 0

    def note(self, step: int, loss: float) -> str | None:
        """The next loss; returns what to say to the user."""
        first = self._first = loss if self._first is None else self._first
        self._above = self._above + 1 if loss > first + (DIVERGED - 1) * abs(first) else 0
        if self._is_over or self._above < DIVERGED_STEPS:
            return None
        self._is_over = True
        return (
            f"the loss is {loss:.4g} at step {step}, and was {first:.4g} at first: updates by "
            "older weights (--mode async) may diverge. Try a smaller learning rate, or --mode sync"
        )
