"""`p2ptrain top`: the household and its job, as any member sees them, drawn again each second."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from p2ptrain.cli import arguments
from p2ptrain.cli.commands.member_commands import ask_member, state_of
from p2ptrain.cli.output import Output
from p2ptrain.cli.signals import sigterm_interrupts
from p2ptrain.cli.usage import DONE, Command
from p2ptrain.errors import UserError

if TYPE_CHECKING:
    from p2ptrain.page.state import PageState

LOOK_SECONDS = 1.0

KEY_SECONDS = 0.1

_DESCRIPTION = """\
Shows the household live: what each device does and why, the training that runs on it, wherever its
data is, and what limits it. `p2ptrain join` or `train` must be running on this device. Press q or
Ctrl-C to end it; that ends nothing else. In a file or a pipe it prints one table."""

_EXAMPLE = """\
  p2ptrain top                 live, until q
  p2ptrain top --once          one table
  p2ptrain top --json          all that is known now, as one object"""


def run(args: argparse.Namespace, output: Output) -> int:
    """Show it once, or until a key."""
    folder = arguments.state_dir_of(args)
    if output.json:
        sections = ask_member(folder, lambda member: member.state())
        output.result({"event": "top", **sections}, "")
        return DONE
    state = ask_member(folder, state_of)
    if args.once or not output.is_terminal:
        output.result({}, output.draw(state))
        return DONE
    with sigterm_interrupts(), contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_watch(folder, output, state))
    return DONE


async def _watch(folder: Path, output: Output, state: PageState) -> None:
    """Until q. A member that ends may come again, such as `join` after a `train`."""
    from rich.live import Live

    from p2ptrain.cli.screen import Space, user_console, whole
    from p2ptrain.control.client import ControlClient

    loop = asyncio.get_running_loop()
    console = user_console(output.stream)
    with _keys() as pressed, Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            size = console.size
            live.update(whole(state, Space(size.width, size.height)), refresh=True)
            until = loop.time() + LOOK_SECONDS
            while loop.time() < until and console.size == size:
                if "q" in pressed():
                    return
                await asyncio.sleep(KEY_SECONDS)
            try:
                async with ControlClient(folder) as client:
                    state = await state_of(client)
            except UserError as error:
                state = replace(state, household=replace(state.household, notice=str(error)))


if sys.platform == "win32":
    import msvcrt

    @contextlib.contextmanager
    def _keys() -> Iterator[Any]:
        """What was pressed since the last call."""

        def pressed() -> str:
            return msvcrt.getwch().lower() if msvcrt.kbhit() else ""

        yield pressed

else:
    import os
    import select
    import termios
    import tty

    @contextlib.contextmanager
    def _keys() -> Iterator[Any]:
        """What was pressed since the last call. Ctrl-Z is ignored: it would leave the screen so."""
        if not sys.stdin.isatty():
            yield str
            return
        number = sys.stdin.fileno()

        def pressed() -> str:
            ready, _, _ = select.select([number], [], [], 0)
            return os.read(number, 64).decode("latin-1").lower() if ready else ""

        before = termios.tcgetattr(number)
        try:
            tty.setcbreak(number)
            now = termios.tcgetattr(number)
            now[6][termios.VSUSP] = b"\0"
            termios.tcsetattr(number, termios.TCSANOW, now)
            yield pressed
        finally:
            termios.tcsetattr(number, termios.TCSADRAIN, before)


COMMAND = Command(
    "top",
    run,
    "watch the household and its training live",
    _DESCRIPTION,
    _EXAMPLE,
    lambda own: own.flag("--once", "print one table and end"),
)
