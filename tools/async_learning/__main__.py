"""What learning loses and gains without a barrier, on real MNIST.

    python -m tools.async_learning --out learning.json [--only stashing/0,runtime/stashing/0]
    python -m tools.async_learning --out learning.json --report docs/async_learning

A small MobileNetV2 (mnist.py) learns 4,000 images on three stages in every setting of settings.py,
and on one device, from three seeds. SETTING/SEED is a curve by the delayed formula in plain torch,
runtime/SETTING/SEED the same by the real runtime on devices in memory, which must be equal to the
last bit. Every curve is kept at once in the JSON file, and none is computed twice. Seconds are
simulated (seconds.py). --report writes FILE.md and FILE.svg.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tools.async_learning import curves, report
from tools.async_learning.curves import Course, Curve
from tools.async_learning.seconds import timed
from tools.async_learning.settings import SETTINGS, setting_of

SEEDS = (0, 1, 2)
RUNTIME_SEED = 0
FORMAT = "p2ptrain.learning/1"


def wanted_keys(only: str | None) -> list[str]:
    """All curves, formulas first, or those named."""
    if only is not None:
        return only.split(",")
    own = [f"{setting.name}/{seed}" for seed in SEEDS for setting in SETTINGS]
    return [*own, *(f"runtime/{setting.name}/{RUNTIME_SEED}" for setting in SETTINGS)]


def compute(key: str, course: Course) -> Curve:
    """One curve. Raises KeyError: there is no such setting."""
    *kind, name, seed = key.split("/")
    setting = setting_of(name)
    plan = timed(setting, course.updates).plan
    if kind:
        return asyncio.run(curves.runtime(setting, int(seed), course, plan))
    return curves.formula(setting, int(seed), course, plan)


def main(arguments: Sequence[str] | None = None) -> None:
    """See the module."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="JSON file; what it has is kept")
    parser.add_argument("--only", help="curves, separated by commas")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--report", type=Path, metavar="FILE", help="write FILE.md and FILE.svg")
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)
    course = Course(args.epochs)
    content: dict[str, Any] = {"format": FORMAT, "epochs": args.epochs, "curves": {}}
    if args.out.exists():
        content = json.loads(args.out.read_text(encoding="utf-8"))
        if content["epochs"] != args.epochs:
            raise SystemExit(f"{args.out} has curves of {content['epochs']} epochs")
    for key in [] if args.report else wanted_keys(args.only):
        if key in content["curves"]:
            continue
        curve = compute(key, course)
        content["curves"][key] = curve.fields()
        args.out.write_text(json.dumps(content), encoding="utf-8")
        print(f"{key}: accuracy {' '.join(f'{a:.3f}' for a in curve.accuracy)}", flush=True)
    if args.report:
        report.write(args.report, content["curves"], course)


if __name__ == "__main__":
    main()
