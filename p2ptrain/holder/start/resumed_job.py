"""A prepared job that continues from a checkpoint, or from where it was captured again."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from torch import Tensor

from p2ptrain.errors import OptionError, ProtocolError
from p2ptrain.holder import loader_memory
from p2ptrain.holder.input.batch_layout import ReadBatch
from p2ptrain.holder.start.prepared_job import PreparedJob
from p2ptrain.job.train_options import TrainOptions
from p2ptrain.model.stage.optimizer import AVERAGE, state_layout, trained_parameters
from p2ptrain.state import checkpoint_files
from p2ptrain.state.checkpoint_files import Checkpoint
from p2ptrain.state.snapshot_store import as_laid_out


@dataclass(frozen=True, slots=True)
class CapturedAgain:
    """What a job goes on with once its model is captured for sizes that differ late.

    Attributes:
        checkpoint: its state, before the batch that differs.
        batches: each of a size that those before it did not have; the newest is the last.
        next_epoch: first generation number that was never used.
    """

    checkpoint: Checkpoint
    batches: tuple[ReadBatch, ...]
    next_epoch: int


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
