"""`join`: a member until it is stopped, that lends its place to `train` meanwhile."""

from __future__ import annotations

import asyncio
import json
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from p2ptrain.cli import main
from p2ptrain.cli.commands.join import SLEEP_SECONDS
from p2ptrain.cli.commands.member_commands import ask_member
from p2ptrain.control.borrow import own_lease
from p2ptrain.control.lease import LeasedIdentity
from p2ptrain.control.member_lock import (
    ControlRecord,
    FolderBusy,
    FolderLock,
    read_record,
    write_record,
)
from p2ptrain.manners.settings import Manners
from p2ptrain.manners.sleep import SleepWatch
from tests.unit.cli.conftest import FakeNode
from tests.unit.manners.test_sleep import Announcer


def _borrower(folder: Path, use: Callable[[LeasedIdentity], None]) -> threading.Thread:
    """Has the place of the running `join` for as long as `use` takes, as `train` would."""

    async def borrow() -> None:
        async with own_lease(folder, "train") as place:
            await asyncio.to_thread(use, place)

    return threading.Thread(target=lambda: asyncio.run(borrow()), daemon=True)


def _lend_once(node: type[FakeNode], folder: Path, use: Callable[[LeasedIdentity], None]) -> None:
    """Lend the first member's place; stop when it is back."""
    if len(node.made) == 1:
        _borrower(folder, use).start()
    else:
        signal.raise_signal(signal.SIGTERM)


