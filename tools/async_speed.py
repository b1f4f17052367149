"""How much faster three equal devices train without a barrier than in synchronous rounds.

    python tools/async_speed.py --out speed.json [--planner pp] [--household P3] [--mode async]
    python tools/async_speed.py --out speed.json --report

BERT-small of `tools/bench` in mini-batches of 16, on an emulated household: by the real commands,
in real processes, each with a share of a core and a cable of its own. Needs root, Linux.
`predicted` is what the planner said of its plan before it trained. A run takes two to four minutes,
and is kept in the file; without --mode both are made, one after the other.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tools.bench.cells import Cell
from tools.bench.household_run import HouseholdRuns
from tools.bench.rounds import Rounds
from tools.testbed import Household, Testbed

BATCH = 16
MODES = ("sync", "async")
ROUNDS = Rounds(warm=6, steady=24)
"""The first mini-batches fill the pipeline."""


@dataclass(frozen=True, slots=True)
class SmallBatches(Cell):
    """A cell of the bench with mini-batches so small that waiting dominates."""

    @property
    def batch_size(self) -> int:
        """Samples of a mini-batch."""
        return BATCH


def measure(
    household: str, planner: str, mode: str, states: Path, limit_seconds: float
) -> dict[str, Any]:
    """One run. Raises CellError."""
    with Testbed(Household.load(household)) as testbed:
        runs = HouseholdRuns(testbed, states, limit_seconds, ("--mode", mode))
        return runs.run(SmallBatches(household, "bert_small", "S", planner), ROUNDS)


def report(runs: Mapping[str, Mapping[str, Any]]) -> str:
    """A line a run, and the ratio of the two modes for every household and planner."""
    lines = ["household planner  mode   predicted  measured  s a mini-batch (median)  plan"]
    for key, run in sorted(runs.items()):
        household, planner, mode = key.split("/")
        lines.append(
            f"{household:9} {planner:8} {mode:5} {run['predicted_samples_per_s']:10.2f} "
            f"{run['samples_per_s']:9.2f}  {statistics.median(run['round_seconds']):23.3f}  "
            f"{_plan(run['plan'])}"
        )
    for pair in sorted({key.rpartition("/")[0] for key in runs}):
        if all(f"{pair}/{mode}" in runs for mode in MODES):
            sync, free = (runs[f"{pair}/{mode}"] for mode in MODES)
            names = ("predicted_samples_per_s", "samples_per_s")
            predicted, measured = (free[name] / sync[name] for name in names)
            lines.append(f"{pair}: async/sync {measured:.2f}, predicted {predicted:.2f}")
    return "\n".join(lines)


def _plan(plan: Mapping[str, Any]) -> str:
    stages = (
        f"{'-'.join(map(str, stage['units']))} x{len(stage['devices'])} K{stage['warmup']}"
        for stage in plan["stages"]
    )
    return f"{plan['micro_batches']} x {plan['micro_batch']}: {', '.join(stages)}"


def main(arguments: Sequence[str] | None = None) -> None:
    """See the module."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="JSON file; what it has is kept")
    parser.add_argument("--household", default="P3")
    parser.add_argument("--planner", default="pp")
    parser.add_argument("--mode", choices=MODES)
    parser.add_argument("--states", type=Path, help="folder that keeps measured profiles")
    parser.add_argument("--limit", type=float, default=290.0, metavar="S", help="of one run")
    parser.add_argument("--report", action="store_true", help="measure nothing")
    args = parser.parse_args(arguments)
    runs = json.loads(args.out.read_text(encoding="utf-8")) if args.out.exists() else {}
    modes = [] if args.report else [args.mode] if args.mode else MODES
    with tempfile.TemporaryDirectory(prefix="p2ptrain-speed-") as folder:
        for mode in modes:
            states = (args.states or Path(folder)) / args.household
            run = measure(args.household, args.planner, mode, states, args.limit)
            runs[f"{args.household}/{args.planner}/{mode}"] = run
            args.out.write_text(json.dumps(runs, indent=1), encoding="utf-8")
    print(report(runs))


if __name__ == "__main__":
    main()
