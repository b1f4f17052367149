"""`train`: script and options become a Job and TrainOptions, and the Node does the rest."""

from __future__ import annotations

import json
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from p2ptrain.cli import main
from p2ptrain.control.borrow import own_lease
from p2ptrain.control.lease import Lender
from p2ptrain.control.member_lock import FolderLock
from p2ptrain.control.server import ControlServer
from p2ptrain.errors import DeviceLost, UserError
from p2ptrain.job.asynchrony import AsyncOptions, FtpipehdOptions
from p2ptrain.plan.types.weight_versions import Weights
from tests.unit.cli.conftest import FakeNode


def test_events_alone_stand_on_stdout(
    node: type[FakeNode], script: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main.main(["train", script, "--json", "--state-dir", str(tmp_path / "s")]) == 0
    captured = capfd.readouterr()
    kinds = [json.loads(line)["event"] for line in captured.out.splitlines()]
    assert kinds == ["ready", "pairing", "step", "step", "done"]
    assert "a script may print" in captured.err


def test_options_reach_the_job_and_the_run(
    node: type[FakeNode], script: str, tmp_path: Path
) -> None:
    argv = ["train", script, "-o", "hidden=6", "--epochs", "2", "--batch-size", "2"]
    argv += ["--micro-batch", "1", "--steps", "5", "--wait-for", "3", "--wait-timeout", "9.5"]
    argv += ["--planner", "pp", "--out", str(tmp_path / "w.safetensors"), "--no-replan", "--fresh"]
    argv += ["--checkpoint", str(tmp_path / "c"), "--private", "--name", "desk"]
    argv += ["--whole-copies", "40"]
    assert main.main([*argv, "--state-dir", str(tmp_path / "s")]) == 0
    ((job, options),) = node.made[0].trained
    assert (job.epochs, job.batch_size, job.micro_batch) == (2, 2, 1)
    assert job.model.in_features == 6
    assert (options.steps, options.wait_for, options.wait_timeout_seconds) == (5, 3, 9.5)
    assert (options.planner, options.replan, options.fresh, options.private) == (
        "pp",
        False,
        True,
        True,
    )
    assert options.whole_copies == 40
    assert (options.out, options.checkpoint) == (tmp_path / "w.safetensors", tmp_path / "c")
    assert node.made[0].options["role"] == "holder"
    assert node.made[0].options["name"] == "desk"


def test_paths_are_meant_where_the_command_began(
    node: type[FakeNode], script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    argv = ["train", script, "--out", "w.safetensors", "--checkpoint", "c", "--state-dir", "s"]
    assert main.main(argv) == 0
    ((_, options),) = node.made[-1].trained
    assert (options.out, options.checkpoint) == (Path("w.safetensors"), Path("c"))
    (tmp_path / "elsewhere").mkdir()
    Path(script).write_text(f"import os; os.chdir('elsewhere')\n{Path(script).read_text()}")
    assert main.main(argv) == 0
    ((_, options),) = node.made[-1].trained
    assert (options.out, options.checkpoint) == (tmp_path / "w.safetensors", tmp_path / "c")


@pytest.mark.parametrize(
    ("argv", "wanted"),
    [
        ([], None),
        (["--mode", "async"], AsyncOptions()),
        (["--mode", "async", "--vertical-sync"], AsyncOptions(Weights.VERTICAL)),
        (["--mode", "async", "--aggregate", "2"], AsyncOptions(aggregate=2)),
        (["--mode", "async", "--versions", "2"], AsyncOptions(Weights.DOUBLE)),
        (["--mode", "async", "--no-stashing"], AsyncOptions(Weights.UNSTASHED)),
        (["--mode", "auto"], AsyncOptions()),
        (["--mode", "auto", "--versions", "2"], AsyncOptions(Weights.DOUBLE)),
    ],
)
def test_without_a_barrier_where_that_is_asked_for(
    node: type[FakeNode], script: str, tmp_path: Path, argv: list[str], wanted: AsyncOptions | None
) -> None:
    assert main.main(["train", script, *argv, "--state-dir", str(tmp_path / "s")]) == 0
    ((_, options),) = node.made[0].trained
    assert (options.asynchrony, options.mode == "auto") == (wanted, "auto" in argv)


@pytest.mark.parametrize(
    ("argv", "wanted"),
    [
        ([], FtpipehdOptions(10, 100, 50, 100)),
        (["--repartition", "3,7"], FtpipehdOptions(3, 7, 50, 100)),
        (["--replicate", "4,8"], FtpipehdOptions(10, 100, 4, 8)),
    ],
)
def test_ftpipehd_does_what_it_does_as_often_as_published_or_as_asked(
    node: type[FakeNode], script: str, tmp_path: Path, argv: list[str], wanted: FtpipehdOptions
) -> None:
    published = ["--mode", "async", "--planner", "ftpipehd", *argv]
    assert main.main(["train", script, *published, "--state-dir", str(tmp_path / "s")]) == 0
    ((_, options),) = node.made[0].trained
    assert options.as_ftpipehd == wanted
    assert replace(options, mode="sync", asynchrony=None).as_ftpipehd is None
    assert replace(options, planner="pp").as_ftpipehd is None


def test_local_needs_no_node(
    node: type[FakeNode], script: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main.main(["train", script, "--local", "--json", "--state-dir", str(tmp_path)]) == 0
    assert node.made == []
    assert json.loads(capfd.readouterr().out)["event"] == "done"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--local", "--wait-for", "2"], "leave out --wait-for"),
        (["--write-cluster", "c.json"], "--write-cluster needs --dry-run"),
        (["--dry-run", "--write-plan", "nowhere/plan.json"], "the folder of"),
        (["--plan", "p.json", "--planner", "pp"], "leave out --planner"),
        (["--plan", "p.json", "--micro-batch", "4"], "leave out --micro-batch"),
        (["--plan", "p.json", "--mode", "auto"], "leave out --mode auto"),
        (["--resume", "/nowhere/at/all"], "folder does not exist"),
        (["--checkpoint", __file__], "is a file"),
        (["--out", "/nowhere/at/all/w.safetensors"], "does not exist"),
        (["-o", "width=3"], "it takes hidden"),
        (["--grid", "2x3"], "--grid and --groups are for --planner tiles, not for auto"),
        (["--planner", "tiles", "--private"], "leave out --private"),
        (["--planner", "dp", "--private"], "use --planner auto or pp"),
        (["--planner", "tiles", "--mode", "async"], "leave out --mode async"),
        (["--vertical-sync"], "--vertical-sync needs --mode async"),
        (["--aggregate", "2"], "--aggregate needs --mode async"),
        (["--mode", "async", "--versions", "2", "--no-stashing"], "not both"),
        (["--mode", "async", "--versions", "2", "--aggregate", "1"], "leave out one"),
        (["--mode", "auto", "--no-stashing"], "needs --mode async"),
        (["--local", "--whole-copies", "9"], "leave out --whole-copies"),
        (["--local", "--device", "cuda:0,cuda:1"], "one device: name one"),
        (
            ["--mode", "async", "--planner", "ftpipehd", "--whole-copies", "9"],
            "use --replicate CHAIN,WHOLE",
        ),
        (
            ["--planner", "ftpipehd", "--replicate", "5,5"],
            "--replicate needs --mode async --planner ftpipehd",
        ),
        (["--mode", "async", "--repartition", "5,5"], "--repartition needs --mode async"),
        (["--notify", "no-such-program-7"], "--notify 'no-such-program-7': there is no such"),
        (["--report-to", "tensorbord"], "give one of wandb, mlflow, trackio"),
    ],
)
def test_wrong_usage_is_reported_before_the_network_is_touched(
    node: type[FakeNode],
    script: str,
    options: list[str],
    words: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main.main(["train", script, *options]) == 2
    assert words in capsys.readouterr().err
    assert node.made == []


def test_a_lost_device_is_named(
    node: type[FakeNode], script: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    async def lose(_: FakeNode) -> None:
        raise DeviceLost("pi stopped answering: start it again", name="pi")

    node.script = lose
    assert main.main(["train", script, "--json", "--state-dir", str(tmp_path / "s")]) == 1
    captured = capfd.readouterr()
    assert json.loads(captured.out.splitlines()[-1]) == {
        "event": "error",
        "message": "pi stopped answering: start it again",
    }
    assert not node.made[0].inside


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_leaves_the_household_and_ends_with_130(
    node: type[FakeNode], script: str, tmp_path: Path, number: int
) -> None:
    async def forever(_: FakeNode) -> None:
        import asyncio

        asyncio.get_running_loop().call_soon(signal.raise_signal, number)
        await asyncio.Event().wait()

    node.script = forever
    assert main.main(["train", script, "--state-dir", str(tmp_path / "s")]) == 130
    assert not node.made[0].inside


def test_two_trains_with_one_folder_do_not_fight(
    node: type[FakeNode], script: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "s"
    messages: list[str] = []

    async def second(made: FakeNode) -> None:
        with FolderLock(folder, "train"):  # as the true node has
            try:
                async with own_lease(folder, "app"):
                    pass
            except UserError as error:
                messages.append(str(error))

    node.script = second
    assert main.main(["train", script, "--state-dir", str(folder)]) == 0
    assert ["already runs with this state folder" in m for m in messages] == [True]


async def test_train_is_a_member_that_answers(tmp_path: Path, node: type[FakeNode]) -> None:
    from p2ptrain.control.client import ControlClient

    fake = node(on_event=lambda _: None, name="desk", port=1, code=None)
    async with ControlServer(tmp_path, Lender(fake, keeps=True)), ControlClient(tmp_path) as client:
        assert (await client.status())["name"] == "desk"


@pytest.mark.parametrize(
    "option",
    [
        *("--wait-for 3", "--planner pp", "--mode async", "--private", "--local", "--no-replan"),
        *("--trace t.json", "--dry-run", "--plan p.json", "--wire bf16", "--fresh", "--grid 2x3"),
        *("--whole-copies 3", "--recovery heavy", "--code 12345678", "--name desk", "--port 0"),
        *("--peer a:1", "--memory 1GB", "--repartition 1,2"),
    ],
)
def test_with_torch_as_engine_what_belongs_to_a_household_is_refused(
    option: str, script: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.main(["train", script, "--engine", "torch", *option.split()]) == 2
    error = capsys.readouterr().err
    assert "--engine torch has no household" in error
    assert error.strip().endswith(f"leave out {option.split()[0]}")
