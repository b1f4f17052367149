"""A job that is captured and checked: everything a run needs of it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from torch import Tensor

from p2ptrain.errors import OptionError, ProtocolError
from p2ptrain.holder.input import loader_memory
from p2ptrain.holder.input.batch_layout import ReadBatch, SampleSizes
from p2ptrain.holder.input.loader import MicroBatchLoader
from p2ptrain.holder.input.micro_batch_weights import BatchCount, Slices
from p2ptrain.holder.input.mini_batches import BatchSource, EvaluationSource
from p2ptrain.holder.start.journal import FIRST_GENERATION
from p2ptrain.holder.start.loss_count import NOWHERE, Across
from p2ptrain.holder.start.model_limits import private_units, why_unshared
from p2ptrain.job.given_weights import hint_of
from p2ptrain.job.job import Job
from p2ptrain.job.rounds import LENGTHS_ROOM, Round, RoundMode
from p2ptrain.job.train_options import TrainOptions
from p2ptrain.messages.plan_request import HINT_LENGTH, JobPlanRequest, SharingLimits
from p2ptrain.model.capture.captured import Captured
from p2ptrain.model.graph.description import ModelDescription, TensorKind
from p2ptrain.model.sample_independence.class_losses import ClassLosses
from p2ptrain.model.stage.mutated_state import unchanging_names
from p2ptrain.model.stage.optimizer import (
    AVERAGE,
    optimizer_state_ratio,
    state_layout,
    trained_parameters,
)
from p2ptrain.model.stage.optimizer_form import OptimizerSpec, PlainColumns
from p2ptrain.model.tracing.python_state import Outdated
from p2ptrain.plan.types.feature_maps import MapNetwork
from p2ptrain.plan.types.profile import StateBytes
from p2ptrain.recovery.loss_scale import LossScale
from p2ptrain.state import checkpoint_files
from p2ptrain.state.checkpoint_files import Checkpoint, CheckpointProgress
from p2ptrain.state.checksums import digests_of
from p2ptrain.state.snapshot_store import as_laid_out, tensors_of_units
from p2ptrain.state.transfer_client import Known


@dataclass(frozen=True, slots=True)
class PreparedJob:
    """A job, captured and checked.

    Attributes:
        min_micro_batch: fewest samples that are measured, or that the planner chooses.
        sharing: how stages may be shared among devices.
        input_bytes, target_bytes: per sample, as the holder sends them.
        state: initial tensors by `model:` and `optimizer:` names.
        first_step: updates that the state has behind it.
        evaluated: the highest step whose evaluation was reported by the run that made the state.
        steps: most updates in all; None = as many as the data gives.
        outdated: says what model and loss read in Python that has changed since.
        compare: says how what is captured differs from the user's module on the job's first
            batches, by rounding; where by more it raises CaptureError. To be called once, by a
            thread that may compute; may take a second.
        data_samples: of the data, where it says so; else 0.
        only_rounds: why it cannot be trained without a barrier, where it may be; "" where it can.
        optimizer: what the devices build.
        maps: of the first units, where they can be cut into tiles and may be.
        warnings: for the user, about what was read.
        count: what weighs micro-batches; None = their samples do.
        unweighed: losses that may leave targets out for which `count` does not account.
        over_all: metrics that are computed over all of `eval_data`, being no means over samples.
        across: where model or loss look across samples.
        loss_scale: of a job in float16; else None.
        changes: how results differ from plain torch's on any plan; empty if not at all.
    """

    job: Job
    captured: Captured
    batches: BatchSource
    evaluation: EvaluationSource | None
    data_samples: int
    min_micro_batch: int
    sharing: SharingLimits
    input_bytes: int
    target_bytes: int
    state: Mapping[str, Tensor]
    first_step: int
    steps: int | None
    outdated: Outdated
    compare: Callable[[], tuple[str, ...]]
    optimizer: OptimizerSpec
    evaluated: int = 0
    only_rounds: str = ""
    maps: MapNetwork | None = None
    warnings: tuple[str, ...] = ()
    changes: tuple[str, ...] = ()
    over_all: frozenset[str] = frozenset()
    count: BatchCount | None = None
    unweighed: ClassLosses | None = None
    across: Across = NOWHERE
    loss_scale: LossScale | None = None

    def progress(self, step: int) -> CheckpointProgress:
        """What a checkpoint of update `step` says of the job."""
        return CheckpointProgress(
            step=step,
            digest=_weights_digest(self.captured.description),
            samples=self.data_samples,
            batch_size=self.job.batch_size,
            seed=self.job.seed,
            optimizer=self.optimizer.name,
            measured=tuple((step, metric.hex()) for step, metric in self.job.numbers.measured),
            scales=() if self.loss_scale is None else self.loss_scale.rows_at(step),
            loader=loader_memory.of_checkpoint(self.batches, step),
        )

    def why_torn(self, shape: Round) -> str:
        """Why a batch trains something else in parts, being larger than those that were looked at.

        Returns "" where it does not.
        """
        is_whole = self.job.fixed_micro_batch == self.job.batch_size
        is_parted = shape.mode is RoundMode.TRAIN and shape.micro_batches > 1
        if not (self.across.samples and is_whole and is_parted):
            return ""
        return (
            f"the mini-batch of step {shape.step + 1} has {shape.samples} samples, more than the "
            f"{shape.micro_batch} of the batches that were looked at before training, and must be "
            f"computed as a whole: {self.across.samples}. Let one of the first batches be the "
            "largest"
        )

    @property
    def optimizer_state_ratio(self) -> float:
        """Optimizer bytes per byte of a trained parameter."""
        return optimizer_state_ratio(self.optimizer, trained_parameters(self.captured.description))

    @property
    def whole_bytes(self) -> int:
        """Of one version of the whole model and its optimizer, beside the first weights here."""
        return whole_state(self.captured, self.optimizer).changing_bytes

    def plan_request(self, job_id: str, options: TrainOptions) -> JobPlanRequest:
        """What a coordinator is asked."""
        job, description = self.job, self.captured.description
        private = private_units(description) if options.private else (0, 0)
        sharing, how, rounds = self.sharing, options.asynchrony, None
        if options.mode == "auto":
            rounds = sharing
            if self.only_rounds or options.local:
                how = rounds = None
        if how is not None and not sharing.unshared:
            sharing = replace(sharing, unshared=why_unshared(how, description))
        return JobPlanRequest(
            job=job_id,
            digest=description.digest,
            model=type(job.model).__name__,
            input_bytes=self.input_bytes,
            target_bytes=self.target_bytes,
            optimizer_state_ratio=self.optimizer_state_ratio,
            batch_size=job.batch_size,
            micro_batch=job.fixed_micro_batch,
            min_micro_batch=self.min_micro_batch,
            planner=options.planner,
            private_first=private[0],
            private_last=private[1],
            optimizer=self.optimizer,
            seed=job.seed,
            clip=job.clip_grad_norm is not None,
            first_step=self.first_step,
            alone=options.local,
            sharing=sharing,
            wire=options.wire,
            replicas=options.replicas,
            checkpoints=options.reads_versions,
            asynchrony=how,
            ftpipehd=options.as_ftpipehd,
            eval_samples=0 if self.evaluation is None else self.evaluation.samples,
            least_evaluated=self.captured.evaluates.least,
            weighed=self.count is not None,
            rounds=rounds,
            longest=tuple(LENGTHS_ROOM * n for n in description.longest),
            weights="" if job.weights is None else hint_of(Path(job.weights), HINT_LENGTH),
            maps=self.maps,
            grid=options.grid,
            groups_of_units=options.groups,
            fast_math=job.fast_math,
        )

    def numbers_of(self, step: int) -> PlainColumns:
        """The optimizer's numbers that a schedule gives for update `step`, from 0."""
        return self.job.numbers.changes(step, self.batches.epochs_before(step))

    def largest_rate(self, step: int) -> float:
        """Of that update."""
        return max(map(abs, self.job.numbers.rates(self.numbers_of(step))))

    def loader(
        self,
        slices: Slices = lambda _number, size: [(0, size)],
        longest: Sequence[int] | None = None,
    ) -> MicroBatchLoader:
        """A new reader of the job's samples.

        Args:
            slices: whose weights are wanted.
            longest: lengths that the plan is made for.
        """
        data = self.captured, self.batches, self.evaluation
        return MicroBatchLoader(*data, self.count, slices, self.min_micro_batch, longest)

    def close(self) -> None:
        """Nothing of the data is read any more."""
        self.batches.close()
        if self.evaluation is not None:
            self.evaluation.close()

    def slice_state(self, first: int, end: int) -> dict[str, Tensor]:
        """The initial tensors that units [first, end) need."""
        return tensors_of_units(self.captured.description, self.state, first, end)

    def frozen(self) -> Known:
        """What no version changes, with its checksums; takes as long as reading it."""
        names = [f"model:{name}" for name in unchanging_names(self.captured.description)]
        tensors = {name: self.state[name] for name in names}
        digests = digests_of(tensors)
        return {name: (tensor, digests[name]) for name, tensor in tensors.items()}


