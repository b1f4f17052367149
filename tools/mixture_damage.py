"""What it costs to go on from a mixture of versions after a failure, as FTPipeHD does.

    python tools/mixture_damage.py [--seeds 3] [--steps 400] [--chain 50]

Three of four devices in memory, which train on the digits of scikit-learn as FTPipeHD does, die
one after the other, each 40 updates after copies were made: once all stages go back to one version,
once each goes on from whatever it has (`--mix-versions`). Of each death: how many updates the lost
stage, or all of them, went back, and the mean loss of the ten steps before and after; of each run
the loss of the last ten steps, the accuracy on the tenth of the samples that was left out, and how
far the weights are from those of a run in which nobody dies, as a share of their length.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any
from unittest.mock import patch

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import TensorDataset

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from p2ptrain.observe.events import Event, Recovered, Step
from p2ptrain.training.asynchronous.delays import Asynchrony
from p2ptrain.training.asynchronous.ftpipehd import PLANNER, Ftpipehd
from p2ptrain.training.job import SGD, Job
from p2ptrain.training.rebuilding import MakingAnew
from tests.integration.training.delayed import options
from tests.integration.training.household import Devices, devices

AFTER_COPIES = 40
NEAR = 10
"""Steps before and after a death."""
LEFT_OUT = 10
WIDTH, LAYERS, BATCH = 96, 3, 32
NAMES = "dcb"


@dataclass
class Run:
    """What came of one.

    Attributes:
        losses: of the steps, in order.
        deaths: (step told last, updates that the lost stage or all of them went back).
        accuracy: on samples left out.
        weights: all of them, in one row.
    """

    losses: list[float] = field(default_factory=list)
    deaths: list[tuple[int, int]] = field(default_factory=list)
    accuracy: float = 0.0
    weights: Tensor = field(default_factory=lambda: torch.zeros(0))

    def near(self, step: int) -> tuple[float, float]:
        """Mean losses before and after."""
        return fmean(self.losses[step - NEAR : step]), fmean(self.losses[step : step + NEAR])


def main() -> int:
    """Compare and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--chain", type=int, default=50)
    args = parser.parse_args()
    torch.set_num_threads(1)
    for seed in range(args.seeds):
        runs = {way: asyncio.run(train(seed, args, way)) for way in WAYS}
        alone = runs["undisturbed"].weights
        for way, run in runs.items():
            print(f"seed {seed} {_told(way, run, alone)}", flush=True)
    return 0


WAYS = ("undisturbed", "one version", "mixture")


def _told(way: str, run: Run, alone: Tensor) -> str:
    far = float((run.weights - alone).norm() / alone.norm())
    said = [
        f"{way:12} accuracy {run.accuracy:.3f}, last losses {fmean(run.losses[-NEAR:]):.4f}, "
        f"weights {far:.3f} away"
    ]
    for step, back in run.deaths:
        before, after = run.near(step)
        said.append(f"death at {step}: {back} back, loss {before:.4f} -> {after:.4f}")
    return "; ".join(said)


def digits() -> tuple[TensorDataset, TensorDataset]:
    """Training data and what is left out."""
    bunch = load_digits()
    images = torch.tensor(bunch.images, dtype=torch.float32).flatten(1) / 16
    labels = torch.tensor(bunch.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    count = len(labels) // LEFT_OUT
    test, train = order[:count], order[count:]
    return TensorDataset(images[train], labels[train]), TensorDataset(images[test], labels[test])


def job(seed: int) -> Job:
    """Equal layers, so that every device has some."""
    torch.manual_seed(seed)
    layers: list[nn.Module] = [nn.Linear(64, WIDTH), nn.Tanh()]
    for _ in range(LAYERS):
        layers += [nn.Linear(WIDTH, WIDTH), nn.Tanh()]
    return Job(
        model=nn.Sequential(*layers, nn.Linear(WIDTH, 10)),
        data=digits()[0],
        loss=nn.functional.cross_entropy,
        optimizer=SGD(lr=0.03, momentum=0.9),
        batch_size=BATCH,
        epochs=1000,
        seed=seed,
    )


async def train(seed: int, args: argparse.Namespace, way: str) -> Run:
    """A whole job. `way`: one of WAYS; `args`: steps and chain."""
    wished = Ftpipehd(chain=args.chain, whole=10**9, mixes=way == "mixture")
    wanted = options(4, Asynchrony(), args.steps, planner=PLANNER, ftpipehd=wished, replan=False)
    trained, found = job(seed), Run()
    deaths = _deaths(args.steps, args.chain) if way != "undisturbed" else {}
    make = MakingAnew.make
    oldest: list[int] = []

    def noted(anew: MakingAnew, request: int, what: Any, epoch: int) -> None:
        oldest.extend(what.target.step - part.version.step for part in what.parts)
        make(anew, request, what, epoch)

    async with devices(4) as household:
        dying: list[asyncio.Task[None]] = []

        def listen(event: Event) -> None:
            household.events.append(event)
            if isinstance(event, Step):
                found.losses.append(event.loss)
                if event.step in deaths:
                    dying.append(asyncio.create_task(_kill(household, deaths[event.step])))
            elif isinstance(event, Recovered):
                told = len(found.losses)
                back = max(oldest, default=0) if wished.mixes else event.replayed_steps
                found.deaths.append((told, back))
                oldest.clear()

        with patch.object(MakingAnew, "make", noted):
            await household.holder_run(trained, wanted, listen).run()
        await asyncio.gather(*dying)
    inputs, labels = digits()[1].tensors
    with torch.no_grad():
        found.accuracy = float((trained.model(inputs).argmax(1) == labels).float().mean())
        found.weights = torch.cat([p.detach().flatten() for p in trained.model.parameters()])
    return found


def _deaths(steps: int, chain: int) -> dict[int, str]:
    """Step -> who dies then; each after copies, spread over the job."""
    apart = max(steps // (len(NAMES) + 1) // chain, 1) * chain
    return {(i + 1) * apart + AFTER_COPIES: name for i, name in enumerate(NAMES)}


async def _kill(household: Devices, name: str) -> None:
    household.mesh.freeze(name)
    await household.mesh.kill(name)


if __name__ == "__main__":
    sys.exit(main())
