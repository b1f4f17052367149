"""A training run on a terminal: each device's part, then a bar that moves (rich).

Names and reasons come from other devices, so they are shown as `Text`, never as rich's markup.
"""

from __future__ import annotations

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from p2ptrain import events
from p2ptrain.console.describe import describe, devices_text, layers_text, metrics_text, plan_head
from p2ptrain.net.read_form import one_line


class RichRenderer:
    """A progress bar over all steps; plans as tables, everything else as lines above the bar."""

    def __init__(self, console: Console, total_steps: int | None = None) -> None:
        self._console = console
        self._progress = Progress(
            TextColumn("{task.fields[steps]}"),
            BarColumn(bar_width=None),
            TextColumn("loss {task.fields[loss]}"),
            TextColumn("{task.fields[speed]} samples/s"),
            TimeRemainingColumn(),
            console=console,
        )
        self._total_steps = total_steps
        self._task: TaskID | None = None

    def show(self, event: events.Event) -> None:
        """Show `event`."""
        match event:
            case events.Step():
                self._show_step(event)
            case events.Plan():
                self._line(plan_head(event), "bold")  # a table's title breaks at its width
                self._console.print(plan_table(event))
            case events.Eval():
                self._line(f"after step {event.step}: {metrics_text(event)}", "bold")
            case events.Done():
                self.close()
                self._line(describe(event), "bold green")
            case events.Failure() | events.Error():
                self._line(describe(event), "bold red")
            case events.Waiting() | events.Paused() | events.Warning() | events.PairingFailed():
                self._line(describe(event), "yellow")
            case _:
                self._line(describe(event), "dim")

    def close(self) -> None:
        """Stop redrawing; what was shown stays."""
        self._progress.stop()

    def _line(self, text: str, style: str) -> None:
        if text:
            self._console.print(Text(_lines(text), style=style), soft_wrap=True)

    def _show_step(self, event: events.Step) -> None:
        if self._task is None:
            self._progress.start()
            self._task = self._progress.add_task(
                "", total=self._total_steps, steps="", loss="", speed=""
            )
        of_all = f"/{self._total_steps}" if self._total_steps else ""
        self._progress.update(
            self._task,
            completed=event.step,
            steps=f"step {event.step}{of_all}",
            loss=f"{event.loss:.4f}",
            speed=f"{event.samples_per_s:,.1f}",
        )


def _lines(text: str) -> str:
    return "\n".join(map(one_line, text.split("\n")))


def _cell(text: str) -> Text:
    return Text(one_line(text))


def plan_table(event: events.Plan) -> Table:
    """Which devices compute which layers, then the devices not used with their reasons."""
    table = Table()
    table.add_column("device")
    table.add_column("computes")
    for stage in event.stages:
        table.add_row(_cell(devices_text(stage)), _cell(layers_text(stage)))
    for left_out in event.left_out:
        table.add_row(_cell(left_out.name), _cell(f"not used: {left_out.reason}"))
    return table
