"""Bits that flip while a state travels, or while its copy lies at its owner: in one process.

Found means: read again and right, or refused.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from p2ptrain.errors import PeerError
from p2ptrain.mesh.interface import Mesh
from p2ptrain.net.message import Message
from p2ptrain.state.checksums import digests_of
from p2ptrain.state.snapshot_store import StoredTensors
from p2ptrain.state.transfer_client import TransferClient, TransferRequest
from p2ptrain.state.transfer_server import TransferServer
from tests.support.memory_household import MemoryHousehold, memory_id

WAYS = ("part", "manifest", "digest", "memory")
JOB, SOURCE = "job", "version:1:1"


def flip(tensor: Tensor, chance: random.Random) -> Callable[[], None]:
    """Flip one bit of a contiguous tensor's memory; what is returned flips it back."""
    bits = tensor.view(-1).view(torch.uint8)
    at, bit = chance.randrange(len(bits)), 1 << chance.randrange(8)
    bits[at] ^= bit

    def undo() -> None:
        bits[at] ^= bit

    return undo


class FlippingServer(TransferServer):
    """Flips a bit of what it sends, on the way.

    Attributes:
        flipped: how many, since it was armed.
    """

    def __init__(self, mesh: Mesh) -> None:
        super().__init__(mesh)
        self.flipped = 0
        self._what = ""
        self._left = 0
        self._chance = random.Random(0)

    def arm(self, what: str, chance: random.Random, times: int = 1, after: int = 0) -> None:
        """Flip a bit of the next `times` replies that have one, `after` some of them."""
        self._what, self._chance, self.flipped = what, chance, 0
        self._left, self._skip = times, after

    async def answer_manifest(self, peer: str, message: Message) -> Message:
        reply = await super().answer_manifest(peer, message)
        return self._flipped(reply) if self._what == "manifest" else reply

    async def answer_read(self, peer: str, message: Message) -> Message:
        reply = await super().answer_read(peer, message)
        if self._what == "part":
            return self._flipped(reply)
        sums = list(reply.fields["digests"])
        if self._what == "digest" and sums and self._is_due():
            sums[self._chance.randrange(len(sums))] ^= 1 << self._chance.randrange(32)
            return replace(reply, fields={"digests": sums})
        return reply

    def _flipped(self, reply: Message) -> Message:
        candidates = [index for index, part in enumerate(reply.parts) if part.nbytes]
        if not candidates or not self._is_due():
            return reply
        parts = [memoryview(bytearray(part)) for part in reply.parts]
        flip(
            torch.frombuffer(parts[self._chance.choice(candidates)], dtype=torch.uint8),
            self._chance,
        )
        return replace(reply, parts=tuple(parts))

    def _is_due(self) -> bool:
        if self._skip:
            self._skip -= 1
            return False
        due = self._left > 0
        self._left -= due
        self.flipped += due
        return due


def _state() -> dict[str, Tensor]:
    named = {f"model:{n}": torch.randn(40 + 9 * n) for n in range(12)}
    named |= {f"optimizer:{n}.momentum_buffer": torch.randn(40 + 9 * n) for n in range(12)}
    named["model:counter"] = torch.tensor(5)
    named["model:flags"] = torch.tensor([True, False])
    return named


async def run(flips: int, seed: int) -> Counter[str]:
    """How often a flip was repaired ("read again"), reported ("refused") and "missed"."""
    torch.manual_seed(seed)
    chance = random.Random(seed)
    state, counted = _state(), Counter[str]()
    wanted = {name: tensor.clone() for name, tensor in state.items()}
    digests = digests_of(state)

    def check(name: str) -> tuple[torch.dtype, tuple[int, ...]]:
        return state[name].dtype, tuple(state[name].shape)

    async with MemoryHousehold(["owner", "reader"]) as mesh:
        server = FlippingServer(mesh["owner"])
        for number in range(flips):
            what, is_known = WAYS[number % len(WAYS)], bool(number // len(WAYS) % 2)
            undo = None
            if what == "memory":
                server.arm("", chance)
                undo = flip(chance.choice(list(state.values())), chance)
            else:
                server.arm(what, chance, after=chance.randrange(2) if what != "manifest" else 0)
            known = digests if is_known or what == "memory" else {}

            async def offered(_source: str, _first: int, end: int) -> StoredTensors:
                return StoredTensors(end, state, known)  # noqa: B023

            server.serve(JOB, offered, lambda _source: None)
            reading = TransferClient(mesh["reader"], check)
            request = TransferRequest(
                memory_id("owner"), JOB, SOURCE, 0, 1, range_bytes=lambda: 3000
            )
            try:
                await reading.read_from(request)
                found = reading.state().tensors
                right = all(torch.equal(found[n], t) for n, t in wanted.items())
                counted["read again" if right else "missed"] += 1
            except PeerError:
                counted["refused"] += 1
            if undo is not None:
                undo()
            elif not server.flipped:
                raise AssertionError(f"flip {number} of a {what} did not happen")
    return counted
