"""Log files, trackers and the user's command get a run's events; none of them can hurt a run."""

from __future__ import annotations

import json
import struct
import sys
import threading
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from p2ptrain import events
from p2ptrain.api import sinks
from p2ptrain.api.sinks import (
    TRACKERS,
    NotifySink,
    RunSinks,
    Sink,
    SinkThread,
    TensorBoardSink,
    TrackerSink,
)
from p2ptrain.errors import OptionError
from p2ptrain.events import Done, Eval, Event, Step, Waiting

STEPS = [
    Step(1, 0.5, 10.0, 0.1, lr=0.1, lrs=(0.1, 0.2), grad_norm=2.0),
    Step(2, 0.25, 20.0, 0.1, lr=0.05),
    Eval(2, {"accuracy": 0.75}),
]


async def given(sink: Sink, *happened: Event) -> list[str]:
    """What a run says of its sink's troubles."""
    said: list[str] = []

    def warn(event: Event) -> None:
        assert isinstance(event, events.Warning)
        said.append(event.message)

    run = RunSinks([sink], warn)
    for event in happened:
        run.put(event)
    await run.close()
    return said


def scalars(folder: Path) -> dict[tuple[str, int], float]:
    """(tag, step) -> value of the event files of a folder."""
    event_pb2 = pytest.importorskip("tensorboardX.proto.event_pb2")

    found = {}
    for file in folder.iterdir():
        data, at = file.read_bytes(), 0
        while at < len(data):
            (length,) = struct.unpack_from("<Q", data, at)
            event = event_pb2.Event.FromString(data[at + 12 : at + 12 + length])
            for value in event.summary.value:
                if value.HasField("simple_value"):
                    found[value.tag, event.step] = value.simple_value
            at += 16 + length
    return found


async def test_tensorboard_files_have_every_number(tmp_path: Path) -> None:
    assert not await given(TensorBoardSink(tmp_path / "new" / "log"), *STEPS, events.Error("gone"))
    found = scalars(tmp_path / "new" / "log")
    assert found["train/loss", 1] == 0.5
    assert found["train/loss", 2] == 0.25
    assert found["train/lr", 2] == pytest.approx(0.05)
    assert found["train/lr/1", 1] == pytest.approx(0.2)
    assert found["train/samples_per_s", 2] == 20.0
    assert found["train/grad_norm", 1] == 2.0
    assert found["eval/accuracy", 2] == 0.75


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: TensorBoardSink(Path("x")), r"pip install 'p2ptrain\[tensorboard\]'"),
        *((lambda n=n: TrackerSink(n, {}), f"pip install {n}") for n in TRACKERS),
    ],
)
def test_what_is_not_installed_is_refused_with_the_line_that_installs_it(
    monkeypatch: pytest.MonkeyPatch, make: Callable[[], Sink], words: str
) -> None:
    monkeypatch.setattr(sinks, "_has", lambda module: False)
    with pytest.raises(OptionError, match=words):
        make()


@pytest.mark.parametrize("name", TRACKERS)
async def test_trackers_get_the_same_numbers(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    calls: list[tuple[str, Any]] = []

    def note(what: str) -> Callable[..., None]:
        return lambda *given, **named: calls.append((what, given or named))

    names = ("init", "log", "finish", "set_experiment", "start_run", "log_params", "end_run")
    library = types.ModuleType(name)
    for one in (*names, "log_metrics"):
        setattr(library, one, note(one))
    library.__spec__ = types.SimpleNamespace()  # type: ignore[assignment]
    monkeypatch.setitem(sys.modules, name, library)
    assert not await given(TrackerSink(name, {"seed": 3}), *STEPS, events.Error("gone"))
    logged = [given[0] for what, given in calls if what in ("log", "log_metrics")]
    assert [one.get("train/loss") for one in logged] == [0.5, 0.25, None]
    assert logged[2] == {"eval/accuracy": 0.75}
    assert calls[-1][0] in ("finish", "end_run")
    if name == "mlflow":
        assert calls[-1] == ("end_run", ("FAILED",))
        files = {key for one in logged for key in one}  # as which MLflow keeps them
        assert "train/lr.1" in files
        assert not any(one.startswith(f"{other}/") for one in files for other in files)


class Broken(Sink):
    """Fails at its first event."""

    name = "--log-dir"

    def __init__(self) -> None:
        self.taken = 0

    def take(self, event: Event) -> None:
        self.taken += 1
        raise OSError("no space left on the disk")


class Slow(Sink):
    """Takes nothing until `go` is set."""

    name = "slow"

    def __init__(self) -> None:
        self.go = threading.Event()
        self.taken: list[Event] = []

    def begin(self) -> None:
        self.go.wait(10)

    def take(self, event: Event) -> None:
        self.taken.append(event)


async def test_a_sink_that_fails_ends_with_one_warning() -> None:
    sink = Broken()
    said = await given(sink, *STEPS)
    assert said == ["--log-dir has failed and gets no more: no space left on the disk"]
    assert sink.taken == 1


def test_a_slow_sink_misses_the_oldest_and_delays_no_one() -> None:
    sink = Slow()
    thread = SinkThread(sink, most_waiting=2)
    for event in STEPS:
        thread.put(event)
    sink.go.set()
    thread.close()
    assert sink.taken == STEPS[1:]
    assert thread.trouble() == "slow was too slow and has missed 1 events"


def test_one_that_hangs_is_not_waited_for() -> None:
    sink = Slow()
    thread = SinkThread(sink, end_seconds=0.01)
    thread.close()
    assert "not done in time" in (thread.trouble() or "")
    sink.go.set()


async def test_the_command_gets_what_needs_a_person_on_its_input(tmp_path: Path) -> None:
    file, script = tmp_path / "said", tmp_path / "my script.py"
    script.write_text(f"import sys; open({str(file)!r}, 'a').write(sys.stdin.read())")
    bad = f"$(touch {tmp_path}/bad) `touch {tmp_path}/bad`; touch {tmp_path}/bad"
    command = f'"{sys.executable}" -S "{script}"'
    end = Done(2, 1.0, 8.0, None)
    assert not await given(NotifySink(command), *STEPS, Waiting(bad), events.Error(bad), end)
    said = [json.loads(line) for line in file.read_text().splitlines()]
    assert [one["event"] for one in said] == ["waiting", "error", "done"]
    assert said[0]["for"] == said[1]["message"] == bad
    assert not (tmp_path / "bad").exists()


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("import sys; sys.exit('no mail today')", "exit code 1: no mail today"),
        ("import time; time.sleep(60)", "it took longer than 0.2 s"),
    ],
)
async def test_a_command_that_fails_is_a_warning_and_is_run_again(code: str, words: str) -> None:
    command = f'"{sys.executable}" -S -c "{code}"'
    seconds = 0.2 if "longer" in words else 20.0
    said = await given(NotifySink(command, seconds), Waiting("a"), events.Error("b"))
    assert said[-1].startswith("--notify: ")
    assert words in said[-1]


@pytest.mark.parametrize("command", ["", "no-such-program-7 x", "echo 'open"])
def test_what_is_no_command_is_refused_at_once(command: str) -> None:
    with pytest.raises(OptionError, match="--notify"):
        NotifySink(command)
