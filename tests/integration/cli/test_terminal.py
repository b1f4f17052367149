"""Commands on a real terminal: what is seen, and that it is as before in the end."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from p2ptrain.cli.main import main
from p2ptrain.control.lease import Lender, PageAddress
from p2ptrain.control.server import ControlServer
from p2ptrain.page.state import PageState
from tests.support.page_member import status
from tests.unit.cli.test_live import STATE

if sys.platform == "win32":
    pytest.skip("NOT TESTED: no pty on Windows", allow_module_level=True)

from tests.support.terminal import Terminal

_JOB = """
import time, torch, p2ptrain
class Slow(torch.utils.data.Dataset):
    def __len__(self): return 4000
    def __getitem__(self, i):
        time.sleep(0.01)
        return torch.ones(4), torch.ones(1)
def job():
    return p2ptrain.Job(model=torch.nn.Linear(4, 1), data=Slow(), batch_size=8,
        loss=torch.nn.functional.mse_loss, optimizer=p2ptrain.SGD(lr=0.1), epochs=1, seed=0)
"""


def _step_of(text: str) -> int:
    """The step that the view shows; 0 where there is none yet."""
    found = re.search(r"Training Linear: step (\d+) of 500", text)
    return int(found[1]) if found else 0


async def test_a_run_is_seen_while_it_goes_on_and_leaves_the_terminal_as_it_was(
    tmp_path: Path,
) -> None:
    (tmp_path / "job.py").write_text(_JOB)
    arguments = "train", str(tmp_path / "job.py"), "--local", "--state-dir", str(tmp_path / "state")
    async with Terminal(*arguments, environment={"NO_COLOR": "1"}) as terminal:
        await terminal.until(_step_of)
        step = _step_of("\n".join(terminal.lines()))
        terminal.resize(60)
        lines = await terminal.until(lambda text: _step_of(text) > step)
        assert sum("Training Linear" in line for line in lines) == 1  # nothing of the old width
        assert any(line.startswith("First plan") for line in lines)  # what stays, stays
        assert any(line.startswith("here  ") and "Computes" in line for line in lines)
        terminal.signal(signal.SIGTERM)
        assert await terminal.end() == 130
        await terminal.until("Stopped at step")
        assert terminal.is_as_before
        for color in (b"\x1b[3", b"\x1b[9"):
            assert color not in terminal.sent


class _Page:
    state_now: PageState = STATE

    async def state(self) -> object:
        return self.state_now

    async def open(self, *, lan: bool) -> PageAddress:
        raise NotImplementedError

    async def close(self) -> None:
        raise NotImplementedError


@pytest.mark.parametrize("ends", [b"q", b"\x03"])
async def test_top_draws_what_changes_until_a_key(ends: bytes, tmp_path: Path) -> None:
    lender, page = Lender(), _Page()
    lender.page = page
    async with (
        ControlServer(tmp_path, lender),
        Terminal("top", "--state-dir", str(tmp_path)) as terminal,
    ):
        await terminal.until("Training Net: step 40 of 100")
        assert STATE.job is not None
        page.state_now = replace(STATE, job=replace(STATE.job, headline="Done: Net"))
        await terminal.until("Done: Net")
        lender.page = None
        await terminal.until("starting or stopping")
        terminal.press(ends)
        assert await terminal.end() == 0
        assert terminal.is_as_before


class _Member:
    def status(self) -> object:
        return status()


async def test_without_a_terminal_there_are_tables_and_one_object(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    lender = Lender(_Member())  # type: ignore[arg-type]
    lender.page = _Page()

    async def asked(*arguments: str) -> str:
        assert await asyncio.to_thread(main, [*arguments, "--state-dir", str(tmp_path)]) == 0
        return capfd.readouterr().out

    async with ControlServer(tmp_path, lender):
        table = await asked("top")
        assert "\x1b" not in table
        assert "Idle: its link is too slow." in table
        assert await asked("top", "--once") == table
        assert await asked("status") == f"this device: laptop at 127.0.0.1 port 47300\n{table}"
        snapshot = json.loads(await asked("top", "--json"))
        assert snapshot["event"] == "top"
        assert snapshot["job"]["limit"].startswith("pi limits")
        assert json.loads(await asked("status", "--json"))["members"][0]["name"] == "laptop"
