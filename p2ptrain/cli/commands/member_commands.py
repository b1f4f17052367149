"""What is asked of the member that runs on this device: one question, one answer.

`status`, `explain`, `invite`, `devices`, `remove`, `page`; others ask with the same `ask_member`.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from p2ptrain.cli import arguments
from p2ptrain.cli import output as qr
from p2ptrain.cli.output import Output, aligned, words
from p2ptrain.cli.usage import DONE, Command, Options, UsageError
from p2ptrain.control.member_lock import NotRunning
from p2ptrain.errors import UserError
from p2ptrain.events import Pairing

if TYPE_CHECKING:
    from p2ptrain.control.client import ControlClient
    from p2ptrain.page.state import PageState

T = TypeVar("T")


def ask_member(folder: Path, question: Callable[[ControlClient], Awaitable[T]]) -> T:
    """The answer of the member that runs with the state folder `folder`.

    Raises:
        NotRunning: there is none.
        UserError: what the member says.
    """

    async def conversation() -> T:
        from p2ptrain.control.client import ControlClient

        async with ControlClient(folder) as client:
            return await question(client)

    return asyncio.run(conversation())


async def state_of(client: ControlClient) -> PageState:
    """What the member's page would show. Raises UserError as `ask_member` does."""
    from p2ptrain.control.lease import OTHER_VERSION
    from p2ptrain.net.read_form import read_form
    from p2ptrain.page.state import PageState

    said = await client.state()
    try:
        return read_form(PageState, said, "the member's answer", UserError, extra=True)
    except UserError as error:
        raise UserError(OTHER_VERSION) from error


def _status(args: argparse.Namespace, output: Output) -> int:
    folder = arguments.state_dir_of(args)
    status = ask_member(folder, lambda member: member.status())
    if output.json:
        output.result({"event": "status", **status}, "")
        return DONE
    here = f"this device: {status['name']} at {status['address']} port {status['port']}"
    state = ask_member(folder, state_of)
    output.result({}, f"{here}\n{output.draw(state)}")
    return DONE


_EXPLAIN = """\
Says what limits the training that runs, from what is measured: it watches a few rounds, compares
them with the plan and asks the planner what another device, or a faster link, would change. That
takes some seconds. Of a training of this device that has ended it says what was known then."""


def _explain(args: argparse.Namespace, output: Output) -> int:
    """Ask the member; without one, look what is written down."""
    folder = arguments.state_dir_of(args)
    try:
        found = ask_member(folder, lambda member: member.explain())
    except NotRunning:
        from p2ptrain.job.last_job import last_facts
        from p2ptrain.plan.explain import explained

        facts = last_facts(folder)
        if facts is None:
            raise UserError(
                "nothing runs on this device, and it has held no training before: start  p2ptrain "
                "train  or  p2ptrain join"
            ) from None
        found = explained(facts)
    output.result({"event": "explain", **found}, "\n".join(p["text"] for p in found["points"]))
    return DONE


_INVITE = """\
Shows the pairing code and accepts new devices for 10 minutes. Run `p2ptrain join --code CODE`
on the new device within that time. `p2ptrain join` must be running on this device."""


def _invite(args: argparse.Namespace, output: Output) -> int:
    code = ask_member(arguments.state_dir_of(args), lambda member: member.invite())
    output.show(Pairing(code=code))
    if output.is_terminal:
        output.writer.write(qr.terminal_code(f"p2ptrain join --code {code}"))
    return DONE


def _devices(args: argparse.Namespace, output: Output) -> int:
    devices = ask_member(arguments.state_dir_of(args), lambda member: member.devices())
    output.result({"event": "devices", "devices": devices}, _devices_text(devices))
    return DONE


def _devices_text(devices: Sequence[Mapping[str, Any]]) -> str:
    """A line a device: its name, the start of its id, and what else is known of it."""
    if not devices:
        return "No paired devices yet. On another device run: p2ptrain join --code CODE"
    rows = [(str(d.get("name", "?")), str(d.get("id", ""))[:12], _rest(d)) for d in devices]
    return "\n".join(aligned([("name", "id", ""), *rows]))


def _rest(device: Mapping[str, Any]) -> str:
    return words({key: value for key, value in device.items() if key not in ("name", "id")})


