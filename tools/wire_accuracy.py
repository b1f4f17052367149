"""What rounding on the wire costs: the digits example, exact beside bf16 and int8.

    python tools/wire_accuracy.py [--seeds 0 1 2] [--devices 3] [--epochs 8] [--json FILE]

Several devices in this process train `examples/digits_cnn.py` for the same updates, once for each
format and seed: three stages (`--plan pipeline`), or one that deals whole micro-batches and sums
its gradients (`--plan group`). The table shows the last epoch's mean loss and the accuracy on the
360 test images, and how many bytes crossed between devices.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import statistics
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from examples import digits_cnn  # noqa: E402
from p2ptrain.mesh.interface import Mesh  # noqa: E402
from p2ptrain.model.wire_format import WireFormat  # noqa: E402
from p2ptrain.observe.events import Eval, Step  # noqa: E402
from p2ptrain.training.options import TrainOptions  # noqa: E402
from tests.integration.training.household import Devices, devices  # noqa: E402

PLANNERS = {"pipeline": "pp", "group": "dp"}


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    """One run.

    Attributes:
        loss: mean of the last epoch's steps.
        accuracy: on the test images at the end.
        sent_bytes: by all devices, in all.
    """

    plan: str
    wire: str
    seed: int
    loss: float
    accuracy: float
    sent_bytes: int


async def train(plan: str, wire: WireFormat, seed: int, count: int, epochs: int) -> Outcome:
    """One run on `count` devices in memory."""
    torch.manual_seed(seed)
    made = digits_cnn.job(epochs=epochs)
    torch.manual_seed(seed)
    for module in made.model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()  # type: ignore[operator]
    job = dataclasses.replace(made, seed=seed)
    options = TrainOptions(wait_for=count, planner=PLANNERS[plan], wire=wire)
    async with devices(count) as household:
        await household.holder_run(job, options).run()
        sent_bytes = sum(_sent(household.mesh[name]) for name in household.names)
    return Outcome(plan, wire.value, seed, *_results(household, epochs), sent_bytes)


def _results(household: Devices, epochs: int) -> tuple[float, float]:
    losses = [event.loss for event in household.events if isinstance(event, Step)]
    evals = [event for event in household.events if isinstance(event, Eval)]
    last = losses[-(len(losses) // epochs) :]
    return statistics.mean(last), float(evals[-1].metrics["accuracy"])


def _sent(mesh: Mesh) -> int:
    counted = (mesh.link_statistics(peer) for peer in mesh.members)
    return sum(link.sent_bytes for link in counted if link is not None)


def table(outcomes: list[Outcome]) -> str:
    """A row a format; each seed's figures, and their mean."""
    lines = ["| plan | wire | loss (last epoch) | test accuracy | mean | MB sent |"]
    lines.append("|---|---|---|---|---|---|")
    for plan, wire in dict.fromkeys((o.plan, o.wire) for o in outcomes):
        rows = [o for o in outcomes if (o.plan, o.wire) == (plan, wire)]
        losses = " ".join(f"{o.loss:.4f}" for o in rows)
        accuracies = " ".join(f"{o.accuracy:.3f}" for o in rows)
        mean = statistics.mean(o.accuracy for o in rows)
        sent = statistics.mean(o.sent_bytes for o in rows) / 1e6
        lines.append(f"| {plan} | {wire} | {losses} | {accuracies} | {mean:.4f} | {sent:.0f} |")
    return "\n".join(lines)


def main() -> None:
    """Train, print the table, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--devices", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--plan", choices=PLANNERS, nargs="+", default=list(PLANNERS))
    parser.add_argument("--json", type=Path, help="write the results there")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    outcomes: list[Outcome] = []
    for plan in arguments.plan:
        for wire in WireFormat:
            for seed in arguments.seeds:
                run = train(plan, wire, seed, arguments.devices, arguments.epochs)
                outcomes.append(asyncio.run(run))
    print(table(outcomes))
    if arguments.json:
        rows = [dataclasses.asdict(outcome) for outcome in outcomes]
        arguments.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
