"""p2ptrain beside what a user would pick instead, on emulated households. Needs root, Linux.

    python -m tools.bench --out bench.json --only A/mobilenetv2/S --repeat 3
    python -m tools.bench --out bench.json --report bench.md

Cells are HOUSEHOLD/MODEL/SIZE/SYSTEM; a filter may leave parts out, name several with commas, or
say `*`. What the file has already is not measured again; Ctrl-C keeps what is done.
"""

from __future__ import annotations

import argparse
import shlex
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from tools.bench import cells
from tools.bench.cells import WARM
from tools.bench.results import Results, ResultsError
from tools.bench.run import Wishes, run
from tools.testbed.errors import HouseholdError

INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Measure or report; the exit code."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    try:
        chosen = cells.select(arguments.only)
        results = Results(arguments.out)
    except (cells.UnknownNameError, ResultsError) as error:
        parser.error(str(error))
    if arguments.list:
        print("\n".join(cell.key for cell in chosen))
        return 0
    _check(parser, arguments)
    code = 0
    if arguments.report is None or arguments.only:
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # devices are taken down too
        try:
            run(chosen, results, _wishes(arguments))
        except (HouseholdError, ResultsError) as error:
            parser.error(str(error))
        except KeyboardInterrupt:
            print("interrupted; what is measured is kept", file=sys.stderr)
            code = INTERRUPTED
    if arguments.report is not None:
        from tools.bench.report import write_report

        write_report(results, arguments.report)
    return code


def _check(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    """End with exit code 2 before anything is measured: that takes hours."""
    if min(arguments.repeat, arguments.rounds, arguments.settle) < 1:
        parser.error("--repeat, --rounds and --settle are at least 1")
    if not arguments.limit > 0:
        parser.error("--limit is above 0")
    if arguments.report is not None and not arguments.report.parent.is_dir():
        parser.error(f"there is no folder {arguments.report.parent} for {arguments.report.name}")
    try:
        shlex.split(arguments.train)
    except ValueError as error:
        parser.error(f"--train: {error}")


def _wishes(arguments: argparse.Namespace) -> Wishes:
    return Wishes(
        repeat=arguments.repeat,
        again=arguments.again,
        limit_seconds=arguments.limit,
        steady_rounds=arguments.rounds,
        settle_rounds=arguments.settle,
        train_options=tuple(shlex.split(arguments.train)),
        rate=arguments.rate,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tools.bench",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", type=Path, required=True, help="results' file (JSON)")
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="FILTER", help="cells, such as A,B/vit/S/pp,ddp"
    )
    parser.add_argument("--list", action="store_true", help="print the cells chosen, and end")
    parser.add_argument("--repeat", type=int, default=1, help="runs a cell (default: 1)")
    parser.add_argument("--rounds", type=int, default=4, help="rounds that count (default: 4)")
    parser.add_argument(
        "--settle",
        type=int,
        default=WARM,
        metavar="N",
        help=f"rounds of p2ptrain before those (default: {WARM}); it looks at its plan after ten",
    )
    parser.add_argument("--again", action="store_true", help="measure what the file has already")
    parser.add_argument(
        "--limit", type=float, default=300.0, metavar="S", help="seconds of a run (default: 300)"
    )
    parser.add_argument(
        "--train", default="", metavar="OPTIONS", help='for p2ptrain, such as "--micro-batch 64"'
    )
    parser.add_argument(
        "--rate",
        metavar="RATE",
        help="of all cables, such as 400mbit, instead of the household's: fractions depend on how "
        "fast devices compute beside how fast links carry",
    )
    parser.add_argument(
        "--report",
        type=Path,
        metavar="FILE.md",
        help="write the tables; without --only nothing is measured",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
