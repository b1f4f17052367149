"""How a job is to be run, as opposed to what it trains (`Job`).

The options of apps are checked and normalised, or refused; nothing is converted by force.
"""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields
from enum import StrEnum
from functools import partial
from itertools import pairwise
from os import PathLike
from pathlib import Path
from typing import Literal, SupportsIndex, TypeVar

from p2ptrain.errors import OptionError
from p2ptrain.job.asynchrony import PLANNER, AsyncOptions, FtpipehdOptions, is_due
from p2ptrain.model.wire.tensor_layout import WireFormat
from p2ptrain.plan.types.weight_versions import Weights


class ReplanMethod(StrEnum):
    """How a household plans after a failure."""

    LIGHT = "light"
    """A plan close to the old one, that moves few bytes."""
    HEAVY = "heavy"
    """Everything to the data holder, a plan from zero, everything from there."""
    RESPIPE = "respipe"
    """A dead device's units to the stage after it, and nothing else."""


@dataclass(frozen=True, slots=True)
class TrainOptions:
    """Options of `Node.train` and of `p2ptrain train`.

    Paths, `wire` and `recovery` may be given as texts, as on the command line.

    Attributes:
        wait_for: devices to wait for before planning, this one included.
        wait_timeout_seconds: give up waiting after this long; None waits for ever.
        planner: "auto" (leaves out devices that do not help), "hybrid", "pipedream", "ftpipehd",
            "pp" (straight pipeline over all devices), "dp", "tiles" (first units in tiles of
            their maps) or "single".
        grid: of "tiles": (rows, columns); None = the planner chooses.
        groups: of "tiles": borders of groups of units without halos between them, from 0 on, such
            as (0, 4, 10); the last one ends the tiled part; () = the planner chooses.
        steps: updates in all, resumed ones included; with `Job.epochs` the smaller wins.
        checkpoint: folder that receives checkpoints: after every epoch, at the end, and in between
            at intervals that cost at most some 5 % of the time.
        checkpoint_every: updates between two checkpoints, instead of the automatic choice.
        resume: folder of a checkpoint to go on from.
        out: safetensors file that receives the trained weights.
        private: raw inputs and labels never leave this device: it owns the first units and the
            last ones with the loss.
        local: train on this device alone, without a network, by the same code.
        fresh: start again even if members hold this job unfinished.
        replan: allow changes of plan while nothing failed.
        wire: how activations, gradients and the parts of all-reduces travel between devices:
            exactly, or rounded ("bf16", "int8"), which changes results a little.
        recovery: how to plan after a failure.
        mode: "sync": in rounds, exactly as on one device; "async": without a barrier between
            mini-batches, so that no device waits for another's update; "auto": whichever of the
            two is predicted to reach the same accuracy sooner, chosen with the first plan.
        asynchrony: how "async" and "auto" train without a barrier; None = by `AsyncOptions()`.
        chooses_mode: older form of mode="auto".
        ftpipehd: of asynchronous training with planner "ftpipehd": when it repartitions the model,
            and when it copies.
        replicas: keep copies of stages on other devices, so that a death costs few steps; without
            them it goes back to the beginning, or ends the job. For measurements.
        whole_copies: updates between two copies of the whole model, optimizer included, in this
            device's memory: what several deaths at once go back to; None = none is made.
        plan: file of the plan to begin with (`p2ptrain.plan/1`), instead of a planner's. It changes
            only when a device joins, leaves or fails. With `wait_for` 1, as many devices as it uses
            are waited for.
        trace: file that receives what every device did when, for Perfetto (ui.perfetto.dev): the
            last 500,000 spans.
        log_dir: folder that receives TensorBoard event files: loss, learning rate, samples/s, norm
            of the gradients, metrics.
        report_to: "wandb", "mlflow", "trackio": the same numbers by those libraries.
        notify: command that is run when the job ends or needs a person (waiting, error), with the
            event as JSON on its standard input; no shell reads it.
        engine: "own", or "torch": inside torchrun the same job on torch.distributed, without a
            household. Then options of households, plans and asynchronous training are refused.
        dry_run: measure the devices and plan, report the plan and train nothing.
        write_profile, write_cluster, write_plan: files that receive what a dry run has found, for
            `p2ptrain plan`, and for `plan`.
    """

    wait_for: int = 1
    wait_timeout_seconds: float | None = None
    planner: str = "auto"
    steps: int | None = None
    checkpoint: Path | None = None
    checkpoint_every: int | None = None
    resume: Path | None = None
    out: Path | None = None
    private: bool = False
    local: bool = False
    fresh: bool = False
    replan: bool = True
    wire: WireFormat = WireFormat.EXACT
    recovery: ReplanMethod = ReplanMethod.LIGHT
    asynchrony: AsyncOptions | None = None
    ftpipehd: FtpipehdOptions = field(default_factory=FtpipehdOptions)
    replicas: bool = True
    whole_copies: int | None = None
    chooses_mode: bool = False
    grid: tuple[int, int] | None = None
    groups: tuple[int, ...] = ()
    mode: Literal["sync", "async", "auto"] | None = None
    plan: Path | None = None
    trace: Path | None = None
    log_dir: Path | None = None
    report_to: str | Iterable[str] = ()
    notify: str | None = None
    engine: Literal["own", "torch"] = "own"
    dry_run: bool = False
    write_profile: Path | None = None
    write_cluster: Path | None = None
    write_plan: Path | None = None

    def __post_init__(self) -> None:
        written = ("write_profile", "write_cluster", "write_plan")
        for name in ("checkpoint", "resume", "out", "plan", "trace", "log_dir", *written):
            object.__setattr__(self, name, path(name, getattr(self, name)))
        for name in ("wait_for", "steps", "checkpoint_every", "whole_copies"):
            object.__setattr__(self, name, whole(name, getattr(self, name)))
        waits = seconds("wait_timeout_seconds", self.wait_timeout_seconds)
        object.__setattr__(self, "wait_timeout_seconds", waits)
        object.__setattr__(self, "wire", choice(WireFormat, "wire", self.wire))
        object.__setattr__(self, "recovery", choice(ReplanMethod, "recovery", self.recovery))
        if not isinstance(self.asynchrony, AsyncOptions | None):
            raise OptionError("asynchrony must be a p2ptrain.AsyncOptions(), or None for rounds")
        self._settle_mode()
        object.__setattr__(self, "grid", grid(self.grid))
        object.__setattr__(self, "groups", borders(self.groups))
        if (self.grid or self.groups) and self.planner != "tiles":
            raise OptionError("grid and groups are for planner tiles")
        if self.planner == "tiles" and (self.private or self.asynchrony is not None):
            raise OptionError(
                "planner tiles sends images to all devices and trains in sync: leave out private "
                "and async"
            )
        if self.wait_for is None or self.wait_for < 1:
            raise OptionError("wait_for counts this device too: give 1 or more")
        for name in ("steps", "checkpoint_every", "whole_copies"):
            if (number := getattr(self, name)) is not None and number < 1:
                raise OptionError(f"{name} must be 1 or more")
        if self.whole_copies is not None and not self.replicas:
            raise OptionError("whole_copies are made of the copies that replicas are")
        if self.mode == "auto" and self.asynchrony == AsyncOptions(Weights.UNSTASHED):
            raise OptionError(
                "training without stashing is for comparisons: choose it by itself, not with mode "
                "auto"
            )
        if not self.dry_run and any(getattr(self, name) is not None for name in written):
            raise OptionError(f"{', '.join(written)} are for dry_run")
        object.__setattr__(self, "report_to", texts(self.report_to))
        if self.dry_run and self.trace is not None:
            raise OptionError("a dry run trains nothing that could be traced: leave out trace")
        if self.plan is not None and (self.planner != "auto" or self.mode == "auto"):
            raise OptionError("a given plan leaves no choice: leave out planner and mode auto")
        if self.plan is not None and self.as_ftpipehd is not None:
            raise OptionError("ftpipehd makes its own plans: leave out plan")
        if self.local and self.wait_for > 1:
            raise OptionError("local trains on this device alone: leave out wait_for")
        if self.engine not in ("own", "torch"):
            raise OptionError(f"engine must be 'own' or 'torch', not {self.engine!r}")
        if self.engine == "torch":
            self._check_torch()

    def _check_torch(self) -> None:
        for one in fields(self):  # mode cannot be async: asynchrony is refused
            if one.name not in TAKEN_BY_TORCH and getattr(self, one.name) != one.default:
                raise OptionError(f"engine torch has no {one.name}: leave it out")

    def _settle_mode(self) -> None:
        if self.mode is None:
            object.__setattr__(self, "mode", self._older_mode())
        if self.mode not in ("sync", "async", "auto"):
            raise OptionError(f"mode must be 'sync', 'async' or 'auto', not {self.mode!r}")
        if self.mode == "sync" and self.asynchrony is not None:
            raise OptionError("asynchrony is for mode 'async' or 'auto'")
        if self.mode != "sync" and self.asynchrony is None:
            object.__setattr__(self, "asynchrony", AsyncOptions())
        object.__setattr__(self, "chooses_mode", self.mode == "auto")

    def _older_mode(self) -> str:
        """What the fields say that were there before `mode`."""
        if self.asynchrony is None and not self.chooses_mode:
            return "sync"
        mode, old = ("auto", "chooses_mode") if self.chooses_mode else ("async", "asynchrony")
        warnings.warn(
            f"TrainOptions({old}=...) without a mode: write mode={mode!r} too",
            DeprecationWarning,
            stacklevel=5,
        )
        return mode

    @property
    def whole_copy_due(self) -> Callable[[int, int], bool] | None:
        """By the version copied whole last, and a newer one; None = no such copies are wanted."""
        if self.as_ftpipehd is not None:
            return self.as_ftpipehd.copies_whole
        return None if self.whole_copies is None else partial(is_due, self.whole_copies)

    @property
    def reads_versions(self) -> bool:
        """Whether versions are read during training: for checkpoints, or to be held here."""
        return self.checkpoint is not None or self.whole_copy_due is not None

    @property
    def as_ftpipehd(self) -> FtpipehdOptions | None:
        """Its settings where the job is trained as FTPipeHD does."""
        is_its = self.planner == PLANNER and self.mode == "async" and not self.local
        return self.ftpipehd if is_its else None


