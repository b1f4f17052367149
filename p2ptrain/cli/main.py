"""The command `p2ptrain`: finds the command's file, and turns every end into the right exit code.

Errors of users and of other devices are one line on stderr; any other error is a bug of ours, and
its line says how to get the traceback.
"""

from __future__ import annotations

import argparse
import errno
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

from p2ptrain import events
from p2ptrain._version import __version__
from p2ptrain.cli import arguments, startup
from p2ptrain.cli.commands import (
    demo,
    doctor,
    join,
    member_commands,
    plan,
    profile,
    service,
    simulate,
    top,
    train,
)
from p2ptrain.cli.output import Output, configure_logs, open_output, silence_stdout
from p2ptrain.cli.usage import FAILED, INTERRUPTED, WRONG_USAGE, Parser, UsageError, UsageExit
from p2ptrain.errors import DeviceUnusable, PeerError, UserError, callback_note

_OWN = Path(__file__).resolve().parent.parent

_BEFORE_SERVICE = (
    *(join.COMMAND, train.COMMAND, member_commands.STATUS, top.COMMAND),
    *member_commands.COMMANDS,
)

_AFTER_SERVICE = (profile, plan, simulate, demo, doctor)


def main(argv: Sequence[str] | None = None, *, for_good: bool = False) -> int:
    """Run the command line `argv` (default: the process's); returns the exit code.

    Args:
        for_good: the process ends with it: with `--json` nothing else comes to stdout any more.

    Raises:
        SystemExit: argparse's: `UsageExit` with code 2, and 0 after `--help`.
    """
    args = _parsed(argv, for_good=for_good)
    if getattr(args, "logs", True):  # planning logs nothing, and a log's start takes a while
        configure_logs(debug=args.debug)
    with open_output(json=args.json, for_good=for_good) as output:
        exit_code = _run(args, output)
        closed = output.writer.closed
    if closed and not (args.json and for_good):  # then stdout is not used any more
        silence_stdout()
    return exit_code


def _parsed(argv: Sequence[str] | None, *, for_good: bool) -> argparse.Namespace:
    """The command line; where it makes no sense, programs that asked for JSON get an event too."""
    try:
        return build_parser().parse_args(argv)
    except UsageExit as end:
        if "--json" in (sys.argv[1:] if argv is None else argv):
            with open_output(json=True, for_good=for_good) as output:
                output.show(events.Error(message=end.message))
        raise


def build_parser() -> Parser:
    """The parser of the whole command line; each command sets `run`."""
    parser = Parser(
        prog="p2ptrain",
        description="Train one neural network together on the devices you already own.",
        epilog="p2ptrain COMMAND --help explains a command with an example.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"p2ptrain {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for command in _BEFORE_SERVICE:
        command.add(commands, arguments.add_common)
    service.add_parser(commands)
    for one in _AFTER_SERVICE:
        one.COMMAND.add(commands, arguments.add_common)
    return parser


def _run(args: argparse.Namespace, output: Output) -> int:
    try:
        if args.run is not join.run and startup.release_signals():
            raise KeyboardInterrupt
        exit_code: int = args.run(args, output)
    except KeyboardInterrupt as interrupt:
        return _interrupted(str(interrupt) or "p2ptrain: interrupted", output)
    except BrokenPipeError:
        return FAILED
    except SystemExit:
        raise
    except BaseException as error:  # a panic of a library in Rust is no Exception
        if args.debug:
            traceback.print_exc()
        _show_failure(_text(_cause(error), debug=args.debug), output)
        return WRONG_USAGE if isinstance(error, UsageError | DeviceUnusable) else FAILED
    return exit_code


def _cause(error: BaseException) -> BaseException:
    """Of several tasks' errors the first: the others were stopped because of it."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _text(error: BaseException, *, debug: bool) -> str:
    if (raised := callback_note(error)) is not None:
        return raised
    if isinstance(error, UserError | PeerError):
        return str(error) or type(error).__name__
    if isinstance(error, OSError) and error.strerror and error.errno != errno.EBADF:
        where = f": {error.filename}" if error.filename else ""
        return f"{error.strerror}{where}"
    hint = "please report it" if debug else "run again with --debug and report it"
    return f"internal error{_place(error)}: {type(error).__name__}: {error} ({hint})"


def _place(error: BaseException) -> str:
    """Where in our code it was, so that what does not happen again can still be looked for."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if Path(frame.filename).is_relative_to(_OWN)]
    if not own:
        return ""
    return f" in {Path(own[-1].filename).relative_to(_OWN).as_posix()}, line {own[-1].lineno}"


def _show_failure(message: str, output: Output) -> None:
    line = " ".join(message.split())
    output.close()
    if output.json:
        output.show(events.Error(message=line))
    sys.stderr.write(f"p2ptrain: error: {line}\n")


def _interrupted(line: str, output: Output) -> int:
    if output.writer.closed:  # we interrupted ourselves: our output has no reader any more
        return FAILED
    output.close()
    sys.stderr.write(f"{line}\n")
    return INTERRUPTED
