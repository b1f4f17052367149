"""From a Job's data to what is read of it: its mini-batches, and samples to try things on."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

from torch.utils.data import DataLoader, default_collate

from p2ptrain.errors import ScriptError
from p2ptrain.holder.input.batch_layout import BatchLayout
from p2ptrain.holder.input.checked_dataset import CheckedDataset, check_alike
from p2ptrain.holder.input.loader_batches import (
    LoaderBatches,
    LoaderEvaluation,
    LookedAt,
)
from p2ptrain.holder.input.loader_pass import LoaderPass, takes_parts
from p2ptrain.holder.input.mini_batches import (
    BatchSource,
    EvaluationSource,
    IndexedBatches,
    IndexedEvaluation,
    SampleOrder,
    SampleReader,
)
from p2ptrain.job.data_kinds import check_fits, gives_samples, is_map_style, refuse_batch_size
from p2ptrain.job.job import Job
from p2ptrain.model.capture.scored_module import VaryingSize


@dataclass(frozen=True, slots=True)
class OpenedData:
    """What a job trains on.

    Attributes:
        count: samples of the data, where it says so; else 0.
        layout: of a loader's batches; None = of samples that all look alike.
    """

    batches: BatchSource
    samples: SampleReader
    count: int
    layout: BatchLayout | None = None

    @property
    def varying(self) -> tuple[VaryingSize, ...]:
        """Sizes that differ from batch to batch."""
        return () if self.layout is None else self.layout.varying

    def sized(self, job: Job) -> Job:
        """`job` with the size of its mini-batches, where the data knows it."""
        return job if job.batch_size else replace(job, batch_size=self.batches.batch_size)

    def steps(self, most: int | None) -> int | None:
        """Most updates of the whole job; None = as many as the data gives."""
        of_all = self.batches.steps
        if of_all is None or most is None:
            return most if of_all is None else of_all
        return min(of_all, most)


@dataclass(frozen=True, slots=True)
class OpenedEvaluation:
    """What a job is evaluated on."""

    batches: EvaluationSource
    samples: SampleReader


def open_data(job: Job, lock: AbstractContextManager[Any]) -> OpenedData:
    """Read the first samples.

    Args:
        lock: held while the user's code runs that may draw random numbers.

    Raises:
        ScriptError: they cannot be read, or are unusable.
        OptionError: the job's `batch_size` is not theirs.
    """
    refuse_batch_size(job.data, job.batch_size)
    if is_map_style(job.data):
        samples = CheckedDataset(job.data, own_loss=_own_loss(job), lock=lock)
        check_fits(len(samples), job.batch_size)
        order = SampleOrder(len(samples), job.batch_size, job.seed)
        return OpenedData(IndexedBatches(samples, order, job.epochs), samples, len(samples))
    reading = _reading(job, job.data, "data", lock)
    batches = LoaderBatches(reading, job.epochs)
    count = len(job.data.dataset) if reading.batches is not None else 0
    return OpenedData(batches, batches.looked_at(), count, reading.layout)


def open_evaluation(
    job: Job, opened: OpenedData, lock: AbstractContextManager[Any]
) -> OpenedEvaluation:
    """The same for `eval_data`, whose samples must look like those to train on."""
    first = opened.samples
    if is_map_style(job.eval_data) and opened.layout is None:
        samples = CheckedDataset(job.eval_data, "eval_data", own_loss=_own_loss(job), lock=lock)
        check_alike(samples, first)
        return OpenedEvaluation(IndexedEvaluation(samples, job.seed), samples)
    reading = _reading(job, job.eval_data, "eval_data", lock, opened.layout)
    batches = LoaderEvaluation(reading)
    looked_at = LookedAt("eval_data", reading.layout, [batches.first])
    if opened.layout is None:
        reading.layout.settle()
        check_alike(looked_at, first)
    return OpenedEvaluation(batches, looked_at)


def check_arguments(job: Job, samples: SampleReader) -> None:
    """Raises ScriptError: the model's `forward` does not take the parts of a dict by their names.

    In words of the data, before anything is captured.
    """
    given, target = samples.collate([0])
    if not isinstance(given, dict):
        return
    try:
        parameters = inspect.signature(job.model.forward).parameters
    except (TypeError, ValueError):  # a builtin says nothing of what it takes
        return
    kinds = inspect.Parameter
    taken = {
        p.name: p
        for p in parameters.values()
        if p.kind not in (kinds.VAR_KEYWORD, kinds.VAR_POSITIONAL)
    }
    takes_any = any(p.kind is kinds.VAR_KEYWORD for p in parameters.values())
    missing = [n for n, p in taken.items() if p.default is kinds.empty and n not in given]
    more = [] if takes_any else [name for name in given if name not in taken]
    if not missing and not more:
        return
    whole = target is None or (isinstance(target, dict) and target.keys() == given.keys())
    what = "model(**batch)" if whole else "model(**input)"
    problems = [f"needs {', '.join(map(repr, missing))}, which is not in it"] if missing else []
    problems += [f"does not take {', '.join(map(repr, more))}"] if more else []
    advice = "let the data give a dict with what forward() takes (collate_fn of a DataLoader)"
    if whole and more and job.loss is not None:
        kept = ", ".join(f"{name!r}: ..." for name in given if name not in more)
        given_as = f"({{{kept}}}, target): model(**input)" if kept else "(x, target): model(x)"
        advice = f"give pairs {given_as} and loss(output, target)"
    raise ScriptError(
        f"{samples.name} is a dict of {', '.join(map(repr, given))}, so the model is called as "
        f"{what}, and its forward() {' and '.join(problems)}: {advice}"
    )


def _own_loss(job: Job) -> bool:
    return job.loss is None


def _reading(
    job: Job,
    data: Any,
    name: str,
    lock: AbstractContextManager[Any],
    layout: BatchLayout | None = None,
) -> LoaderPass:
    loader = data
    if gives_samples(data) or is_map_style(data):
        loader = DataLoader(
            data, job.batch_size, drop_last=name == "data", collate_fn=collate_as_given
        )
    as_tuple = None
    if isinstance(loader, DataLoader) and loader.collate_fn is default_collate:
        as_tuple = takes_parts(job.model)
        if type(loader) is DataLoader:
            loader = copy.copy(loader)
            loader.collate_fn = _collate_with_tuple
    if layout is None:
        layout = BatchLayout(own_loss=_own_loss(job), as_tuple=as_tuple)
    return LoaderPass(loader, name, layout, job.seed, lock)


def collate_as_given(samples: list[Any]) -> Any:
    """As torch's default collation, except that tuples stay tuples: `model(*x)`."""
    return _like(samples[0], default_collate(samples))


def _collate_with_tuple(samples: list[Any]) -> Any:
    """As torch's default collation, which makes lists of tuples; an input stays a tuple."""
    made = default_collate(samples)
    pair = samples[0]
    if isinstance(pair, (tuple, list)) and len(pair) == 2 and type(pair[0]) is tuple:
        return [tuple(made[0]), made[1]]
    return made


def _like(sample: Any, collated: Any) -> Any:
    if isinstance(sample, Mapping):
        return {key: _like(sample[key], collated[key]) for key in sample}
    if isinstance(sample, (tuple, list)) and not isinstance(collated, tuple):
        items = [_like(item, made) for item, made in zip(sample, collated, strict=True)]
        return tuple(items) if isinstance(sample, tuple) else items
    return collated