TAKEN_BY_TORCH = frozenset(
    {"steps", "checkpoint", "checkpoint_every", "resume", "out", "log_dir", "report_to", "notify"}
    | {"engine", "mode", "ftpipehd"}
)
"""Options that mean something without a household; `mode` can only be sync then."""

Choice = TypeVar("Choice", bound=StrEnum)

MAX_THREADS = 1024
"""That a device computes with: where torch cannot start them all, it may take the process along."""


def path(name: str, value: str | PathLike[str] | None) -> Path | None:
    """OptionError names the option."""
    try:
        return None if value is None else Path(value)
    except TypeError:
        raise OptionError(f"{name} must be a path, not {value!r}") from None


def texts(value: str | Iterable[str]) -> tuple[str, ...]:
    """One text is a list of one."""
    return (value,) if isinstance(value, str) else tuple(value)


def whole(name: str, value: SupportsIndex | None) -> int | None:
    """The same of a whole number, NumPy's too."""
    try:
        return None if value is None else operator.index(value)
    except TypeError:
        raise OptionError(f"{name} must be a whole number, not {value!r}") from None


def seconds(name: str, value: object) -> float | None:
    """The same of a length of time."""
    if value is None:
        return None
    if not isinstance(value, int | float) or not value >= 0:  # NaN is no length
        raise OptionError(f"{name} must be 0 seconds or more, not {value!r}")
    return value


