"""From a user's Job to everything a run needs, before any other device is asked for anything."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from p2ptrain.errors import CaptureError, OptionError, ScriptError, UserError
from p2ptrain.holder.input.batch_counts import Batch, BatchCount, Slices
from p2ptrain.holder.input.loader import MicroBatchLoader
from p2ptrain.holder.input.metrics import check_evaluation, tried_metrics
from p2ptrain.holder.input.mini_batches import (
    BatchSource,
    EvaluationSource,
    FirstBatches,
    SampleReader,
    batch_seed,
)
from p2ptrain.holder.input.open_data import (
    OpenedEvaluation,
    check_arguments,
    open_data,
    open_evaluation,
)
from p2ptrain.holder.start.first_batch import explained
from p2ptrain.holder.start.loss_count import find_count, spread
from p2ptrain.holder.start.micro_batch import (
    COMPUTED_TOGETHER,
    check_evaluation_sizes,
    check_fewest,
    min_micro_batch,
    settled,
    why_synchronous_only,
)
from p2ptrain.holder.start.model_limits import (
    Across,
    check_asynchronous,
    read_sharing,
)
from p2ptrain.job.callbacks import SaveBest
from p2ptrain.job.chosen_optimizer import optimizer_spec, optimizer_state, untrained_frozen
from p2ptrain.job.given_weights import load_weights
from p2ptrain.job.job import LOSS, Job
from p2ptrain.job.state_callback import StateCallback
from p2ptrain.job.train_options import TrainOptions
from p2ptrain.logs import get_logger, timed
from p2ptrain.messages.plan_request import SharingLimits
from p2ptrain.model.capture.capture import capture
from p2ptrain.model.capture.captured import Captured
from p2ptrain.model.capture.comparison import compare
from p2ptrain.model.capture.plain_run import ComparedBatches, PlainRun, run_plainly
from p2ptrain.model.capture.scored_module import casting
from p2ptrain.model.capture.stale_globals import Outdated
from p2ptrain.model.graph.description import ModelDescription, TensorKind
from p2ptrain.model.sample_independence.class_losses import ClassLosses
from p2ptrain.model.stage.determinism import check_default_type, randomness_lock
from p2ptrain.model.stage.mutated_state import unchanging_names
from p2ptrain.model.stage.optimizer import (
    AVERAGE,
    optimizer_state_ratio,
    slots_of,
    state_layout,
    trained_parameters,
)
from p2ptrain.model.stage.optimizer_form import OptimizerSpec, PlainColumns
from p2ptrain.plan.types.feature_maps import MapNetwork
from p2ptrain.plan.types.state_bytes import StateBytes
from p2ptrain.process.memory_budget import is_out_of_memory, usable_memory_bytes
from p2ptrain.runtime.tiled.tile_layout import tileable
from p2ptrain.state import checkpoint_files
from p2ptrain.state.checkpoint_files import Checkpoint, CheckpointProgress
from p2ptrain.state.checksums import digests_of
from p2ptrain.state.snapshot_store import as_laid_out, tensors_of_units
from p2ptrain.state.transfer_client import Known
from p2ptrain.state.weights_files import average_path, check_space, check_weights_file
from p2ptrain.tiling.kernels.split_model import cut_where_tiling_ends
from p2ptrain.tiling.kernels.tileable_operators import NotTiled
from p2ptrain.tiling.planning.make_plan import NAMES

log = get_logger(__name__)

COMPARED = ComparedBatches()
"""On which the captured model is compared with the user's own."""

_NOT_COMPARED = (
    "the captured model was not compared with the module itself: there is too little memory here "
    "for another copy of its weights and their gradients"
)


