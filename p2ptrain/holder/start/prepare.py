"""From a user's Job to everything a run needs, before any other device is asked for anything."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from p2ptrain.errors import CaptureError, OptionError, ScriptError, UserError
from p2ptrain.holder.input.metrics import check_evaluation, tried_metrics
from p2ptrain.holder.input.mini_batches import (
    BatchSource,
    EvaluationSource,
    SampleReader,
    first_samples,
)
from p2ptrain.holder.input.open_data import (
    OpenedData,
    check_arguments,
    open_data,
    open_evaluation,
)
from p2ptrain.holder.start.first_batch import PlainBatches, compared, explained
from p2ptrain.holder.start.loss_count import Across, find_count, spread
from p2ptrain.holder.start.micro_batch import (
    check_evaluation_sizes,
    check_fewest,
    min_micro_batch,
    settled,
    why_synchronous_only,
    within,
)
from p2ptrain.holder.start.model_limits import (
    check_asynchronous,
    read_sharing,
    why_all_private,
)
from p2ptrain.holder.start.prepared_job import (
    CapturedAgain,
    PreparedJob,
    from_checkpoint,
    resumed,
    whole_state,
)
from p2ptrain.job.callbacks import SaveBest, StateCallback
from p2ptrain.job.chosen_optimizer import (
    optimizer_spec,
    optimizer_state,
    untrained_frozen,
    with_gradients,
)
from p2ptrain.job.given_weights import load_weights
from p2ptrain.job.job import LOSS, Job
from p2ptrain.job.train_options import TrainOptions
from p2ptrain.logs import get_logger, timed
from p2ptrain.messages.plan_request import SharingLimits
from p2ptrain.model.capture.capture import capture
from p2ptrain.model.capture.captured import Captured
from p2ptrain.model.capture.scored_module import casting
from p2ptrain.model.stage.optimizer import slots_of, trained_parameters
from p2ptrain.model.stage.optimizer_form import OptimizerSpec
from p2ptrain.model.stage.random_operators import check_default_type, randomness_lock
from p2ptrain.model.tracing.python_state import Outdated
from p2ptrain.plan.types.feature_maps import MapNetwork
from p2ptrain.recovery.loss_scale import LossScale
from p2ptrain.runtime.tiled.tile_layout import tileable
from p2ptrain.state import checkpoint_files
from p2ptrain.state.snapshot_store import as_laid_out
from p2ptrain.state.weights_files import average_path, check_space, check_weights_file
from p2ptrain.tiling.kernels.split_model import cut_where_tiling_ends
from p2ptrain.tiling.kernels.tileable_operators import NotTiled
from p2ptrain.tiling.planning.make_plan import NAMES

log = get_logger(__name__)


def prepare(job: Job, options: TrainOptions, again: CapturedAgain | None = None) -> PreparedJob:
    """Read the first samples, export the model, and read the checkpoint to go on from.

    Runs the user's code and torch.export, for seconds: call it off the event loop.

    Args:
        again: what to go on from instead, where the model was captured before.

    Raises:
        ScriptError, CaptureError, OptionError: what the user has to change.
    """
    with untrained_frozen(job.model, job.optimizer) as untrained:
        prepared = _prepare(job, options, again)
        left = with_gradients(job.model) if again is None and options.resume is None else []
    warnings = list(prepared.warnings)
    if untrained:
        warnings.append(
            f"{_few(untrained)} require a gradient, and are in no group of the optimizer: they are "
            "not trained, and count as frozen"
        )
    if (
        options.private
        and not options.local
        and (why := why_all_private(prepared.captured.description))
    ):
        warnings.append(why)
    if left:
        warnings.append(
            f"{_few(left)}: .grad holds gradients from before the Job. Plain torch's loop would "
            "add them to those of the first update; here every update begins without any, as after "
            "optimizer.zero_grad()"
        )
    return replace(prepared, warnings=tuple(warnings))


def _few(names: Sequence[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"{', '.join(map(repr, names[:3]))}{more}"


def _prepare(job: Job, options: TrainOptions, again: CapturedAgain | None) -> PreparedJob:
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
    sources: list[BatchSource | EvaluationSource] = [opened.batches]
    try:
        return _prepared(job, options, opened, sources, again)
    except BaseException:
        for source in sources:
            source.close()
        raise


def _prepared(
    job: Job,
    options: TrainOptions,
    opened: OpenedData,
    sources: list[BatchSource | EvaluationSource],
    again: CapturedAgain | None,
) -> PreparedJob:
    samples = opened.samples
    job = opened.sized(job)
    check_arguments(job, samples)
    evaluation = None
    if job.eval_data is not None:
        evaluation = open_evaluation(job, opened, randomness_lock)
        sources.append(evaluation.batches)
    if opened.layout is not None:
        opened.layout.settle(() if again is None else again.sizes)
    example = samples.collate([0, 1 % len(samples)])
    evaluates = evaluation is not None
    newest = None if again is None else again.batch
    first = PlainBatches(job, samples, opened.batches, evaluation, newest)
    with timed(log, "computed_plainly"):
        plain = first.computed(1)
    with timed(log, "exported"), _explained(job, samples, opened.batches):
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
            if options.mode != "auto":
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
    with timed(log, "division_tried"), _explained(job, samples, opened.batches):
        found = find_count(job, captured, samples, example)
        across = found.across
    micro_batch, changed = settled(job.micro_batch, job.batch_size, across)
    job = replace(job, micro_batch=within(micro_batch, job.batch_size, captured))
    how = options.asynchrony
    least = min_micro_batch(job, captured, samples, None if options.mode == "auto" else how)
    check_fewest(job, opened.batches.fewest, least)
    if how is not None and options.mode == "auto" and not only_rounds:
        only_rounds = why_synchronous_only(job, captured, least, how)
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
        min_micro_batch=least,
        sharing=sharing,
        input_bytes=_bytes_per_sample(captured.entering(example[0], "train")),
        target_bytes=_bytes_per_sample(captured.targets(example)),
        state=_first_state(job, captured, spec),
        optimizer=spec,
        first_step=0,
        steps=steps,
        only_rounds=only_rounds,
        maps=maps,
        changes=(changed,) if changed else (),
        across=across,
        over_all=over_all,
        count=found.count,
        unweighed=found.unweighed,
        loss_scale=LossScale() if job.autocast == torch.float16 else None,
        outdated=outdated,
        compare=partial(compared, job.model, captured, plain),
    )
    if again is not None and again.checkpoint is not None:
        return from_checkpoint(prepared, options, again.checkpoint, [])
    return prepared if options.resume is None else resumed(prepared, options)


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
def _explained(job: Job, samples: SampleReader, source: BatchSource) -> Iterator[None]:
    """What fails here is said in plain torch's words where the module itself fails too."""
    try:
        yield
    except (CaptureError, ScriptError) as error:
        try:
            first = first_samples(source, 0, job.fixed_micro_batch or None)
            batches = [first, samples.collate(spread(samples))]
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
    in_rounds = options.mode != "async"
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


def _sharing(captured: Captured, across: Across) -> SharingLimits:
    sharing = read_sharing(captured.description)
    if captured.trains.least > 1:  # a part might get fewer
        return replace(sharing, divisible=False)
    if sharing.unshared or sharing.effects or not sharing.divisible or not across.samples:
        return sharing
    return replace(sharing, effects=(across.samples,))


def _bytes_per_sample(tensors: list[torch.Tensor]) -> int:
    return sum(tensor.nbytes // max(len(tensor), 1) for tensor in tensors)
