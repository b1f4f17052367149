"""A Node that needs no network, in the place of the real one."""

from __future__ import annotations

import asyncio
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

from p2ptrain.api import loading
from p2ptrain.events import Done, Event, Pairing, Ready, Step, Stopped
from p2ptrain.mesh.trust.pairing_window import PairingWindow


class FakeRun:
    """A run of two steps, or whatever `FakeNode.script` says."""

    def __init__(self, node: FakeNode) -> None:
        self._node = node

    async def result(self) -> object:
        await FakeNode.script(self._node)
        return object()


async def _two_steps(node: FakeNode) -> None:
    for step in (1, 2):
        node.emit(Step(step=step, loss=1.0 / step, samples_per_s=10.0, seconds=0.1))
    node.emit(Done(steps=2, seconds=0.2, samples_per_s=10.0, out=None))


class FakeNode:
    """Records what commands do with a Node."""

    made: ClassVar[list[FakeNode]] = []
    on_ready: ClassVar[Callable[[FakeNode], None] | None] = None
    script: ClassVar[Callable[[FakeNode], Any]] = _two_steps

    def __init__(self, *, on_event: Callable[[Event], None], **options: Any) -> None:
        self.options = options
        self.emit = on_event
        self.name = options["name"] or "host"
        self.port = options["port"] or 4000
        self.inside = False
        self.left_within: float | None = None
        self.trained: list[Any] = []
        self.window: PairingWindow | None = options.get("window")
        FakeNode.made.append(self)

    async def __aenter__(self) -> FakeNode:
        self.inside = True
        self.emit(Ready(name=self.name, id="0" * 64, address="127.0.0.1", port=self.port))
        if self.window is None:
            now = asyncio.get_running_loop().time()
            self.window = PairingWindow.opened(self.options["code"] or "12345678", now)
        self.emit(Pairing(code=self.window.code))
        if FakeNode.on_ready is not None:
            asyncio.get_running_loop().call_soon(FakeNode.on_ready, self)
        return self

    async def __aexit__(self, *error: object) -> None:
        if self.left_within is None:
            await self.leave(30.0)

    async def leave(self, within_seconds: float) -> None:
        self.inside, self.left_within = False, within_seconds
        self.emit(Stopped())

    async def train(self, job: Any, options: Any) -> FakeRun:
        self.trained.append((job, options))
        return FakeRun(self)

    async def rounds(self) -> None:
        return None

    async def explain(self) -> dict[str, Any]:
        return {}

    def status(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "id": "0" * 64,
            "address": "127.0.0.1",
            "port": self.port,
            "members": [{"name": self.name, "id": "0" * 64, "state": "alive"}],
            "coordinator": {"name": self.name, "term": 1},
            "job": None,
        }

    def invite(self) -> str:
        return "12345678"

    def trains_for(self) -> str | None:
        return None

    def devices(self) -> list[dict[str, Any]]:
        return [{"name": "pi", "id": "ab" * 32}]

    async def remove(self, name: str) -> None:
        self.removed = name


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch) -> type[FakeNode]:
    """`p2ptrain.api` with a fake Node and a fake training on this device alone."""
    module = types.ModuleType("p2ptrain.api.node")
    training = types.ModuleType("p2ptrain.api.train")
    monkeypatch.setattr(FakeNode, "made", [])
    monkeypatch.setattr(FakeNode, "on_ready", None)
    monkeypatch.setattr(FakeNode, "script", _two_steps)
    module.Node = FakeNode  # type: ignore[attr-defined]

    async def train_alone(
        job: Any, chosen: Any, on_event: Callable[[Any], None], node: Any, on_limit: Any = None
    ) -> None:
        on_event(Done(steps=2, seconds=0.2, samples_per_s=10.0, out=None))

    training.train_alone = train_alone  # type: ignore[attr-defined]
    monkeypatch.setattr(loading, "import_training", lambda: None)
    monkeypatch.setitem(sys.modules, "p2ptrain.api.node", module)
    monkeypatch.setitem(sys.modules, "p2ptrain.api.train", training)
    return FakeNode


SCRIPT = """
import p2ptrain, torch
print("a script may print")

def job(hidden: int = 4):
    model = torch.nn.Linear(hidden, 2)
    data = [(torch.zeros(hidden), 0)] * 8
    loss = torch.nn.functional.cross_entropy
    return p2ptrain.Job(model=model, data=data, loss=loss, optimizer=p2ptrain.SGD(lr=0.1),
                        batch_size=4, epochs=3)
"""


@pytest.fixture
def script(tmp_path: Path) -> Iterator[str]:
    """A training script that loads."""
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    before = list(sys.path)
    yield str(path)
    sys.path[:] = before
    sys.modules.pop("p2ptrain_script", None)