@dataclass(frozen=True, slots=True)
class PreparedJob:
    """A job, captured and checked.

    Attributes:
        least_piece: fewest samples of a micro-batch that are measured, or that the planner chooses.
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
        changes: how results differ from plain torch's on any plan; empty if not at all.
    """

    job: Job
    captured: Captured
    batches: BatchSource
    evaluation: EvaluationSource | None
    data_samples: int
    least_piece: int
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
        )

    @property
    def optimizer_state_ratio(self) -> float:
        """Optimizer bytes per byte of a trained parameter."""
        return optimizer_state_ratio(self.optimizer, trained_parameters(self.captured.description))

    def numbers_of(self, step: int) -> PlainColumns:
        """The optimizer's numbers that a schedule gives for update `step`, from 0."""
        return self.job.numbers.changes(step, self.batches.epochs_before(step))

    def largest_rate(self, step: int) -> float:
        """Of that update."""
        return max(map(abs, self.job.numbers.rates(self.numbers_of(step))))

    def loader(self, slices: Slices = lambda _number, size: [(0, size)]) -> MicroBatchLoader:
        """A new reader of the job's samples; `slices`: whose weights are wanted."""
        data = self.captured, self.batches, self.evaluation
        return MicroBatchLoader(*data, self.count, slices, self.least_piece)

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


def prepare(job: Job, options: TrainOptions) -> PreparedJob:
    """Read the first samples, export the model, and read the checkpoint to go on from.

    Runs the user's code and torch.export, for seconds: call it off the event loop.

    Raises:
        ScriptError, CaptureError, OptionError: what the user has to change.
    """
    with untrained_frozen(job.model, job.optimizer) as untrained:
        prepared = _prepare(job, options)
    if not untrained:
        return prepared
    more = f" and {len(untrained) - 3} more" if len(untrained) > 3 else ""
    why = (
        f"{', '.join(map(repr, untrained[:3]))}{more} require a gradient, and are in no group of "
        "the optimizer: they are not trained, and count as frozen"
    )
    return replace(prepared, warnings=(*prepared.warnings, why))


def _prepare(job: Job, options: TrainOptions) -> PreparedJob:
    check_default_type()
    if options.planner not in tuple(NAMES):
        known = ", ".join(sorted(NAMES))
        raise OptionError(f"unknown planner {options.planner!r} (known: {known})")
    for file in _weights_files(job, options):
        check_weights_file(file)
    if options.checkpoint is not None:
        checkpoint_files.check_folder(options.checkpoint)
    check_state_callbacks(job.callbacks, options)
    if job.weights is not None:
        load_weights(job.model, Path(job.weights))
    job.numbers.begin(())
    job.numbers.changes(0, 0)
    opened = open_data(job, randomness_lock)
    samples, order = opened.samples, opened.order
    job = opened.sized(job)
    check_arguments(job, samples)
    evaluation = None
    if job.eval_data is not None:
        evaluation = open_evaluation(job, opened, randomness_lock)
    if opened.layout is not None:
        opened.layout.settle()
    example = samples.collate([0, 1 % len(samples)], "example")
    evaluates = evaluation is not None
    first = _PlainBatches(job, samples, order, evaluation)
    with timed(log, "computed_plainly"):
        plain = first.computed(1)
    with timed(log, "exported"), _explained(job, samples, order):
        captured = capture(
            job.model,
            job.loss_function,
            example,
            evaluation=evaluates,
            autocast=job.autocast,
            varying=opened.varying,
        )
    outdated = Outdated(job.model, job.loss_function)
    if evaluates:
        check_evaluation(job.metrics, captured)
    over_all = frozenset[str]()
    looked_at = None if evaluation is None else evaluation.samples
    if looked_at is not None and len(looked_at) >= captured.evaluates.known:
        over_all = tried_metrics(job.metrics, captured, looked_at)
    only_rounds = ""
    maps = _maps(job, captured, options)
    if options.asynchrony is not None:
        try:
            check_asynchronous(job, captured.description, options)
        except OptionError as error:
            if not options.chooses_mode:
                raise
            only_rounds = str(error)
    check_evaluation_sizes(captured, looked_at)
    if job.numbers.needs_metric and job.scheduler_metric == LOSS and captured.unscored:
        raise ScriptError(
            "the scheduler is to be stepped with the loss over eval_data, which does not take what "
            f"the model returns in evaluation mode ({captured.unscored}): set scheduler_metric"
        )
    trained = trained_parameters(captured.description)
    spec = optimizer_spec(job.model, job.optimizer, job.numbers.groups, list(trained))
    spec = replace(spec, ema=job.ema)
    _check_space(spec, captured, options)
    with timed(log, "division_tried"), _explained(job, samples, order):
        found = find_count(job, captured, samples, example)
        across = found.across
    micro_batch, changed = settled(job.micro_batch, job.batch_size, across)
    job = replace(job, micro_batch=micro_batch)
    how = options.asynchrony
    least = min_micro_batch(job, captured, samples, None if options.chooses_mode else how)
    check_fewest(job, opened.batches.fewest, least)
    if how is not None and options.chooses_mode and not only_rounds:
        only_rounds = why_synchronous_only(job, least, how)
    steps = opened.steps(options.steps)
    sharing = _sharing(captured, across)
    if plain is not None and plain.steps and plain.least_samples < captured.trains.least:
        plain = first.computed(captured.trains.least)
    prepared = PreparedJob(
        job=job,
        captured=captured,
        batches=opened.batches,
        evaluation=None if evaluation is None else evaluation.batches,
        data_samples=opened.count,
        least_piece=least,
        sharing=sharing,
        input_bytes=_bytes_per_sample(captured.entering(example[0], "train")),
        target_bytes=_bytes_per_sample(captured.flatten_target(example[1])),
        state=_first_state(job, captured, spec),
        optimizer=spec,
        first_step=0,
        steps=steps,
        only_rounds=only_rounds,
        maps=maps,
        changes=(changed,) if changed else (),
        over_all=over_all,
        count=found.count,
        unweighed=found.unweighed,
        outdated=outdated,
        compare=partial(_compared, job.model, captured, plain),
    )
    return prepared if options.resume is None else _resumed(prepared, options)


