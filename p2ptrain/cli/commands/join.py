"""`p2ptrain join`: this device is a member of the household until it is stopped."""

from __future__ import annotations

import argparse
import asyncio
import os
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from p2ptrain import events
from p2ptrain.aio import event_loop
from p2ptrain.aio.tasks import first_set
from p2ptrain.api.loading import load_training
from p2ptrain.cli import arguments, startup
from p2ptrain.cli import output as qr
from p2ptrain.cli.arguments import NodeOptions
from p2ptrain.cli.arguments import name as device_name
from p2ptrain.cli.more_members import WITH_PARENT, MoreMembers, end_with_stdin
from p2ptrain.cli.output import Output, write_to
from p2ptrain.cli.signals import sigterm_interrupts, stop_event
from p2ptrain.cli.usage import DONE, Command, Options, UsageError
from p2ptrain.control.lease import LeasedIdentity, Lender
from p2ptrain.control.member_lock import FolderLock
from p2ptrain.events import Event, Pairing, Stopped
from p2ptrain.manners.settings import Manners, OnBattery
from p2ptrain.manners.sleep import SleepWatch

if TYPE_CHECKING:
    from p2ptrain.control.server import ControlServer
    from p2ptrain.page.scripts import AllowedScripts

SLEEP_SECONDS = 3.5
"""For the others to take over this device's work: systemd waits five seconds before it sleeps."""

REJOINS = "this device has slept, and rejoins the household now"

_DESCRIPTION = """\
Lets this device compute for trainings of the household, until you stop it. The first device
shows a pairing code. Start the others with --code and that code, in any order, each within
10 minutes. Paired devices need no code any more. Ctrl-C or SIGTERM leaves: the other devices
take over this one's work first."""

_EXAMPLE = """\
  p2ptrain join                        on the first device: prints a code, such as 1234 5678
  p2ptrain join --code -               on every other device: asks for it
  p2ptrain join --peer 192.168.1.20    where the network blocks multicast
  p2ptrain join --only-for laptop      computes only for trainings of laptop
  p2ptrain join --when-idle --on-battery pause --quiet-hours 22-7"""


def _options(own: Options) -> None:
    add_options(own)
    own.value(
        "--log-file FILE",
        arguments.path,
        "append everything that is shown to FILE, which is emptied at a start over 1 MB",
    )


def add_options(own: Options) -> None:
    """How this device is a member, which a service keeps."""
    arguments.add_node(own)
    own.values(
        "--only-for NAME",
        device_name,
        "compute only for trainings started on device NAME; may be repeated",
    )
    own.values(
        "--allow-script SCRIPT",
        arguments.path,
        "browsers on this device may start this training from its page; may be repeated",
    )
    _add_manners(own.group("the person at this device"))


def _add_manners(group: Options) -> None:
    """How this device looks after its person."""
    group.flag("--when-idle", "compute only while no person uses this device")
    group.value(
        "--max-cpu PERCENT",
        arguments.percent,
        "compute with pauses: take at most this part of the processor, such as 50%%",
        default=1.0,
    )
    group.choice(
        "--on-battery",
        [one.value for one in OnBattery],
        "while on battery: pause, slow down, or go on as ever (default: ignore)",
        default=OnBattery.IGNORE.value,
    )
    group.value(
        "--max-temperature DEGREES",
        arguments.degrees,
        "slow down from so many degrees Celsius on, and pause where that does not help",
    )
    group.value(
        "--quiet-hours FROM-TO",
        arguments.quiet_hours,
        "do not compute in these hours of the day, such as 22-7 or 22:30-6:45",
    )


