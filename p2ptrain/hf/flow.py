"""The flow of transformers' Trainer, driven by a job's events.

    Step s      ──► on_step_end ──► log ──► evaluate, save ──► on_epoch_end ──► evaluate, save
                                            └── need the weights of step s ──┘

Steps are trained by the household; everything else is transformers' own code, in the callbacks'
thread of this device. What needs weights waits until they are here: the household stands still
after such steps, and after each step where the user's own callbacks may ask for them.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

from transformers import TrainerCallback
from transformers.trainer_utils import SaveStrategy

from p2ptrain.errors import OptionError
from p2ptrain.events import Step
from p2ptrain.hf.sample_order import TrainingLength
from p2ptrain.job.callbacks import StateCallback, StopTraining, TrainedState, WantedState

Work: TypeAlias = Generator[WantedState, TrainedState, None]
"""What follows a step; it gives what it wants, and is sent the state."""

NEVER_CALLED = ("on_pre_optimizer_step", "on_optimizer_step", "on_substep_end")
"""Hooks of TrainerCallback between parts of an update, which happens on several devices."""

ASKING = ("on_step_begin", "on_step_end", "on_epoch_begin", "on_epoch_end", "on_log", "on_evaluate")
"""Hooks that may ask for an evaluation or to save."""


def check_callbacks(callbacks: list[TrainerCallback]) -> None:
    """Raises OptionError: one waits for what is never called."""
    for callback in callbacks:
        for hook in NEVER_CALLED:
            if _has_own(callback, hook):
                raise OptionError(
                    f"{type(callback).__name__}.{hook} would never be called: gradients and "
                    "optimizers are on the devices that train. Use on_step_end"
                )


def _has_own(callback: TrainerCallback, hook: str) -> bool:
    return getattr(type(callback), hook) is not getattr(TrainerCallback, hook)


def _may_ask(callback: TrainerCallback) -> bool:
    """Whether it is not transformers' own, whose rules are known, and may ask at any step."""
    if type(callback).__module__.partition(".")[0] == "transformers":
        return False
    return any(_has_own(callback, hook) for hook in ASKING)


