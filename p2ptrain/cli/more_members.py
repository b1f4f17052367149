"""The members for further devices of this machine: each a process, under one command.

    p2ptrain join --device mps,cpu
        this process: a member on mps, in DIR
        child:        a member on cpu, in DIR/device-2

They start once this member listens. They share the machine's network interface, of which planners
know by MACHINE_VARIABLE. A child that ends is started again, less and less often; all leave before
this command ends, and none stays where it is killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Self

from p2ptrain import events
from p2ptrain.aio.tasks import end_program
from p2ptrain.cli import pairing_code
from p2ptrain.cli.arguments import NodeOptions
from p2ptrain.cli.output import Output
from p2ptrain.devices.request import MACHINE_VARIABLE
from p2ptrain.events import Event, Pairing, Ready
from p2ptrain.manners.settings import Manners
from p2ptrain.mesh.identity.state_folder import StateFolder

LEAVE_SECONDS = 30.0
"""For a child to move its work away."""

AGAIN_SECONDS = (2.0, 10.0, 60.0, 300.0)
"""Between two starts of a child, one after the other."""

STEADY_SECONDS = 600.0
"""A child that has run so long begins with the first of these again."""

LINE_LIMIT_BYTES = 16 << 20

WITH_PARENT = "P2PTRAIN_ENDS_WITH_STDIN"
"""Set for a child: it ends when its stdin does, which the system closes with this process."""


class MoreMembers:
    """See the module. An async context manager around this device's own member.

    Args:
        devices: of the children.
        options: of this device's own member.
        output: where what they say goes, behind the device's name.
    """

    def __init__(self, devices: Sequence[str], options: NodeOptions, output: Output) -> None:
        self._devices = devices
        self._options = options
        self._output = output
        self._listens: asyncio.Future[tuple[str, int]] = asyncio.get_running_loop().create_future()
        self._invite: asyncio.Future[Callable[[], str]] = asyncio.get_running_loop().create_future()
        self._code: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        if self._devices:
            os.environ.setdefault(MACHINE_VARIABLE, secrets.token_hex(8))
        for number, device in enumerate(self._devices, 2):
            keeping = self._keep_running(device, number)
            self._tasks.append(asyncio.create_task(keeping, name=f"member on {device}"))
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def seen_by(self, show: Callable[[Event], None]) -> Callable[[Event], None]:
        """`show`, and what is seen of this member's events here."""

        def see(event: Event) -> None:
            if isinstance(event, Ready) and not self._listens.done():
                self._listens.set_result((event.address, event.port))
            if isinstance(event, Pairing) and not self._code.done():
                self._code.set_result(event.code)
            show(event)

        return see

    def invites_by(self, invite: Callable[[], str]) -> None:
        """How this member opens its pairing window."""
        if not self._invite.done():
            self._invite.set_result(invite)

    async def _keep_running(self, device: str, number: int) -> None:
        from p2ptrain.mesh.config import peer_text

        address, port = await self._listens
        invite = await self._invite
        loop, failures = asyncio.get_running_loop(), 0
        while True:
            began = loop.time()
            exit_code = await self._run(device, number, peer_text(address, port), invite)
            failures = 0 if loop.time() - began > STEADY_SECONDS else failures
            seconds = AGAIN_SECONDS[min(failures, len(AGAIN_SECONDS) - 1)]
            failures += 1
            self._output.show(
                events.Warning(
                    f"the member on {device} has ended with exit code {exit_code}: it is started "
                    f"again in {seconds:.0f} s"
                )
            )
            await asyncio.sleep(seconds)

    async def _run(self, device: str, number: int, peer: str, invite: Callable[[], str]) -> int:
        """One child, until it ends; where this is cancelled it leaves."""
        from p2ptrain.mesh.trust.trust_store import is_paired  # here: it loads cryptography

        own = Path(self._options["state_dir"])
        folder, code = own / f"device-{number}", self._options["code"]
        if code is None and not is_paired(StateFolder(folder)):
            # A device that has paired lets it in; a new one makes a code first.
            code = invite() if is_paired(StateFolder(own)) else await self._code
        environment = {**os.environ, WITH_PARENT: "1"}
        if code is not None:  # an argument could be read by every user of this machine
            environment[pairing_code.VARIABLE] = code
        child = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "p2ptrain", "join"),
            *self._arguments(device, number, folder, peer),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=environment,
            limit=LINE_LIMIT_BYTES,
            start_new_session=True,  # Ctrl-C is for this process, which ends the others in order
        )
        try:
            await self._forward(device, child)
            return await child.wait()
        finally:
            await end_program(child, LEAVE_SECONDS)

    def _arguments(self, device: str, number: int, folder: Path, peer: str) -> list[str]:
        options = self._options
        found = ["--device", device, "--state-dir", str(folder)]
        if options["name"] is not None:
            found += ["--name", f"{options['name']}-{number}"]
        for one in (peer, *options["peers"]):
            found += ["--peer", one]
        for one in options["interfaces"]:
            found += ["--interface", one]
        for one in options.get("only_for", ()):
            found += ["--only-for", one]
        if options["memory_bytes"] is not None:
            found += ["--memory", str(options["memory_bytes"])]
        if options["threads"] is not None:
            found += ["--threads", str(options["threads"])]
        found += _of_manners(options.get("manners"))
        return [*found, "--json"] if self._output.json else found

    async def _forward(self, device: str, child: asyncio.subprocess.Process) -> None:
        assert child.stdout is not None
        while line := await child.stdout.readline():
            text = line.decode(errors="replace").rstrip()
            if not self._output.json:
                text = f"{device}: {text}"
            elif '"event":"stopped"' in text.replace(" ", ""):  # this command has not
                continue
            self._output.writer.write(text)


def _of_manners(manners: Manners | None) -> list[str]:
    """They are of the machine's person, and so of all its members."""
    if manners is None:
        return []
    found = ["--when-idle"] if manners.when_idle else []
    found += [
        "--max-cpu",
        f"{100 * manners.max_cpu:.15g}%",
        "--on-battery",
        str(manners.on_battery),
    ]
    if manners.max_temperature is not None:
        found += ["--max-temperature", f"{manners.max_temperature:.15g}"]
    if (quiet := manners.quiet) is not None:
        ends = (divmod(minute, 60) for minute in (quiet.begin_minute, quiet.end_minute))
        found += ["--quiet-hours", "-".join(f"{hour}:{minute:02}" for hour, minute in ends)]
    return found


def end_with_stdin(stop: asyncio.Event) -> None:
    """Set `stop` once stdin is closed."""
    loop = asyncio.get_running_loop()

    def wait() -> None:
        with contextlib.suppress(OSError):
            while os.read(0, 4096):
                pass
        with contextlib.suppress(RuntimeError):  # the loop has ended before
            loop.call_soon_threadsafe(stop.set)

    threading.Thread(target=wait, name="stdin", daemon=True).start()