_REMOVE = """\
Takes a device out of the household: its connections end at once, and it has to be paired again
to come back. Trainings that it computes for go on without it."""


def _remove(args: argparse.Namespace, output: Output) -> int:
    name: str = args.name
    ask_member(arguments.state_dir_of(args), lambda member: member.remove(name))
    output.result(
        {"event": "removed", "name": name}, f"{name} is not part of the household any more"
    )
    return DONE


_PAGE = """\
Shows what the household does in a web browser: devices, the plan and its reasons, the training's
curve. Prints the page's address, which lets one browser in, once, within 10 minutes; a browser
that was let in stays so for 30 days. The page stays open when this command has ended, and comes
back when `p2ptrain join` or `train` starts again on this device, until --close.
With --lan, browsers of other devices in this network may look too, but change nothing. What they
see travels there unencrypted. With --photos, they may also add pictures to that folder of this
device, in folders by label, and see those that are there."""

_PAGE_EXAMPLE = """\
  p2ptrain page                open it in this device's browser
  p2ptrain page --lan          show a QR code for a phone
  p2ptrain page --lan --photos ~/fruit
                               add pictures from a phone
  p2ptrain page --close        close it, to every browser"""


def _page_options(own: Options) -> None:
    how = own.one_of()
    how.flag("--lan", "let browsers in this network look too, and show a QR code")
    how.flag("--close", "close the page, to every browser")
    own.value(
        "--photos DIR",
        arguments.state_dir,  # the member runs in another folder
        "let browsers add pictures for a training to this folder, and show its address",
    )
    own.flag("--no-browser", "print the address and start no browser")


def _page(args: argparse.Namespace, output: Output) -> int:
    """Have the member open its page, and say where it is."""
    folder = arguments.state_dir_of(args)
    if args.close:
        if args.photos is not None:
            raise UsageError("--close closes the page, with its pictures: leave out --photos")
        ask_member(folder, lambda member: member.close_page())
        output.result({"event": "page_closed"}, "the page is closed")
        return DONE
    address = ask_member(folder, lambda member: member.open_page(lan=args.lan, photos=args.photos))
    shown = address.lan_url or address.url
    body = {"event": "page", "url": shown}
    lines = [f"The page of this device: {address.url}"]
    if args.photos is not None:
        lines.insert(0, f"Pictures go to {args.photos} on this device.")
    if address.lan_url is not None:
        body["local_url"] = address.url
        what = "to look only" if args.photos is None else "to add pictures"
        lines.append(f"For one more device in this network, {what}: {address.lan_url}")
        if output.is_terminal:
            lines.append(qr.terminal_code(address.lan_url))
    output.result(body, "\n".join(lines))
    if output.is_terminal and not args.no_browser and not args.lan and _has_browser():
        import webbrowser  # here: --help need not load it

        webbrowser.open(address.url)
    return DONE


def _has_browser() -> bool:
    """Whether there is a screen to show one on: a browser in a text terminal would hide this."""
    if sys.platform in ("win32", "darwin"):
        return "SSH_CONNECTION" not in os.environ
    return any(os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY"))


STATUS = Command(
    "status",
    _status,
    "which devices are here and what runs",
    "Shows which devices are here, which one plans the work, what runs and how fast.\n"
    "`p2ptrain join` or `train` must be running on this device.",
    "  p2ptrain status\n  p2ptrain status --json",
)

COMMANDS = (
    Command(
        "explain",
        _explain,
        "what limits the training, and what would help",
        _EXPLAIN,
        "  p2ptrain explain\n  p2ptrain explain --json",
    ),
    Command("page", _page, "see it all live in a web browser", _PAGE, _PAGE_EXAMPLE, _page_options),
    Command(
        "invite",
        _invite,
        "show the pairing code and let new devices in for 10 minutes",
        _INVITE,
        "  p2ptrain invite",
    ),
    Command(
        "devices",
        _devices,
        "list the paired devices",
        "Lists the devices that are paired with this household, running or not.",
        "  p2ptrain devices\n  p2ptrain devices --json",
    ),
    Command(
        "remove",
        _remove,
        "take a device out of the household at once",
        _REMOVE,
        "  p2ptrain remove old-laptop",
        lambda own: own.word("name", "the device's name, as `devices` shows it"),
    ),
)
