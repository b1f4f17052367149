"""Bad planning files: exit code 1 and one line that names the file and the field or device."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from p2ptrain.cli import main
from p2ptrain.errors import OptionError
from p2ptrain.job import planning_files as files
from p2ptrain.plan.types.cluster import ClusterLink
from p2ptrain.plan.types.request import PlanRequest
from p2ptrain.tiling.planning.make_plan import make_plan
from tests.support import planning_examples

Content = dict[str, Any]
Change = Callable[[Content], object]

MODEL = planning_examples.profile([(0.1, 0.2)] * 3, parameter_bytes=1000, activation_bytes=100)
HOUSE = planning_examples.cluster("laptop", "pi", link=ClusterLink(1e6, 0.0), memory_bytes=10**6)
PLAN = make_plan(MODEL, HOUSE, PlanRequest(8, 2, planner="pp"))


class Room:
    """A folder with good files, of which a test spoils one."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.folder, self._capsys = folder, capsys
        self.contents: dict[str, Content] = {
            "profile": MODEL.to_json(),
            "cluster": HOUSE.to_json(),
            "plan": PLAN.to_json(),
        }

    def path(self, name: str) -> Path:
        return self.folder / f"{name}.json"

    def spoil(self, name: str, change: Change) -> None:
        content = copy.deepcopy(self.contents[name])
        change(content)
        self.path(name).write_text(json.dumps(content))

    def argv(self, command: str) -> list[str]:
        for name, content in self.contents.items():
            if not self.path(name).exists():
                self.path(name).write_text(json.dumps(content))
        given = ["--profile", str(self.path("profile")), "--cluster", str(self.path("cluster"))]
        if command == "plan":
            return ["plan", *given, "--batch-size", "8"]
        return ["simulate", *given, "--plan", str(self.path("plan"))]

    def clear(self) -> None:
        """Forget what commands have said."""
        self._capsys.readouterr()

    def error(self, command: str, *more: str) -> str:
        """The one line of a command that fails with exit code 1."""
        assert main.main([*self.argv(command), *more]) == 1
        captured = self._capsys.readouterr()
        assert captured.out == ""
        assert captured.err.startswith("p2ptrain: error: ")
        assert captured.err.count("\n") == 1
        assert "internal" not in captured.err
        return captured.err


