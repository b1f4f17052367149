"""The sinks that a run's options ask for, and what they all receive."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from p2ptrain import events
from p2ptrain.aio.threads import run_in_background
from p2ptrain.api.sinks.notify import NotifySink
from p2ptrain.api.sinks.sink import Sink, SinkThread
from p2ptrain.api.sinks.trackers import TRACKERS, TensorBoardSink
from p2ptrain.errors import OptionError
from p2ptrain.events import Event

if TYPE_CHECKING:
    from p2ptrain.job.job import Job
    from p2ptrain.job.train_options import TrainOptions


def asked_sinks(job: Job, options: TrainOptions) -> list[Sink]:
    """Made, and not begun.

    Raises:
        OptionError: one is not known, not installed or no program.
    """
    sinks: list[Sink] = []
    if options.log_dir is not None:
        sinks.append(TensorBoardSink(options.log_dir))
    config = {
        "model": type(job.model).__name__,
        "batch_size": job.batch_size,
        "epochs": job.epochs,
        "seed": job.seed,
        "planner": options.planner,
    }
    for name in options.report_to:
        if name not in TRACKERS:
            raise OptionError(f"--report-to {name}: give one of {', '.join(TRACKERS)}")
        sinks.append(TRACKERS[name](config))
    if options.notify is not None:
        sinks.append(NotifySink(options.notify))
    return sinks


class RunSinks:
    """All of one run. On the event loop; `close` it."""

    def __init__(self, sinks: Sequence[Sink], warn: Callable[[Event], None]) -> None:
        """`warn`: receives what goes wrong with one, as a warning."""
        self._threads = [SinkThread(sink) for sink in sinks]
        self._warn = warn

    def put(self, event: Event) -> None:
        """For all of them."""
        for thread in self._threads:
            thread.put(event)
        self._say_troubles()

    async def close(self) -> None:
        """Wait until they have taken all."""
        for thread in self._threads:
            await run_in_background(thread.close)
        self._say_troubles()

    def _say_troubles(self) -> None:
        for thread in self._threads:
            trouble = thread.trouble()
            if trouble is not None:
                self._warn(events.Warning(trouble))