def _weights_files(job: Job, options: TrainOptions) -> list[Path]:
    """That will be written."""
    files = [one.path for one in job.callbacks if isinstance(one, SaveBest)]
    if options.out is not None:
        files += [options.out] if job.ema is None else [options.out, average_path(options.out)]
    return files


def check_state_callbacks(callbacks: Sequence[object], options: TrainOptions) -> None:
    """Raises OptionError: one wants the state of a step, and stages are at different ones."""
    names = [type(one).__name__ for one in callbacks if isinstance(one, StateCallback)]
    if names and options.asynchrony is not None:
        raise OptionError(
            f"the callback {names[0]} works with the state of a step, which training without "
            "barriers does not have: train with --mode sync"
        )


@contextmanager
def _explained(job: Job, samples: SampleReader, order: FirstBatches) -> Iterator[None]:
    """What fails here is said in plain torch's words where the module itself fails too."""
    try:
        yield
    except (CaptureError, ScriptError) as error:
        first = order.batch(0)[: job.fixed_micro_batch or None]
        seen = spread(samples)
        try:
            batches = [
                samples.collate(first, batch_seed(job.seed, 0)),
                samples.collate(seen, "example"),
            ]
        except (UserError, MemoryError):
            raise error from error.__cause__
        with casting(job.autocast):
            explanation = explained(job.model, job.loss_function, batches, error)
        raise explanation from error


def _first_state(job: Job, captured: Captured, spec: OptimizerSpec) -> dict[str, Tensor]:
    """Of the model, and of an optimizer that comes from training before."""
    trained = trained_parameters(captured.description)
    group_of = spec.group_of(list(trained))
    layouts = {name: slots_of(spec, group_of[name], tensor) for name, tensor in trained.items()}
    kept = optimizer_state(job.model, job.optimizer, layouts)
    state = {f"model:{name}": tensor for name, tensor in captured.state().items()}
    return state | {
        f"optimizer:{name}": as_laid_out(state, f"optimizer:{name}", tensor)
        for name, tensor in kept.items()
    }


def _check_space(spec: OptimizerSpec, captured: Captured, options: TrainOptions) -> None:
    """Raises OptionError: the disks have no room for the weights, or for one whole checkpoint."""
    state = whole_state(captured, spec)
    wanted: dict[Path, int] = {}
    if options.out is not None:
        files = 1 if spec.ema is None else 2
        wanted[options.out.absolute().parent] = files * state.parameter_bytes
    if options.checkpoint is not None:
        folder = options.checkpoint.absolute()
        wanted[folder] = wanted.get(folder, 0) + state.version_bytes
    check_space(wanted)