@pytest.fixture
def room(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Room:
    return Room(tmp_path, capsys)


def unit(**values: object) -> Change:
    return lambda content: content["units"][1].update(values)


def device(**values: object) -> Change:
    return lambda content: content["devices"][1].update(values)


def link(**values: object) -> Change:
    whole = {"from": "laptop", "to": "pi", "bytes_per_s": 1000, "latency_s": 0.0}
    return lambda content: content.update(links=[whole | values])


def time(value: object) -> Change:
    return lambda content: content["times"]["1"]["forward"].__setitem__(1, value)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("profile", lambda c: c.pop("input_bytes"), 'the field "input_bytes" is missing'),
        ("profile", lambda c: c.update(speed=1), 'unknown field "speed"'),
        ("profile", lambda c: c.update(format="p2ptrain.profile/2"), "profile.format: expected"),
        ("profile", lambda c: c.update(units=[]), "at least one unit"),
        ("profile", lambda c: c.update(units={}), "profile.units: expected a list"),
        ("profile", lambda c: c.update(model=""), "profile.model: expected a text"),
        ("profile", lambda c: c.update(model="a\nb"), "profile.model: 'a\\nb' holds a control"),
        ("profile", unit(parameter_bytes=-1), "units[1].parameter_bytes: expected at least 0"),
        ("profile", unit(parameter_bytes=1.5), "units[1].parameter_bytes: expected a whole"),
        ("profile", unit(activation_bytes=10**30), "units[1].activation_bytes: expected at most"),
        ("profile", unit(output_bytes="12"), "units[1].output_bytes: expected a whole number"),
        ("profile", unit(output_bytes=True), "units[1].output_bytes: expected a whole number"),
        ("profile", unit(name="\ud800"), "units[1].name: '\\ud800' holds a control"),
        ("profile", unit(x=1), 'profile.units[1]: unknown field "x"'),
        ("profile", lambda c: c.update({"\x1b[31m": 1}), 'unknown field "?[31m"'),
        ("profile", lambda c: c.update(times={}), "times: expected times by batch size"),
        ("profile", lambda c: c.update(times={"0": c["times"]["1"]}), "must be at least 1"),
        ("profile", lambda c: c.update(times={"-4": c["times"]["1"]}), "must be a whole number"),
        ("profile", lambda c: c["times"]["1"]["forward"].pop(), "2 forward times but 3 backward"),
        ("profile", lambda c: c["units"].pop(), "3 times a batch size for 2 units"),
        ("profile", time(-0.1), 'times["1"].forward[1]: expected at least 0'),
        ("profile", time(float("nan")), 'times["1"].forward[1]: expected a finite number'),
        ("profile", time(float("inf")), 'times["1"].forward[1]: expected a finite number'),
        ("profile", time(1e300), 'times["1"].forward[1]: expected at most'),
        ("profile", time("0.1"), 'times["1"].forward[1]: expected a number'),
        ("profile", time(False), 'times["1"].forward[1]: expected a number'),
        ("profile", time(None), 'times["1"].forward[1]: expected a number'),
        ("cluster", lambda c: c.update(devices=[]), "cluster.devices: no device at all"),
        ("cluster", lambda c: c["devices"][0].pop("holder"), "exactly one device must have"),
        ("cluster", device(holder=True), "found 2 ['laptop', 'pi']"),
        ("cluster", device(name="laptop"), 'the name "laptop" is given twice'),
        ("cluster", device(name=7), "cluster.devices[1].name: expected a text"),
        ("cluster", device(slowdown=0), "cluster.devices[1].slowdown: expected at least"),
        ("cluster", device(memory_bytes=-1), "devices[1].memory_bytes: expected at least 0"),
        ("cluster", device(holder=1), "cluster.devices[1].holder: expected true or false"),
        ("cluster", device(times={}), "cluster.devices[1].times: expected times by batch size"),
        (
            "cluster",
            device(times={"1": {"forward": [1], "backward": [1]}}),
            'the times of device "pi" are of 1 units, the profile has 3',
        ),
        ("cluster", link(bytes_per_s=0), "cluster.links[0].bytes_per_s: expected at least"),
        ("cluster", link(bytes_per_s=1e-300), "links[0].bytes_per_s: expected at least"),
        ("cluster", link(latency_s=-1), "cluster.links[0].latency_s: expected at least 0"),
        ("cluster", link(to="nas"), 'cluster.links: "nas" is not among the devices'),
        ("cluster", link(to="laptop"), 'a link from "laptop" to itself'),
        ("cluster", lambda c: c.update(links=[7]), "cluster.links[0]: expected an object"),
        (
            "cluster",
            lambda c: c.pop("default_link"),
            'links does not list "laptop" to "pi"',
        ),
        ("plan", lambda c: c["stages"].pop(), "plan.stages: they end at layer"),
        ("plan", lambda c: c["stages"][-1].update(units=[1, 9]), "end at layer 9, of 3 layers"),
        ("plan", lambda c: c["stages"][0]["devices"][0].update(name="x"), '"x" is not in the'),
        ("plan", lambda c: c["stages"][0].update(warmup=9), "stages[0].warmup: 9 must lie"),
        ("plan", lambda c: c.update(micro_batches=0), "plan.micro_batches: expected at least 1"),
        ("plan", lambda c: c.pop("micro_batches"), 'the field "micro_batches" is missing'),
    ],
)
def test_a_wrong_field_is_named(room: Room, name: str, change: Change, message: str) -> None:
    room.spoil(name, change)
    error = room.error("simulate" if name == "plan" else "plan")
    assert message in error
    if "times of device" not in message:
        assert f"{name}.json: {name}" in error


def test_whole_numbers_may_be_written_with_a_point_or_an_exponent(room: Room) -> None:
    room.spoil("profile", unit(parameter_bytes=4.0, flops=1e6))
    room.spoil("cluster", device(memory_bytes=4e9))
    assert main.main([*room.argv("plan"), "--planner", "single"]) == 0


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "the file is empty"),
        (b" \n", "the file is empty"),
        (b"{", "not JSON: Expecting property name"),
        (b"\xff\xfe{", "not UTF-8 text (byte 0)"),
        (b"[" * 100_000, "nested too deeply"),
        (b"1" * 5000, "not JSON that can be read here"),
        (b"[]", "expected an object, found []"),
        (b"null", "expected an object, found None"),
        (b'{"a": 1, "b": 2, "a": 3}', 'the field "a" is given twice'),
    ],
)
@pytest.mark.parametrize("name", ["profile", "cluster", "plan"])
def test_a_file_that_is_none_is_named(room: Room, name: str, content: bytes, message: str) -> None:
    room.path(name).write_bytes(content)
    error = room.error("simulate")
    assert f"{name}.json: " in error
    assert message in error


class ComparedKey(str):
    """A key that counts how often keys are compared."""

    compared = 0

    def __eq__(self, other: object) -> bool:
        ComparedKey.compared += 1
        return str.__eq__(self, other)

    __hash__ = str.__hash__


def test_a_key_given_twice_among_many_is_found_at_once() -> None:
    """Each was compared with all others: minutes for a file of some megabytes."""
    keys = [*map(str, range(2000)), "1999"]
    with pytest.raises(OptionError, match='the field "1999" is given twice'):
        files._object([(ComparedKey(key), None) for key in keys])
    assert ComparedKey.compared < 10 * len(keys)