def whole_state(captured: Captured, optimizer: OptimizerSpec) -> StateBytes:
    """How large the whole model is, buffers included, and what training adds to it."""
    tensors = captured.description.tensors
    return StateBytes(
        sum(tensor.nbytes for tensor in tensors),
        sum(tensor.nbytes for tensor in tensors if tensor.trainable),
        optimizer_state_ratio(optimizer, trained_parameters(captured.description)),
    )


def _weights_digest(description: ModelDescription) -> str:
    """SHA-256 of what the weights are called and how they are shaped.

    Not of the whole model: a resumed job may evaluate, or have another loss.
    """
    lines = [
        f"{tensor.name} {tensor.dtype} {tensor.shape}"
        for tensor in description.tensors
        if tensor.kind is not TensorKind.CONSTANT
    ]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class CapturedAgain:
    """What a job goes on with once its model is captured for sizes that differ late.

    Attributes:
        sizes: of batches that came late; each has one that those before it did not have.
        first_fingerprint: of the job as it was captured first.
        checkpoint: its state, before the batch that differs; None = an earlier process had it.
        batch: the newest of them.
        next_generation: first generation number that was never used.
    """

    sizes: tuple[SampleSizes, ...]
    first_fingerprint: str
    checkpoint: Checkpoint | None = None
    batch: ReadBatch | None = None
    next_generation: int = FIRST_GENERATION