class TrainerFlow(StateCallback):
    """Goes with one `train()`.

    Args:
        trainer: a `p2ptrain.hf.Trainer`, whose state it keeps.
        ignored: keys of the model's output that are no predictions.
        since: when the training began, as `time.time()`.
    """

    measures = True

    def __init__(
        self, trainer: Any, length: TrainingLength, ignored: list[str] | None, since: float
    ) -> None:
        self._trainer = trainer
        self._length = length
        self._ignored = ignored
        self._since = since
        self._may_ask = any(map(_may_ask, trainer.callback_handler.callbacks))
        self._work: Work | None = None
        self._model: Any = None  # one of its own for what is not trained to its end

    # -- the household's side --------------------------------------------------------------------

    def stands_still_after(self, step: int) -> bool:
        """Where an evaluation or saving is due, or may be."""
        return self._may_ask or self._is_due(step)

    def _is_due(self, step: int) -> bool:
        args, state = self._trainer.args, self._trainer.state
        is_last, ends = step == self._length.steps, self._length.ends_epoch(step)
        due = {
            "no": False,
            "steps": (args.eval_strategy == "steps" and step % state.eval_steps == 0) or is_last,
            "epoch": ends,
        }
        if due[str(args.eval_strategy.value)]:
            return True
        if args.save_strategy == SaveStrategy.STEPS:
            return is_last or (state.save_steps > 0 and step % state.save_steps == 0)
        return args.save_strategy == SaveStrategy.EPOCH and ends

    def on_step(self, event: Step) -> None:
        """One update counts."""
        trainer, state = self._trainer, self._trainer.state
        if event.step > state.global_step + 1:  # an earlier process has made those in between
            trainer._globalstep_last_logged = trainer._initial_global_step = event.step - 1
        self._add_loss(event.loss)
        trainer.count_flos(event)
        state.global_step = event.step
        state.epoch = self._length.epoch_after(event.step, trainer.args.gradient_accumulation_steps)
        self._work = self._after_step(event)
        self._go_on(None)

    def on_state(self, state: TrainedState) -> None:
        """What is wanted is here."""
        self.wanted = WantedState.NOTHING
        self._go_on(state)

    def _go_on(self, state: TrainedState | None) -> None:
        assert self._work is not None
        try:
            self.wanted = next(self._work) if state is None else self._work.send(state)
        except StopIteration:
            self._work = None

    # -- transformers' side ----------------------------------------------------------------------

    def begin(self) -> None:
        """The training begins or continues."""
        trainer = self._trainer
        trainer.control = self._call("on_train_begin")
        if trainer.args.eval_on_start:
            trainer._evaluate(None, self._ignored, skip_scheduler=True)
        self._begin_step(trainer.state.global_step)

    def _begin_step(self, steps: int) -> None:
        """The next after so many."""
        if steps % self._length.updates == 0:
            self._trainer.control = self._call("on_epoch_begin")
        self._trainer.control = self._call("on_step_begin")

    def _after_step(self, event: Step) -> Work:
        trainer, control = self._trainer, self._trainer.control
        trainer.control = self._call("on_step_end")
        yield from self._log_evaluate_save(event)
        control = trainer.control
        if self._length.ends_epoch(event.step) or control.should_training_stop:
            trainer.control = self._call("on_epoch_end")
            yield from self._log_evaluate_save(event)
        elif control.should_epoch_stop:
            raise OptionError(
                "a callback has set control.should_epoch_stop: the rest of an epoch cannot be left "
                "out. Set control.should_training_stop, or train fewer samples"
            )
        if event.step == self._length.steps:
            return
        if trainer.control.should_training_stop:
            raise StopTraining(f"the training was stopped at step {event.step} by a callback")
        self._begin_step(event.step)

    def _log_evaluate_save(self, event: Step) -> Work:
        """As `Trainer._maybe_log_save_evaluate`."""
        trainer = self._trainer
        if trainer.control.should_log:
            rate = event.lr
            trainer.log_progress(rate, event.grad_norm, self._since)
        if trainer.control.should_evaluate:
            state = yield from self._brought(WantedState.WEIGHTS)
            with self._loaded(state):
                metrics = trainer._evaluate(None, self._ignored, skip_scheduler=True)
            self.measured = trainer.measured(metrics)
            is_best = trainer._determine_best_metric(metrics=metrics, trial=None)
            if trainer.args.save_strategy == SaveStrategy.BEST:
                trainer.control.should_save = is_best
        if trainer.control.should_save:
            only_model = trainer.args.save_only_model
            state = yield from self._brought(WantedState.WEIGHTS if only_model else WantedState.ALL)
            with self._loaded(state):
                trainer.state_being_saved = state
                trainer._save_checkpoint(trainer.model, None)
                trainer.state_being_saved = None
            trainer.control = self._call("on_save")

    def _brought(self, wanted: WantedState) -> Generator[WantedState, TrainedState, TrainedState]:
        step = self._trainer.state.global_step
        if not self.stands_still_after(step):
            raise OptionError(
                f"something has asked to evaluate or save after step {step}, beside eval_steps and "
                "save_steps: only methods of a TrainerCallback of one's own may"
            )
        state = yield wanted
        assert state.step == step, "the household stands still"
        return state

    @contextmanager
    def _loaded(self, state: TrainedState) -> Iterator[None]:
        """The trainer works with the weights of a step; the user's own stay those it began with.

        The household goes back to those if devices die before there are copies of newer ones.
        """
        trainer = self._trainer
        users = trainer.model
        if self._model is None:
            self._model = copy.deepcopy(users)
        self._model.load_state_dict(state.weights, strict=False)
        trainer.use_model(self._model)
        try:
            yield
        finally:
            trainer.use_model(users)

    def _add_loss(self, loss: float) -> None:
        trainer = self._trainer
        if trainer.args.logging_nan_inf_filter and not math.isfinite(loss):
            since = 1 + trainer.state.global_step - trainer._globalstep_last_logged
            trainer._tr_loss += trainer._tr_loss / since
        else:
            trainer._tr_loss += loss

    def _call(self, hook: str) -> Any:
        trainer = self._trainer
        call = getattr(trainer.callback_handler, hook)
        return call(trainer.args, trainer.state, trainer.control)


def folder_of(checkpoint: str | Path) -> Path:
    """Where a saved folder has what training continues from."""
    return Path(checkpoint) / "p2ptrain"