def test_a_byte_order_mark_is_harmless(room: Room) -> None:
    room.path("profile").write_bytes(b"\xef\xbb\xbf" + json.dumps(MODEL.to_json()).encode())
    assert main.main([*room.argv("plan"), "--planner", "single"]) == 0


def test_missing_files_and_folders_are_named(room: Room) -> None:
    argv = room.argv("plan")
    room.path("profile").unlink()
    room.path("profile").mkdir()
    assert "profile.json: cannot be read: Is a directory" in room.error("plan")
    room.path("profile").rmdir()
    assert main.main(argv) == 1


def test_a_huge_file_is_not_read_whole(room: Room, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "LARGEST_BYTES", 2**20)
    room.path("cluster").write_bytes(b" " * (2**20 + 1))
    assert "cluster.json: larger than 1 MiB" in room.error("plan")


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (
            ["--batch-size", "1000000000", "--micro-batch", "1"],
            "1000000000 micro-batches of 1 samples are more than 100000: choose larger ones",
        ),
        (["--exclude", "nas"], 'no device "nas" in the cluster (known: laptop, pi)'),
        (["--require", "nas"], 'no device "nas" in the cluster'),
        (["--cap", "nas=0.5"], 'no device "nas" in the cluster'),
        (["--exclude", "pi", "laptop"], "no device is left"),
        (["--exclude", "laptop", "--private"], "needs laptop, which has the data"),
        (["--cap", "pi=0.2", "--cap", "laptop=0.2"], "allow only 0.4 of the work"),
        (["--cap", "pi=0.1", "--planner", "pp"], "more than its --cap of 0.1: raise it"),
    ],
)
def test_what_cannot_be_asked_is_named(room: Room, more: list[str], message: str) -> None:
    assert message in room.error("plan", *more)


def test_too_little_memory_names_the_unit_and_the_bytes(room: Room) -> None:
    for number in (0, 1):
        room.contents["cluster"]["devices"][number]["memory_bytes"] = 10
    error = room.error("plan")
    assert 'layer "unit0" needs 3.1 kB, and no device has more than the 10' in error
    assert "3.09 kB missing" in error


@pytest.mark.parametrize(
    "more",
    [
        ["--planner", "best"],
        ["--planner", "tiles", "--grid", "2x"],
        ["--planner", "tiles", "--groups", "0-3,3-4"],
        ["--batch-size", "0"],
        ["--micro-batch", "x"],
        ["--cap", "pi"],
        ["--cap", "pi=0"],
        ["--cap", "pi=1.5"],
        ["--cap", "pi=nan"],
        ["--mode", "later"],
        ["--exclude"],
    ],
)
def test_wrong_usage_is_exit_code_2(room: Room, more: list[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main.main([*room.argv("plan"), *more])
    assert end.value.code == 2


@pytest.mark.parametrize(
    "more",
    [
        ["--grid", "2x3"],
        ["--groups", "0-3", "--compare"],
        ["--exclude", "pi", "--require", "pi"],
        ["--schedule", "zero-bubble", "--mode", "async"],
    ],
)
def test_options_that_contradict_each_other_are_exit_code_2(room: Room, more: list[str]) -> None:
    assert main.main([*room.argv("plan"), *more]) == 2


def test_usage_found_late_is_exit_code_2(room: Room) -> None:
    assert main.main([*room.argv("plan"), "--cap", "pi=0.5", "--cap", "pi=0.6"]) == 2
    assert main.main([*room.argv("plan"), "--out", str(room.folder / "no" / "p.json")]) == 2
    assert main.main([*room.argv("simulate"), "--gantt", str(room.folder / "no" / "g.svg")]) == 2


def test_a_batch_size_that_is_not_the_plans_is_refused(room: Room) -> None:
    message = "plan.micro_batches: 4, but 20 samples are 10 micro-batches of 2"
    assert message in room.error("simulate", "--batch-size", "20")


def test_the_installed_command_ends_the_same_way(room: Room) -> None:
    room.spoil("cluster", link(bytes_per_s=0))
    done = subprocess.run(
        [sys.executable, "-m", "p2ptrain", *room.argv("plan"), "--json"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    message = json.loads(done.stdout)["message"]
    assert message == f"{room.path('cluster')}: " + (
        "cluster.links[0].bytes_per_s: expected at least 1e-09, found 0"
    )


def test_a_cluster_may_be_a_household_in_toml(room: Room, tmp_path: Path) -> None:
    good, wrong = tmp_path / "good.toml", tmp_path / "wrong.toml"
    good.write_text('rate = "100mbit"\n[[device]]\nname = "a"\ncount = 2\ncores = 0.5\n')
    wrong.write_text("[[device]\n")
    argv = room.argv("plan")
    argv[argv.index("--cluster") + 1] = str(good)
    assert main.main([*argv, "--planner", "single"]) == 0
    room.clear()
    assert "wrong.toml: not TOML: " in room.error("plan", "--cluster", str(wrong))
