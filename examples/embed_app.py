"""p2ptrain inside an app of your own: with an event loop, and without one.

    python examples/embed_app.py                  alone
    python examples/embed_app.py --code 12345678  with another device that was given this code

The first form is for apps that have an event loop (a server, a desktop app): the Node is a member
of the household for as long as its context lasts, and the run tells what happens as it happens.
The second form is one call that blocks, for plain scripts and notebooks.

Measured on x86-64: 10 s of one core for both forms, starting included; accuracy 0.980.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import p2ptrain
from p2ptrain.events import Event, Step


def job() -> p2ptrain.Job:
    """Learns whether a point lies inside a ring: two numbers in, two classes out."""
    points = torch.rand(2048, 2, generator=torch.Generator().manual_seed(0)) * 2 - 1
    radius = points.norm(dim=1)
    inside = ((radius > 0.4) & (radius < 0.8)).long()
    data = TensorDataset(points, inside)
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2)
    )
    return p2ptrain.Job(
        model=model,
        data=DataLoader(data, batch_size=128, shuffle=True),
        loss=nn.functional.cross_entropy,
        optimizer=torch.optim.Adam(model.parameters(), lr=0.01),
        epochs=10,
        eval_data=DataLoader(data, batch_size=128),
        metrics={"accuracy": lambda output, target: (output.argmax(1) == target).float().mean()},
    )


def without_a_loop() -> None:
    """One call; `local=True` stays on this device, leave it out to train with the household."""
    model = p2ptrain.train(job(), local=True, on_event=show)
    print("trained here:", sum(p.numel() for p in model.parameters()), "parameters")


async def with_a_loop(code: str | None, state_dir: Path) -> None:
    """A member that trains its own data with another device, if it knows one; then it leaves."""
    async with p2ptrain.Node(name="my-app", code=code, state_dir=state_dir) as node:
        alone = code is None
        run = await node.train(job(), wait_for=1 if alone else 2)
        async for event in run:
            show(event)
        model = await run.result()
    print("trained together:", sum(p.numel() for p in model.parameters()), "parameters")


def show(event: Event) -> None:
    """What an app would put into its window."""
    if not isinstance(event, Step) or event.step % 20 == 0:
        print(event.to_json())


def main() -> None:
    """Both forms, one after the other."""
    parser = argparse.ArgumentParser(description="p2ptrain inside an app")
    parser.add_argument("--code", help="pairing code of a household")
    parser.add_argument("--state-dir", type=Path, help="keeps this app's identity between starts")
    args = parser.parse_args()
    without_a_loop()
    with tempfile.TemporaryDirectory() as room:
        asyncio.run(with_a_loop(args.code, args.state_dir or Path(room) / "state"))


if __name__ == "__main__":
    main()
