"""Failpoints: each stands in the code once, fires where it is meant to, and costs nothing else."""

from __future__ import annotations

import ast
import asyncio
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from p2ptrain import failpoints
from p2ptrain.errors import InternalError, OptionError

SOURCE = Path(failpoints.__file__).parent


@pytest.fixture(autouse=True)
def _disarmed() -> Iterator[None]:
    yield
    failpoints.disarm()


def _reached_in_source() -> Counter[str]:
    """The first argument of every call of `reach`, `reach_now` or a `_reach` of an object's own."""
    found: Counter[str] = Counter()
    for path in sorted(SOURCE.rglob("*.py")):
        text = path.read_text()
        if "reach" not in text:
            continue
        for node in ast.walk(ast.parse(text)):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            if node.func.attr not in ("reach", "reach_now", "_reach", "_reach_now"):
                continue
            name = node.args[0] if node.args else None
            if isinstance(name, ast.Constant) and isinstance(name.value, str):
                found[name.value] += 1
    return found


def test_every_failpoint_is_reached_at_one_place() -> None:
    assert _reached_in_source() == Counter(list(failpoints.NAMES))


async def test_a_failpoint_fires_once_where_it_is_meant_to() -> None:
    hits: list[failpoints.Reached] = []
    failpoints.arm("update.before", hits.append, device="b", stage=1, count=2)
    assert failpoints.armed
    for device, stage, step in (("a", 1, 0), ("b", 0, 0), ("b", 1, 0), ("b", 1, 1), ("b", 1, 2)):
        await failpoints.reach("update.before", device=device, stage=stage, step=step)
        await failpoints.reach("update.after", device=device, stage=stage, step=step)
    assert hits == [failpoints.Reached("update.before", "b", 1, 1)]


async def test_a_device_waits_for_what_the_action_gives() -> None:
    thawed = asyncio.get_running_loop().create_future()
    failpoints.arm("update.before", lambda _: thawed)
    frozen = asyncio.create_task(failpoints.reach("update.before", device="a"))
    await asyncio.sleep(0)
    assert not frozen.done()
    thawed.set_result(None)
    await frozen


def test_where_a_place_cannot_wait_the_action_is_done_all_the_same() -> None:
    hits: list[failpoints.Reached] = []
    failpoints.arm("commit.receive.before", hits.append)
    failpoints.reach_now("commit.receive.before", device="a", stage=2, step=7)
    assert hits == [failpoints.Reached("commit.receive.before", "a", 2, 7)]


def test_nothing_is_armed_before_and_after() -> None:
    assert not failpoints.armed
    failpoints.arm("update.before", lambda _: None)
    failpoints.disarm()
    assert not failpoints.armed


async def test_there_is_no_other_failpoint() -> None:
    with pytest.raises(InternalError):
        failpoints.arm("update.during", lambda _: None)
    failpoints.arm("update.before", lambda _: None)
    with pytest.raises(InternalError):
        await failpoints.reach("update.during", device="a")


@pytest.mark.parametrize(
    "words",
    [
        "update.during:kill",
        "update.before",
        "update.before:explode",
        "update.before:stage=x:kill",
        "update.before:device=b:kill",
    ],
)
def test_a_process_says_what_it_does_not_understand(words: str) -> None:
    with pytest.raises(OptionError, match=failpoints.ENVIRONMENT):
        failpoints.arm_from({failpoints.ENVIRONMENT: words})


def test_a_process_without_the_variable_arms_nothing() -> None:
    failpoints.arm_from({})
    assert not failpoints.armed


def test_a_process_kills_itself_where_its_environment_says() -> None:
    program = (
        "import asyncio, os\n"
        "from p2ptrain import failpoints\n"
        "failpoints.arm_from(os.environ)\n"
        "async def come(step):\n"
        "    await failpoints.reach('update.before', device='a', stage=1, step=step)\n"
        "    print(step, flush=True)\n"
        "async def main():\n"
        "    for step in range(5):\n"
        "        await come(step)\n"
        "asyncio.run(main())\n"
    )
    environment = {failpoints.ENVIRONMENT: "update.after:exit,update.before:stage=1:step=3:kill"}
    result = subprocess.run(
        [sys.executable, "-c", program],
        env={"PYTHONPATH": str(SOURCE.parent), **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.stdout.split() == ["0", "1", "2"], result.stderr
    assert result.returncode == -9