def resumed(prepared: PreparedJob, options: TrainOptions) -> PreparedJob:
    """`prepared` with the state of the checkpoint that `options.resume` names.

    Raises:
        OptionError: there is none, or it is of another training.
    """
    assert options.resume is not None
    damages: list[str] = []
    found = checkpoint_files.load(options.resume, damages.append)
    return from_checkpoint(prepared, options, found, damages)


def from_checkpoint(
    prepared: PreparedJob, options: TrainOptions, found: Checkpoint, damages: list[str]
) -> PreparedJob:
    """`prepared` with that state.

    Args:
        damages: what is wrong with it, for the user; more is added.

    Raises:
        OptionError: it is of another training.
    """
    wanted = prepared.progress(found.progress.step)
    for field in ("digest", "samples", "batch_size", "seed", "optimizer"):
        if getattr(found.progress, field) != getattr(wanted, field):
            raise OptionError(
                f"the checkpoint in {options.resume} is of another training: its "
                f"{'model' if field == 'digest' else field} differs"
            )
    model = {f"model:{name}": tensor for name, tensor in found.model.items()}
    slots = {
        f"optimizer:{name}": tensor for name, tensor in _slots(prepared, found, options).items()
    }
    read = {name: as_laid_out(prepared.state, name, t) for name, t in {**model, **slots}.items()}
    state = {**prepared.state, **read}
    if prepared.steps is not None and found.progress.step > prepared.steps:
        raise OptionError(
            f"the checkpoint in {options.resume} is of step {found.progress.step}, and this "
            f"training ends at step {prepared.steps}: give more --steps or --epochs"
        )
    job = prepared.job
    job.numbers.begin(tuple((step, float.fromhex(m)) for step, m in found.progress.measured))
    try:
        loader_memory.from_checkpoint(prepared.batches, found.progress.loader)
    except ProtocolError as error:  # the batches are passed over
        damages.append(f"{options.resume}: {error}")
    first, evaluated = found.progress.step, found.progress.evaluated
    if prepared.loss_scale is not None:
        prepared.loss_scale.begin(first, found.progress.scales)
    if evaluated is None:  # a file that does not say: taken as reported
        evaluated = first
    return replace(
        prepared, state=state, first_step=first, evaluated=evaluated, warnings=tuple(damages)
    )


def _slots(prepared: PreparedJob, found: Checkpoint, options: TrainOptions) -> dict[str, Tensor]:
    """What the checkpoint has of the optimizer's, of the parameters that are trained now.

    Raises:
        OptionError: the optimizer's arguments have it keep something else.
    """
    spec, trained = prepared.optimizer, trained_parameters(prepared.captured.description)
    wanted = _slots_by_owner(state_layout(spec, trained, spec.group_of(list(trained))))
    for owner, there in _slots_by_owner(found.optimizer).items():
        due = wanted.get(owner, set())
        if owner not in trained or there in (due, due & {AVERAGE}):  # it may have had no gradient
            continue
        if there ^ due == {AVERAGE}:
            has, wants = ("an", "none") if AVERAGE in there else ("no", "one")
            raise OptionError(
                f"the checkpoint in {options.resume} has {has} average of the weights, and the job "
                f"keeps {wants}: give ema as it was"
            )
        more, verbs = sorted(there - wanted.get(owner, set())), ("keeps", "does not")
        if not more:
            more, verbs = sorted(wanted[owner] - there), ("keeps no", "does")
        raise OptionError(
            f"the checkpoint in {options.resume} is of another training: its optimizer {verbs[0]} "
            f"{more[0]}, which {spec.name} as given {verbs[1]}: give it the arguments that it had"
        )
    return {n: t for n, t in found.optimizer.items() if n.rpartition(".")[0] in trained}


def _slots_by_owner(names: Iterable[str]) -> dict[str, set[str]]:
    owners: dict[str, set[str]] = {}
    for name in names:
        owner, _, slot = name.rpartition(".")
        owners.setdefault(owner, set()).add(slot)
    return owners
