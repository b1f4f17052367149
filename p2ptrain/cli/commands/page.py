"""`p2ptrain page`: the live web page of this device's member."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

from p2ptrain.cli import arguments
from p2ptrain.cli import output as qr
from p2ptrain.cli.commands.member_commands import ask_member
from p2ptrain.cli.output import Output
from p2ptrain.cli.usage import DONE, Options, UsageError

_DESCRIPTION = """\
Shows what the household does in a web browser: devices, the plan and its reasons, the training's
curve. Prints the page's address, which lets one browser in, once, within 10 minutes; a browser
that was let in stays so for 30 days. The page stays open when this command has ended, and comes
back when `p2ptrain join` or `train` starts again on this device, until --close.
With --lan, browsers of other devices in this network may look too, but change nothing. What they
see travels there unencrypted. With --photos, they may also add pictures to that folder of this
device, in folders by label, and see those that are there."""

_EXAMPLE = """\
  p2ptrain page                open it in this device's browser
  p2ptrain page --lan          show a QR code for a phone
  p2ptrain page --lan --photos ~/fruit
                               add pictures from a phone
  p2ptrain page --close        close it, to every browser"""


def add_parser(commands: Any) -> None:
    """Add `page` to the command line."""
    parser = arguments.command(
        commands,
        "page",
        summary="see it all live in a web browser",
        description=_DESCRIPTION,
        example=_EXAMPLE,
    )
    how = Options(parser.add_mutually_exclusive_group())
    how.flag("--lan", "let browsers in this network look too, and show a QR code")
    how.flag("--close", "close the page, to every browser")
    own = Options(parser)
    own.value(
        "--photos DIR",
        _absolute,
        "let browsers add pictures for a training to this folder, and show its address",
    )
    own.flag("--no-browser", "print the address and start no browser")
    arguments.add_common(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace, output: Output) -> int:
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


def _absolute(text: str) -> Path:
    """The member runs in another folder."""
    return Path(text).expanduser().absolute()


def _has_browser() -> bool:
    """Whether there is a screen to show one on: a browser in a text terminal would hide this."""
    if sys.platform in ("win32", "darwin"):
        return "SSH_CONNECTION" not in os.environ
    return any(os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY"))