def _events(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_leaves_gracefully(
    node: type[FakeNode], tmp_path: Path, capfd: pytest.CaptureFixture[str], number: int
) -> None:
    node.on_ready = lambda _: signal.raise_signal(number)
    before = signal.getsignal(number)
    assert main.main(["join", "--json", "--state-dir", str(tmp_path)]) == 0
    kinds = [event["event"] for event in _events(capfd.readouterr().out)]
    assert kinds == ["ready", "pairing", "stopped"]
    assert [made.inside for made in node.made] == [False]
    assert signal.getsignal(number) is before


def test_options_reach_the_node(node: type[FakeNode], tmp_path: Path) -> None:
    node.on_ready = lambda _: signal.raise_signal(signal.SIGTERM)
    argv = ["join", "--name", "pi", "--code", "1234-5678", "--peer", "a:1", "--peer", "b"]
    argv += ["--interface", "eth0", "--port", "4001", "--memory", "2GiB", "--threads", "2"]
    argv += ["--device", "cuda:1", "--when-idle", "--max-cpu", "50%", "--on-battery", "slow"]
    argv += ["--max-temperature", "85", "--quiet-hours", "22-7"]
    assert main.main([*argv, "--state-dir", str(tmp_path)]) == 0
    assert node.made[0].options == {
        "name": "pi",
        "code": "12345678",
        "window": None,
        "peers": ("a:1", "b"),
        "interfaces": ("eth0",),
        "port": 4001,
        "memory_bytes": 2 * 1024**3,
        "threads": 2,
        "device": "cuda:1",
        "state_dir": tmp_path,
        "role": "member",
        "has_place": True,
        "only_for": (),
        "manners": Manners(
            when_idle=True,
            max_cpu=0.5,
            on_battery="slow",
            max_temperature=85,
            quiet_hours="22-7",
        ),
    }


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (("--quiet-hours", "25-7"), "'25-7' are no quiet hours: write two times of day such as"),
        (("--max-cpu", "0%"), "'0%' is not a part above 0% and at most 100%"),
        (("--max-temperature", "hot"), "'hot' is not a temperature from 30 to 120 degrees"),
        (("--on-battery", "stop"), "invalid choice: 'stop'"),
    ],
)
def test_manners_that_cannot_be_meant_are_wrong_usage(
    capfd: pytest.CaptureFixture[str], wrong: tuple[str, str], says: str
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main.main(["join", *wrong])
    (line,) = [line for line in capfd.readouterr().err.splitlines() if "error:" in line]
    assert says in line


def test_a_second_join_with_the_folder_is_refused(
    node: type[FakeNode], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with FolderLock(tmp_path, "join"):
        assert main.main(["join", "--state-dir", str(tmp_path)]) == 1
    assert "p2ptrain join (process" in capsys.readouterr().err
    assert node.made == []


def test_the_place_is_lent_and_the_member_comes_back(
    node: type[FakeNode], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A borrower in a thread of its own asks the running member, as `train` would."""
    lent: list[Any] = []

    def use(place: LeasedIdentity) -> None:
        lent.append((place, node.made[0].inside))

    node.on_ready = lambda _: _lend_once(node, tmp_path, use)
    argv = ["join", "--name", "pi", "--json", "--port", "4001", "--state-dir", str(tmp_path)]
    assert main.main(argv) == 0
    ((place, was_inside),) = lent
    assert (place.name, place.port, place.window.code) == ("pi", 4001, "12345678")
    assert not was_inside
    assert [made.options["name"] for made in node.made] == ["pi", "pi"]
    assert [made.options["port"] for made in node.made] == [4001, 4001]
    kinds = [event["event"] for event in _events(capfd.readouterr().out)]
    assert kinds == ["ready", "pairing", "warning", "ready", "pairing", "stopped"]


def test_a_machine_that_sleeps_leaves_first_and_rejoins_once_it_is_awake(
    node: type[FakeNode],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    system = Announcer()
    monkeypatch.setattr("p2ptrain.cli.commands.join.SleepWatch", lambda: SleepWatch(system))

    def sleep(made: FakeNode) -> None:
        assert system.on_sleep is not None
        if len(node.made) > 1:
            signal.raise_signal(signal.SIGTERM)
            return
        system.on_sleep(True)
        system.on_release = lambda: slept(made)

    def slept(made: FakeNode) -> None:
        assert system.on_sleep is not None
        assert (made.inside, made.left_within) == (False, SLEEP_SECONDS)
        system.on_release = lambda: None
        system.on_sleep(False)

    node.on_ready = sleep
    argv = ["join", "--name", "pi", "--json", "--port", "4001", "--state-dir", str(tmp_path)]
    assert main.main(argv) == 0
    assert [made.options["port"] for made in node.made] == [4001, 4001]
    kinds = [event["event"] for event in _events(capfd.readouterr().out)]
    assert kinds == ["ready", "pairing", "warning", "ready", "pairing", "stopped"]


def test_a_closed_window_stays_closed_for_train_and_for_join_after_it(
    node: type[FakeNode], tmp_path: Path
) -> None:
    """A device was removed, or wrong codes were tried, in the ten minutes after the start."""
    lent: list[Any] = []

    def close(made: FakeNode) -> None:
        made.window = None
        _lend_once(node, tmp_path, lambda place: lent.append(place.window))

    node.on_ready = close
    assert main.main(["join", "--code", "12345678", "--state-dir", str(tmp_path)]) == 0
    assert lent == [None]
    assert [(made.options["code"], made.options["window"]) for made in node.made] == [
        ("12345678", None),
        (None, None),
    ]


def test_join_goes_on_with_the_window_that_train_leaves(
    node: type[FakeNode], tmp_path: Path
) -> None:
    def use(place: LeasedIdentity) -> None:
        assert place.window is not None
        place.window = place.window.after_wrong_try()

    node.on_ready = lambda _: _lend_once(node, tmp_path, use)
    assert main.main(["join", "--state-dir", str(tmp_path)]) == 0
    first, second = (made.window for made in node.made)
    assert first is not None
    assert second is not None
    assert (second.code, second.wrong_tries) == (first.code, first.wrong_tries + 1)
    assert second.closes_at == pytest.approx(first.closes_at, abs=60)


def test_stopped_while_its_place_is_lent_it_leaves_the_way_to_the_borrower(
    node: type[FakeNode], tmp_path: Path
) -> None:
    record = ControlRecord("borrower", "ab" * 32, 1)
    join_has_ended = threading.Event()
    refused: list[str] = []

    def use(place: LeasedIdentity) -> None:
        write_record(tmp_path, record)  # as `train` does
        signal.raise_signal(signal.SIGTERM)
        join_has_ended.wait(10.0)
        with pytest.raises(FolderBusy) as busy, FolderLock(tmp_path, "join"):
            pass
        refused.append(busy.value.holder)

    borrower = _borrower(tmp_path, use)
    node.on_ready = lambda _: borrower.start()
    assert main.main(["join", "--state-dir", str(tmp_path)]) == 0
    join_has_ended.set()
    borrower.join(10.0)
    assert [holder.startswith("p2ptrain train (process") for holder in refused] == [True]
    assert read_record(tmp_path) == record
    with FolderLock(tmp_path, "join"):
        pass
    assert len(node.made) == 1


def test_questions_are_answered_meanwhile(
    node: type[FakeNode], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    answers: list[Any] = []

    def ask_it() -> None:
        answers.append(ask_member(tmp_path, lambda client: client.status()))
        answers.append(ask_member(tmp_path, lambda client: client.devices()))
        signal.raise_signal(signal.SIGTERM)

    node.on_ready = lambda _: threading.Thread(target=ask_it, daemon=True).start()
    assert main.main(["join", "--state-dir", str(tmp_path)]) == 0
    assert answers == [node.made[0].status(), node.made[0].devices()]
