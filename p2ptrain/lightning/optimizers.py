"""What `configure_optimizers` returns, in all of its forms, as a Job has it.

optimizer                                       [optimizer]
[optimizer], [scheduler]                        (the same as a tuple)
{"optimizer": ..., "lr_scheduler": scheduler, "monitor": ...}
{"optimizer": ..., "lr_scheduler": {"scheduler": ..., "interval": "epoch", "frequency": 1,
                                    "monitor": ..., "strict": ..., "name": ...}}
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from p2ptrain.errors import ScriptError
from p2ptrain.job.update_numbers import Interval
from p2ptrain.lightning.refusals import place_of, refused

_INTERVALS: Mapping[object, Interval] = {"step": "update", "epoch": "epoch"}

_KNOWN = ("scheduler", "interval", "frequency", "monitor", "strict", "name", "reduce_on_plateau")


@dataclass(frozen=True, slots=True)
class ConfiguredOptimizer:
    """What was configured.

    Attributes:
        monitor: what a ReduceLROnPlateau is stepped with: a name that validation logs.
    """

    optimizer: Optimizer
    scheduler: LRScheduler | None = None
    interval: Interval = "epoch"
    monitor: str | None = None


def configured(module: Any) -> ConfiguredOptimizer:
    """Raises ScriptError: it is no form of one optimizer and at most one scheduler."""
    return _Reading(module).read(module.configure_optimizers())


class _Reading:
    def __init__(self, module: Any) -> None:
        self._module = module

    def read(self, given: Any) -> ConfiguredOptimizer:
        if isinstance(given, Optimizer):
            return ConfiguredOptimizer(given)
        if isinstance(given, Mapping):
            return self._of_dict(given)
        if isinstance(given, Sequence) and given and not isinstance(given, str):
            if len(given) == 2 and all(isinstance(part, list | tuple) for part in given):
                return self._of_lists(*given)
            self._one("optimizers", given)
            if isinstance(given[0], Optimizer | Mapping):
                return self.read(given[0])
        if given is None:
            raise self._refused("returns None: p2ptrain trains with an optimizer")
        raise self._refused(
            f"returns {_shown(given)}: return an optimizer of torch.optim, with its scheduler"
        )

    def _of_lists(
        self, optimizers: Sequence[Any], schedulers: Sequence[Any]
    ) -> ConfiguredOptimizer:
        self._one("optimizers", optimizers)
        if not optimizers or not isinstance(optimizers[0], Optimizer):
            raise self._refused(f"returns {_shown(optimizers)} as optimizers")
        if not schedulers:
            return ConfiguredOptimizer(optimizers[0])
        self._one("schedulers", schedulers)
        return self._with(optimizers[0], schedulers[0], None)

    def _of_dict(self, given: Mapping[str, Any]) -> ConfiguredOptimizer:
        extra = set(given) - {"optimizer", "lr_scheduler", "monitor"}
        optimizer = given.get("optimizer")
        if extra or not isinstance(optimizer, Optimizer):
            raise self._refused(
                f"returns a dict with {', '.join(map(repr, given))}: it may have 'optimizer', "
                "'lr_scheduler' and 'monitor'"
            )
        scheduler = given.get("lr_scheduler")
        if isinstance(scheduler, list | tuple):
            self._one("schedulers", scheduler)
            scheduler = scheduler[0] if scheduler else None
        return self._with(optimizer, scheduler, given.get("monitor"))

    def _with(self, optimizer: Optimizer, given: Any, monitor: str | None) -> ConfiguredOptimizer:
        if given is None:
            return ConfiguredOptimizer(optimizer)
        how = given if isinstance(given, Mapping) else {"scheduler": given, "monitor": monitor}
        if unknown := set(how) - set(_KNOWN):
            raise self._refused(f"gives lr_scheduler {', '.join(sorted(map(str, unknown)))}")
        scheduler = how.get("scheduler")
        if not isinstance(scheduler, LRScheduler):
            raise self._refused(
                f"gives {_shown(scheduler)} as lr_scheduler, which is none of torch"
            )
        interval = _INTERVALS.get(how.get("interval", "epoch"))
        if interval is None:
            raise self._refused(f"gives interval={how['interval']!r}: it is 'step' or 'epoch'")
        if (frequency := how.get("frequency", 1)) != 1:
            raise self._refused(
                f"gives frequency={frequency}: schedulers are stepped after every update or epoch"
            )
        monitor = how.get("monitor")
        if isinstance(scheduler, ReduceLROnPlateau) and not (monitor and interval == "epoch"):
            raise self._refused(
                "gives a ReduceLROnPlateau, which is stepped after each validation: give monitor, "
                "a name that validation_step logs, and interval 'epoch'"
            )
        return ConfiguredOptimizer(optimizer, scheduler, interval, monitor)

    def _one(self, what: str, given: Sequence[Any]) -> None:
        if len(given) > 1:
            raise self._refused(f"returns {len(given)} {what}: p2ptrain trains with one")

    def _refused(self, what: str) -> ScriptError:
        where = place_of(type(self._module).configure_optimizers)
        return refused(self._module, f"configure_optimizers ({where}) {what}")


def _shown(value: object) -> str:
    kind = type(value).__name__
    return f"a {kind} of {len(value)}" if isinstance(value, list | tuple) else f"a {kind}"
