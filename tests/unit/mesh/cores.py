"""Cores of the mesh joined by fake links without delay, stepped by hand: for tests of one rule."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Generic, TypeVar

import cbor2

from p2ptrain.mesh.election.election import Election
from p2ptrain.mesh.membership.core_events import (
    ElectionInstruction,
    Instruction,
    MessageReceived,
    Misbehaved,
    SendTo,
)
from p2ptrain.mesh.membership.membership import Membership

MESSAGES_LIMIT = 10_000


AnyCore = TypeVar("AnyCore", Membership, Election)


class Cores(Generic[AnyCore]):
    """One core a device.

    Attributes:
        nodes: by id.
        now: the clock that all share.
        offences: (observer, what it did not believe), in order.
        silent: ids that get no ticks, and whose messages, to and fro, are lost.
    """

    def __init__(self, now: float) -> None:
        self.now = now
        self.nodes: dict[str, AnyCore] = {}
        self.offences: list[tuple[str, Misbehaved]] = []
        self.silent: set[str] = set()
        self.largest_message_bytes = 0
        self._wire: deque[tuple[str, str, bytes]] = deque()

    def settle(self) -> None:
        """Deliver until nothing is on the wire."""
        for _ in range(MESSAGES_LIMIT):
            if not self._wire:
                return
            sender, receiver, data = self._wire.popleft()
            if self.are_linked(sender, receiver) and not {sender, receiver} & self.silent:
                event = MessageReceived(sender, cbor2.loads(data))
                self.carry_out(receiver, self.nodes[receiver].handle(event, self.now))
        raise AssertionError("the devices never fall silent")

    def run_for(self, seconds: float) -> None:
        """Tick everybody when due."""
        end = self.now + seconds
        while self.now < end:
            awake = {i: n for i, n in self.nodes.items() if i not in self.silent}
            self.now = min([end, *(max(self.now, n.next_wakeup) for n in awake.values())])
            for id_, node in awake.items():
                if node.next_wakeup <= self.now:
                    self.carry_out(id_, node.tick(self.now))
            self.settle()

    def are_linked(self, sender: str, receiver: str) -> bool:
        """Whether messages pass."""
        return receiver in self.nodes

    def carry_out(self, id_: str, out: Sequence[Instruction | ElectionInstruction]) -> None:
        """Send, or note, what a core wants."""
        for instruction in out:
            if isinstance(instruction, SendTo):
                data = cbor2.dumps(instruction.payload)
                self.largest_message_bytes = max(self.largest_message_bytes, len(data))
                self._wire.append((id_, instruction.peer, data))
            if isinstance(instruction, Misbehaved):
                self.offences.append((id_, instruction))
            else:
                self.note(id_, instruction)

    def note(self, id_: str, instruction: Instruction | ElectionInstruction) -> None:
        """What a core wants or reports."""