def choice(choices: type[Choice], name: str, value: str) -> Choice:
    """The same of one of a few words."""
    try:
        return choices(value)
    except ValueError:
        known = ", ".join(choices)
        raise OptionError(f"{name} must be one of {known}, not {value!r}") from None


def grid(value: object) -> tuple[int, int] | None:
    """(rows, columns), where there is one."""
    if value is None:
        return None
    numbers = _wholes(value)
    if len(numbers) != 2 or min(numbers) < 1:
        raise OptionError(f"grid is (rows, columns), from 1 on, found {value!r}")
    return numbers[0], numbers[1]


def borders(value: object) -> tuple[int, ...]:
    """Of groups of units: none, or numbers that rise from 0 and have an end."""
    numbers = _wholes(value)
    is_none = isinstance(value, list | tuple) and not value
    rises = all(first < end for first, end in pairwise(numbers))
    if not is_none and (len(numbers) < 2 or numbers[0] != 0 or not rises):
        raise OptionError(
            f"groups are borders of units, rising from 0, as (0, 4, 10): found {value!r}"
        )
    return numbers


def _wholes(value: object) -> tuple[int, ...]:
    """Empty where it is no list of whole numbers."""
    given = value if isinstance(value, list | tuple) else ()
    return tuple(given) if all(type(number) is int for number in given) else ()
