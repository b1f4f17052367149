"""One device as a process of its own: the real mesh over real TLS, without the rooms above.

    python -m tools.detection.member '{"name": "a", "state_dir": "/tmp/a", "port": 47311, ...}'

Says what it sees, one JSON object a line, stamped with the machine's monotonic clock, which all
processes share. Takes orders on stdin, one a line; leaves when that ends:

    {"do": "freeze", "how": "loop" or "gil", "seconds": 1.5}
"""

from __future__ import annotations

import asyncio
import ctypes
import hashlib
import json
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from p2ptrain import events
from p2ptrain.events import Event, PairingFailed
from p2ptrain.mesh.config import MeshConfig
from p2ptrain.mesh.interface import CoordinatorChanged, MemberChanged, MeshEvent
from p2ptrain.mesh.membership.membership_config import MembershipConfig
from p2ptrain.mesh.network_mesh import NetworkMesh

_CODE = "48151623"


@dataclass(frozen=True, slots=True)
class Settings:
    """What a member is started with.

    Attributes:
        peers: addresses of devices to pair with.
        local_health: False switches off the distinction of its own freeze from others' silence.
        load: "" for none, "hash" or "torch": a thread that never rests, as in training.
    """

    name: str = ""
    state_dir: str = ""
    host: str = ""
    port: int = 0
    peers: Sequence[str] = ()
    local_health: bool = True
    load: str = ""

    def to_json(self) -> str:
        """As an argument of the process."""
        return json.dumps(asdict(self))


def say(kind: str, **fields: Any) -> None:
    """One line for the process that started this one."""
    print(json.dumps({"event": kind, "at": time.monotonic(), **fields}), flush=True)


def _tell(event: Event) -> None:
    """What a user would read, where something went wrong."""
    if isinstance(event, events.Warning | PairingFailed):
        say("trouble", words=str(event))


class Member:
    """The mesh, and what is reported of it."""

    def __init__(self, settings: Settings) -> None:
        config = MeshConfig(
            Path(settings.state_dir),
            settings.name,
            code=_CODE,
            peers=tuple(settings.peers),
            interfaces=(settings.host,),
            port=settings.port,
            discovery=False,
            membership=MembershipConfig(local_health=settings.local_health),
        )
        self._mesh = NetworkMesh(config, _tell)
        self._mesh.subscribe(self._on_event)

    async def run(self) -> None:
        """Until stdin ends."""
        async with self._mesh:
            say("ready", id=self._mesh.self_id)
            await self._obey()

    def _on_event(self, event: MeshEvent) -> None:
        match event:
            case MemberChanged(member, reason, certain):
                state = member.state.value
                say("member", name=member.name, state=state, why=reason, certain=certain)
            case CoordinatorChanged(coordinator):
                name, term = (coordinator.name, coordinator.term) if coordinator else (None, 0)
                say("coordinator", name=name, term=term)

    async def _obey(self) -> None:
        reader = asyncio.StreamReader()
        protocol = asyncio.StreamReaderProtocol(reader)
        await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, sys.stdin)
        while line := await reader.readline():
            order = json.loads(line)
            if order["how"] == "loop":
                _hold_loop(order["seconds"])
            else:
                threading.Thread(target=_hold_interpreter, args=(order["seconds"],)).start()


def _hold_loop(seconds: float) -> None:
    """As a callback does that computes too long."""
    time.sleep(seconds)


def _hold_interpreter(seconds: float) -> None:
    """As an extension does that computes without letting go: PyDLL keeps the interpreter's lock."""
    ctypes.PyDLL(None).usleep(round(seconds * 1e6))


def _hash_for_ever() -> None:
    piece = bytes(1 << 20)
    while True:
        hashlib.sha256(piece)


def _train_for_ever() -> None:
    import torch

    torch.set_num_threads(1)
    model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.ReLU(), torch.nn.Linear(256, 8))
    batch = torch.randn(64, 256)
    while True:
        model.zero_grad()
        model(batch).sum().backward()


_LOADS = {"hash": _hash_for_ever, "torch": _train_for_ever}


def main() -> None:
    """See the module's docstring."""
    settings = Settings(**json.loads(sys.argv[1]))
    if settings.load:
        threading.Thread(target=_LOADS[settings.load], daemon=True).start()
    asyncio.run(Member(settings).run())


if __name__ == "__main__":
    main()