def run(args: argparse.Namespace, output: Output) -> int:
    """Be a member until Ctrl-C or SIGTERM."""
    if args.log_file is not None:
        write_to(args.log_file)
    arguments.find_code(args)
    options = arguments.node_options(args)
    options["only_for"] = tuple(args.only_for)
    options["manners"] = Manners(**{f.name: getattr(args, f.name) for f in fields(Manners)})
    scripts = [script.absolute() for script in args.allow_script]
    for script in scripts:
        if not script.is_file():
            raise UsageError(f"--allow-script {script}: there is no such file")
    from p2ptrain.control.server import ControlServer  # before signals count: it loads for a while
    from p2ptrain.page.scripts import AllowedScripts

    listening = False

    async def main() -> None:
        nonlocal listening
        lender = Lender()
        with FolderLock(options["state_dir"], "join") as lock, stop_event() as stop:
            listening = True
            output.writer.on_closed = stop.set
            if WITH_PARENT in os.environ:
                end_with_stdin(stop)
            async with (
                MoreMembers(args.device[1:], options, output) as more,
                ControlServer(options["state_dir"], lender) as control,
                AllowedScripts(options["state_dir"], scripts) as allowed,
            ):
                await load_training()
                await _Stay(options, output, stop, lender, control, lock, allowed, more).run()

    try:
        if not startup.release_signals():
            with sigterm_interrupts():
                event_loop.run(main())
    except KeyboardInterrupt:
        if listening:
            raise  # the second Ctrl-C: this user does not want to wait
    output.show(Stopped())
    return DONE


@dataclass(slots=True)
class _Stay:
    """This device in the household, until `stop`: as one member after another."""

    options: NodeOptions
    output: Output
    stop: asyncio.Event
    lender: Lender
    control: ControlServer
    lock: FolderLock
    scripts: AllowedScripts
    more: MoreMembers

    async def run(self) -> None:
        """Until `stop`."""
        lender, stop = self.lender, self.stop
        async with SleepWatch() as sleep:
            while not stop.is_set():
                place = await self._be_member(sleep)
                if stop.is_set():
                    return
                if lender.wanted.is_set():
                    warning = "p2ptrain train runs on this device now: join continues when it ends"
                    self.output.show(events.Warning(message=warning))
                    await lender.lend(place, self.lock, stop)
                    if not stop.is_set():  # else commands go on finding the borrower
                        self.control.publish()
                if sleep.rejoin.is_set():
                    lender.window = place.window
                    sleep.has_left()
                    await first_set(stop, sleep.awake)
                    self.output.show(events.Warning(message=REJOINS))
                self.options = {
                    **self.options,
                    "name": place.name,
                    "port": place.port,
                    "code": None,
                }

    async def _be_member(self, sleep: SleepWatch) -> LeasedIdentity:
        """A member until `stop`, until a train asks for the place, or until the machine sleeps.

        Returns what it left.
        """
        from p2ptrain.api.node import Node
        from p2ptrain.photos.server import PhotoPage

        lender, options = self.lender, self.options
        show = self.more.seen_by(_shown(self.output))
        node = Node(**options, window=lender.window, role="member", on_event=show, has_place=True)
        async with (
            node,
            PhotoPage(options["state_dir"], node, self.scripts) as page,
        ):
            lender.member, lender.page = node, page
            self.more.invites_by(node.invite)
            try:
                await first_set(self.stop, lender.wanted, sleep.rejoin)
            finally:
                lender.member = lender.page = None
            status = node.status()
            if sleep.rejoin.is_set() and not self.stop.is_set():
                await node.leave(0.0 if sleep.awake.is_set() else SLEEP_SECONDS)
        # The window is asked for last: while the node leaves, tries count and removals close it.
        return LeasedIdentity(str(status["name"]), int(status["port"]), node.window)


def _shown(output: Output) -> Callable[[Event], None]:
    """Show what happens, codes for cameras too; how the command ends it says itself."""

    def show(event: Event) -> None:
        if isinstance(event, Stopped | events.Error):
            return
        output.show(event)
        if isinstance(event, Pairing) and output.is_terminal:
            output.writer.write(qr.terminal_code(f"p2ptrain join --code {event.code}"))

    return show


COMMAND = Command(
    *("join", run, "let this device compute for the household until you stop it"),
    *(_DESCRIPTION, _EXAMPLE, _options),
)