def whole_state(captured: Captured, optimizer: OptimizerSpec) -> StateBytes:
    """How large the whole model is, buffers included, and what training adds to it."""
    tensors = captured.description.tensors
    return StateBytes(
        sum(tensor.nbytes for tensor in tensors),
        sum(tensor.nbytes for tensor in tensors if tensor.trainable),
        optimizer_state_ratio(optimizer, trained_parameters(captured.description)),
    )


def _maps(job: Job, captured: Captured, options: TrainOptions) -> MapNetwork | None:
    """Of the units that can be tiled, behind which the model gets a border of units.

    Raises:
        NotTiled: planner tiles is asked for, and none can; names the unit.
        OptionError: it is, and evaluations are to take the average of the weights.
    """
    if job.eval_with_ema:
        if options.planner == "tiles":
            raise OptionError("planner tiles evaluates with the weights: leave out eval_with_ema")
        return None
    in_rounds = options.asynchrony is None or options.chooses_mode
    may_be = options.planner in ("auto", "tiles") and in_rounds
    if not may_be or options.private or options.local:
        return None
    try:
        cut, _ = cut_where_tiling_ends(captured.description)
        maps = tileable(cut)
    except NotTiled:
        if options.planner == "tiles":
            raise
        return None
    captured.description = cut
    return maps


class _PlainBatches:
    """What the user's own module computes on the first batches of a job."""

    def __init__(
        self,
        job: Job,
        samples: SampleReader,
        order: FirstBatches,
        evaluation: OpenedEvaluation | None,
    ) -> None:
        self._job, self._samples, self._order = job, samples, order
        self._evaluated = None if evaluation is None else evaluation.samples

    def computed(self, least: int) -> PlainRun | None:
        """That; None where memory is short.

        Args:
            least: samples of a batch.
        """
        job = self._job
        tensors = [*job.model.parameters(), *job.model.buffers()]
        needed_bytes = sum(t.nbytes * (2 if t.requires_grad else 1) for t in tensors)
        if needed_bytes > usable_memory_bytes():
            return None
        whole = job.fixed_micro_batch or min(job.batch_size, COMPUTED_TOGETHER)
        steps = len(self._samples) // job.batch_size * job.epochs
        try:
            return run_plainly(
                job.model,
                job.loss_function,
                self._batch,
                None if self._evaluated is None else self._evaluation,
                range(min(least, whole), whole + 1),
                replace(COMPARED, most=max(1, min(COMPARED.most, steps))),
                autocast=job.autocast,
            )
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            return None

    def _batch(self, step: int, samples: int) -> Batch:
        indices = self._order.batch(step)[:samples]
        return self._samples.collate(indices, batch_seed(self._job.seed, step))

    def _evaluation(self, _: int, samples: int) -> Batch:
        assert self._evaluated is not None
        return self._evaluated.collate(range(min(samples, len(self._evaluated))), "example")


def _compared(module: nn.Module, captured: Captured, run: PlainRun | None) -> tuple[str, ...]:
    """Raises CaptureError: what is captured is another model; names what differs."""
    if run is None or (run.failure is not None and is_out_of_memory(run.failure)):
        return (_NOT_COMPARED,)
    try:
        with timed(log, "compared"):
            found = compare(module, captured, run)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        return (_NOT_COMPARED,)
    log.info("compared_batches", batches=found.batches, skipped=found.skipped)
    said = [f"other kernels than plain torch's: {found.inexact}"] if found.inexact else []
    if found.skipped:
        said.append(f"the captured model was compared on {found.batches} batches: {found.skipped}")
    return tuple(said)


def _sharing(captured: Captured, across: Across) -> SharingLimits:
    sharing = read_sharing(captured.description)
    if captured.trains.least > 1:  # a part might get fewer
        return replace(sharing, divisible=False)
    if sharing.unshared or sharing.effects or not sharing.divisible or not across.samples:
        return sharing
    return replace(sharing, effects=(across.samples,))


def _resumed(prepared: PreparedJob, options: TrainOptions) -> PreparedJob:
    assert options.resume is not None
    damages: list[str] = []
    found = checkpoint_files.load(options.resume, damages.append)
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
    first, evaluated = found.progress.step, found.progress.evaluated
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


def _bytes_per_sample(tensors: list[torch.Tensor]) -> int:
    return sum(tensor.nbytes // max(len(tensor), 1) for tensor in tensors)
