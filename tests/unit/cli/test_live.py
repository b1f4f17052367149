"""A run on a terminal: lines of what happens above a view of the job and its devices."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace

import pytest
from rich.cells import cell_len
from rich.console import Console
from rich.file_proxy import FileProxy
from rich.live import Live

from p2ptrain import events
from p2ptrain.cli.live import LiveRenderer, SeenByEvents
from p2ptrain.cli.screen import Space, as_text, user_console, whole
from p2ptrain.net.forms import write_form
from p2ptrain.net.read_form import read_form
from p2ptrain.page.state import PageState
from p2ptrain.page.view import Seen, page_state
from tests.support.page_member import PLAN, course, status, step, trusted

ENERGY = "0.125 J a sample, 50 J so far (laptop: its processor and memory (RAPL))"
LIMIT = "pi limits: pi computes for 95% of each round of 0.3 s"
RUNNING = replace(
    course(PLAN, *map(step, range(1, 41)), events.Eval(40, {"accuracy": 0.978})),
    limit=LIMIT,
    energy=ENERGY,
)
STATE = page_state(
    Seen(status(), (trusted("tablet"),), "0.1.0", RUNNING, begun_at=1.0), may_change=True
)


def _shown(*happened: events.Event, columns: int = 80, steps: int | None = 2) -> list[str]:
    """What a terminal without colours is sent, by its lines."""
    out = io.StringIO()
    console = Console(
        file=out, force_terminal=True, width=columns, height=24, color_system=None, markup=False
    )
    live = LiveRenderer(console, SeenByEvents("Net", steps, "laptop"))
    for event in happened:
        live.show(event)
    live.close()
    return out.getvalue().splitlines()


def test_a_run_shows_its_parts_and_stays_on_the_screen() -> None:
    done = events.Done(steps=2, seconds=1.5, samples_per_s=64.0, out="w.safetensors")
    lines = _shown(events.Member("[bold]x", "alive"), PLAN, step(1), step(2), done)
    text = "\n".join(lines)
    assert lines[0] == "[bold]x is here"
    for words in (
        *("First plan: batches in 4 pieces of 8", "Done: Net, 2 steps", "100%", "loss 0.5000"),
        *("pi ", "desk ", "phone "),
    ):
        assert words in text
    assert (
        lines[-1].removeprefix("\x1b[?25h")
        == "done: 2 steps in 1.5 s (64.0 samples/s), weights in w.safetensors"
    )
    assert "\x1b[?25l" not in text.partition("\x1b[?25h")[2]  # the cursor is there all the time


def test_status_has_the_energy_of_the_job() -> None:
    lines = as_text(STATE, io.StringIO(), is_terminal=False).splitlines()
    assert f"Energy: {ENERGY}" in lines


def test_a_job_whose_energy_no_device_can_tell_says_so_at_its_end() -> None:
    done = events.Done(2, 1.5, 64.0, None, energy_missing={"desk": "no counter"})
    assert _shown(PLAN, done)[-1].endswith("(64.0 samples/s, energy not measurable)")


class _Stuck(io.StringIO):
    """A terminal that stands still."""

    def __init__(self) -> None:
        super().__init__()
        self.began, self.goes_on = threading.Event(), threading.Event()

    def write(self, text: str) -> int:
        self.began.set()
        self.goes_on.wait()
        return super().write(text)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on Windows")
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_what_a_forked_child_prints_waits_for_nobody(capfd: pytest.CaptureFixture[str]) -> None:
    stuck = _Stuck()
    console = Console(file=stuck, force_terminal=True)
    live = Live(console=console, auto_refresh=False)
    drawing = threading.Thread(target=live.start)
    drawing.start()
    stuck.began.wait()
    with contextlib.ExitStack() as stack:
        stack.callback(drawing.join)
        stack.callback(stuck.goes_on.set)
        stack.enter_context(_redirected(console))
        child = os.fork()
        if child == 0:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(5)
            print("worker")  # noqa: T201
            sys.stdout.flush()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
    live.stop()
    assert "worker" in capfd.readouterr().out


@contextlib.contextmanager
def _redirected(console: Console) -> Iterator[None]:
    """As `Live` redirects what a process prints."""
    before = sys.stdout
    sys.stdout = FileProxy(console, before)
    try:
        yield
    finally:
        sys.stdout = before


def test_an_election_is_no_line() -> None:
    assert _shown(events.Coordinator(name="pi", term=3)) == []


def test_a_command_to_be_copied_is_on_a_line_of_its_own() -> None:
    assert _shown(events.Pairing("31415926"))[1] == "  p2ptrain join --code 31415926"


@pytest.mark.parametrize("columns", [40, 60, 80, 120])
def test_no_line_is_longer_than_the_terminal_is_wide(columns: int) -> None:
    out = io.StringIO()
    console = Console(file=out, width=columns, color_system=None)
    odd = replace(STATE.devices[0], name="x" * 64, sentence="\u53f0\u6240" * 99)
    many = (*STATE.devices, *(replace(odd, name=f"pi-{n}") for n in range(500)), odd)
    console.print(whole(replace(STATE, devices=many), Space(columns, 24)))
    lines = out.getvalue().splitlines()
    assert max(map(cell_len, lines)) <= columns
    assert any("and 495 more" in line for line in lines)
    assert _shown(events.Warning("a " * 99), PLAN, step(1), columns=columns)


def test_what_devices_say_of_themselves_is_shown_where_there_is_room() -> None:
    said = replace(STATE.devices[0], others_cpu_percent=35, battery_percent=80, temperature_c=61)
    state = replace(STATE, devices=(said, *STATE.devices[1:]))
    for columns, is_shown in ((80, False), (140, True)):
        console = Console(file=io.StringIO(), width=columns)
        with console.capture() as capture:
            console.print(whole(state, Space(columns)))
        assert ("35% used, 80%, 61 C" in capture.get()) is is_shown


def test_without_a_terminal_a_line_is_a_line() -> None:
    lines = as_text(STATE, io.StringIO(), is_terminal=False).splitlines()
    assert "\x1b" not in "".join(lines)
    assert "Training Net: step 40 of 100" in lines
    assert any(line.startswith("loss 0.5000   100.0 samples/s (plan: 120)") for line in lines)
    assert any(line.endswith("at step 40: accuracy 0.978   1 min left") for line in lines)
    assert f"Now: {LIMIT}" in lines
    (pi,) = (line for line in lines if line.startswith("pi "))
    assert pi.endswith("2 kB planned of 8 GB  Computes layers b to c, 5 of 8 samples.")


@pytest.mark.parametrize(
    ("environment", "encoding"),
    [
        ({"LANG": "C", "LC_CTYPE": "C.UTF-8"}, "ascii"),  # as Python leaves it
        ({"LC_ALL": "POSIX", "LANG": "de_DE.UTF-8"}, "ascii"),
        ({"LANG": "C", "LC_ALL": "C.UTF-8"}, "utf-8"),
        ({"LANG": "de_DE.UTF-8"}, "utf-8"),
        ({}, "utf-8"),
    ],
)
def test_where_utf8_is_missing_ascii_is_drawn(
    environment: dict[str, str], encoding: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("LC_ALL", "LC_CTYPE", "LANG"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, "utf-8")
    devices = (replace(STATE.devices[0], name="\u53f0\u6240"), *STATE.devices[1:])
    user_console(stream).print(whole(replace(STATE, devices=devices), Space(80, 24)))
    stream.flush()
    shown = raw.getvalue().decode(encoding)
    assert ("\\u53f0" if encoding == "ascii" else "\u53f0") in shown


def test_a_member_s_answer_reads_back_as_the_same_state() -> None:
    assert read_form(PageState, write_form(STATE), "state", extra=True) == STATE


def test_a_device_alone_says_what_limits_it() -> None:
    seen = SeenByEvents("Net", 40, "laptop")
    seen.note(PLAN)
    seen.note(step(1))
    seen.limit = LIMIT
    assert f"Now: {LIMIT}" in as_text(seen.state(), io.StringIO(), is_terminal=False)
