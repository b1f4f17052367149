"""An update that is not finite: the holder finds who caused it and how the job ends.

not finite at step t ──► devices report what they saw ──► a plan again, of t - 1 steps
  ──► its weights are fetched ──► the holder computes round t itself, unit by unit
        not finite here either: the model or the data. The state is written, the job ends
        finite here: a device has sent what the model does not compute. It is left out
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from p2ptrain.errors import TrainingError
from p2ptrain.holder.rounds.generation import HolderGeneration, SentWrong
from p2ptrain.holder.start.prepared_job import PreparedJob
from p2ptrain.job.rounds import Round
from p2ptrain.logs import get_logger
from p2ptrain.messages.assignment import Assignment, StageAssignment
from p2ptrain.messages.findings import NonFiniteFinding, advice, describe_finding
from p2ptrain.model.stage.round_replay import Origin, Replay, ReplayBatch
from p2ptrain.plan.types.allocation import Allocation
from p2ptrain.runtime.io.arrival_norms import ArrivalComparison, StageArrival
from p2ptrain.runtime.io.sample_division import SampleDivision
from p2ptrain.runtime.not_finite import MicroBatchNotFinite

log = get_logger(__name__)

MODEST = 1e15
"""Weights, gradients and their product with the learning rate no larger make finite updates."""

MAX_TIMES = 5
"""Updates that were not finite and whose step was then made without some device, in one job."""


@dataclass(frozen=True, slots=True)
class Spoiled:
    """What is known of an update that is not finite.

    Attributes:
        shape: of its round.
        names: of the plan's devices, by id.
        found: what devices could still report.
        arrivals: what they had noted.
    """

    error: MicroBatchNotFinite
    shape: Round
    assignment: Assignment
    names: Mapping[str, str]
    found: NonFiniteFinding | None
    arrivals: Sequence[StageArrival]

    @property
    def good_steps(self) -> int:
        """Updates before it."""
        return self.error.step - 1

    def suspects(self, holder: str) -> tuple[str, ...]:
        """Who may have spoiled it unseen: those of a group, else all others."""
        places = self.assignment.stages
        grouped = [place for place in places if len(place.devices) > 1] or places
        devices = dict.fromkeys(device for place in grouped for device in place.devices)
        return tuple(device for device in devices if device != holder)

    def ending(self, units: Sequence[str], origin: Origin | None, order: Sequence[str]) -> str:
        """The message for the user.

        Args:
            units: names of the model's.
            origin: what doing the round again has shown.
            order: what each sample of the round is called.
        """
        error, asynchronous = self.error, self.assignment.asynchrony is not None
        found, number = self.found, error.micro_batch or 0
        if origin is None and error.is_update:
            return f"{error}. {advice(asynchronous=asynchronous)}"
        if origin is not None:
            found, number = self._found_at(origin, order), origin.micro_batch
        where = origin is not None
        text = describe_finding(found, units, number, where=where, asynchronous=asynchronous)
        return f"{error}{text}"

    def _found_at(self, origin: Origin, order: Sequence[str]) -> NonFiniteFinding:
        if origin.unit is None and origin.row is None:
            return NonFiniteFinding((self.names[self._at(0, origin)[0]],), 0, 0, None, False)
        unit = origin.unit or 0
        stage = next(i for i, p in enumerate(self.assignment.stages) if p.first <= unit < p.end)
        place = self.assignment.stages[stage]
        return NonFiniteFinding(
            tuple(self.names[device] for device in self._at(stage, origin)),
            stage,
            place.first,
            origin.unit,
            origin.is_weight,
            tiled=place.tiling is not None,
            backward=origin.backward,
            sample=None if origin.row is None else self._sample(origin, order),
            parameter=None if origin.is_weight else origin.parameter,
        )

    def _sample(self, origin: Origin, order: Sequence[str]) -> str:
        assert origin.row is not None
        return order[origin.micro_batch * self.shape.micro_batch + origin.row]

    def _at(self, stage: int, origin: Origin) -> tuple[str, ...]:
        """Who computes it."""
        seen = self.found
        if origin.unit is None and seen is not None and not seen.stage and seen.unit is None:
            return tuple(i for i in self.names if self.names[i] in seen.devices)
        place: StageAssignment = self.assignment.stages[stage]
        number = origin.micro_batch + self.shape.first
        if place.allocation is Allocation.TILES:
            return place.devices
        parts = SampleDivision(place).slices(number, self.shape.size(number))
        row = origin.row
        return tuple(p.device for p in parts if row is None or p.first <= row < p.end)


@dataclass(frozen=True, slots=True)
class SpoiledVerdict:
    """Whose doing it is.

    Attributes:
        message: what the job ends with.
        liar: id of a device that has sent what the model does not compute; the job continues.
        is_of_others: it is finite where this device does it alone: some other one has spoiled it.
    """

    message: str
    liar: str | None = None
    is_of_others: bool = False


async def noted(generation: HolderGeneration, error: MicroBatchNotFinite, shape: Round) -> Spoiled:
    """Ask the devices while they still know."""
    found = (
        None
        if error.micro_batch_number is None
        else await generation.diagnose(error.micro_batch_number)
    )
    arrivals = await generation.arrived(shape.index)
    names = {device: generation.name(device) for device in generation.assignment.devices}
    return Spoiled(error, shape, generation.assignment, names, found, arrivals)


def judged(
    prepared: PreparedJob, spoiled: Spoiled, state: Mapping[str, Tensor] | None
) -> SpoiledVerdict:
    """Do the round again. For a thread of its own.

    Args:
        state: all weights before the round; None: there is no memory for them here.
    """
    captured, shape = prepared.captured, spoiled.shape
    units = [unit.name for unit in captured.description.units]
    order = prepared.batches.batch(shape.step).sample_names()
    if state is None:
        return SpoiledVerdict(spoiled.ending(units, None, order))
    comparison = ArrivalComparison(spoiled.assignment, captured.description, spoiled.arrivals)
    first = shape.first
    replay = Replay(
        captured.description,
        state,
        prepared.job.seed,
        shape.step,
        lambda border, backward, number, values: comparison.crossed(
            border, backward, number + first, values
        ),
        hashes=spoiled.assignment.hashes,
        scale=0.0 if prepared.loss_scale is None else prepared.loss_scale.of(shape.step),
    )
    for loaded in prepared.loader().now([shape]):
        piece = loaded.feed.piece
        weights = loaded.feed.weights
        weight = piece.size / shape.samples if weights is None else weights.whole
        batch = ReplayBatch(loaded.feed.inputs, loaded.feed.targets, weight)
        origin = replay.find(piece.key.micro_batch - first, batch)
        if origin is not None:
            return SpoiledVerdict(spoiled.ending(units, origin, order))
    log.info("finite_here", step=spoiled.error.step, wrong=comparison.wrong)
    ending = spoiled.ending(units, None, order)
    modest = replay.largest() * max(prepared.largest_rate(shape.step), 1.0) < MODEST
    is_of_others = not spoiled.error.is_update or modest
    return SpoiledVerdict(ending, comparison.wrong, is_of_others=is_of_others)


class SpoiledUpdates:
    """Of one job: the update that it is to end before, if there is one."""

    def __init__(self) -> None:
        self.now: Spoiled | None = None
        self._times = 0
        self._tried: list[str] = []  # suspects that were left out, in their order

    def steps(self, wanted: int | None) -> int | None:
        """Updates to be made in all; None = as many as the data gives."""
        if self.now is None:
            return wanted
        good = self.now.good_steps
        return good if wanted is None else min(wanted, good)

    def begin(self, spoiled: Spoiled) -> None:
        """Raises TrainingError: this has been so too often."""
        self._times += 1
        if self._times > MAX_TIMES:
            raise TrainingError(str(spoiled.error))
        if self.now is not None and self.now.good_steps <= spoiled.good_steps:
            spoiled = replace(self.now)
        self.now = spoiled

    def blame(self, spoiled: Spoiled, verdict: SpoiledVerdict, holder: str) -> None:
        """Raises SentWrong: the step is made again, without the device that has spoiled it.

        Where no device knows which of them it was, one is left out on trial. One that was left
        out when it happens again was not. Where all have been, the job ends.
        """
        names, step = spoiled.names, spoiled.error.step
        if verdict.liar is not None and verdict.liar != holder:
            self.now = None
            why = f"{names[verdict.liar]} sent values that the model cannot give, at step {step}"
            raise SentWrong(verdict.liar, why, holder)
        suspects = spoiled.suspects(holder)
        left = [device for device in suspects if device not in self._tried]
        if not verdict.is_of_others or not left:
            return
        cleared, device = frozenset(self._tried[-1:]), left[0]
        self._tried.append(device)
        self.now = None
        why = (
            f"step {step} has NaN or infinite values, but not where this device computes it alone: "
            f"{' or '.join(names[one] for one in suspects)} sends wrong values"
        )
        if len(suspects) > 1:
            why += f": continuing without {names[device]}"
        raise SentWrong(device, why, holder, cleared)
