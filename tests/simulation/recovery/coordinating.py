"""The coordinator's shell in the simulator."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from p2ptrain.training.recovery import coordinator_events as c
from p2ptrain.training.recovery.change import ChangeAsk, Reason
from p2ptrain.training.recovery.coordinator_core import CoordinatorCore
from p2ptrain.training.recovery.device_events import PrepareFailed
from p2ptrain.training.recovery.placed import PlacedStage

if TYPE_CHECKING:
    from tests.simulation.recovery.node import Node


class Coordinating:
    """Answers a holder's requests while this device is in office."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._core: CoordinatorCore | None = None
        self._holder = ""
        self._number = 0
        self._is_leave = False

    def receive(self, peer: str, kind: str, fields: dict[str, Any]) -> None:
        """A message that is for nobody else."""
        if kind != "change":
            return
        ask: ChangeAsk = fields["ask"]
        follows = self._node.follows
        if follows is None or follows[0] != self._node.id:
            self._node.world.send(self._node.id, peer, "no.office", number=ask.number)
            return
        if self._core is not None and peer == self._holder and ask.number < self._number:
            return
        self._holder, self._number = peer, ask.number
        self._is_leave = ask.reason is Reason.LEAVE and bool(ask.without)
        alive = {self._node.id, *(p for p, alive in self._node.alive.items() if alive)}
        self._core = self._node.coordinator_type(ask, follows[1], frozenset(alive))
        self._do(self._core, self._core.start())

    def on_office(self) -> None:
        """Whom this device follows has changed: what it was about is no longer its business."""
        follows = self._node.follows
        if follows is None or follows[0] != self._node.id:
            if self._core is not None and not self._core.over:
                self._tell("no.office", number=self._number)
            self._core = None

    def on_died(self, peer: str) -> None:
        """A device is dead."""
        if self._core is not None:
            self._feed(self._core, c.MemberGone(peer))

    def on_link_lost(self, peer: str) -> None:
        """Its calls fail by themselves."""

    def _feed(self, core: CoordinatorCore, event: c.CoordinatorEvent) -> None:
        if core is self._core:
            self._do(core, core.handle(event))

    def _do(self, core: CoordinatorCore, out: list[c.CoordinatorInstruction]) -> None:
        for instruction in out:
            self._node.world.failpoint(self._node)
            match instruction:
                case c.AskInventory():
                    self._ask_inventory(core, instruction)
                case c.MakePlan():
                    self._plan(core, instruction)
                case c.Prepare():
                    self._prepare(core, instruction)
                case c.AnswerHolder(number, placed, choice):
                    self._tell("answer", number=number, placed=placed, choice=choice)
                case c.RefuseHolder(number, reason, lost, again, spoiled, lowered):
                    passing = {"again": again, "spoiled": spoiled, "lowered": lowered}
                    self._tell("refused", number=number, reason=reason, lost=lost, **passing)

    def _tell(self, kind: str, **fields: Any) -> None:
        self._node.world.send(self._node.id, self._holder, kind, **fields)

    def _ask_inventory(self, core: CoordinatorCore, asked: c.AskInventory) -> None:
        device, epoch, forward = asked.device, asked.epoch, asked.forward
        follows = self._node.follows
        assert follows is not None

        def got(fields: dict[str, Any] | None) -> None:
            if fields is None or "inventory" not in fields:
                reason = "no link" if fields is None else fields["refused"]
                self._feed(core, c.InventoryFailed(epoch, device, reason))
            else:
                self._feed(core, c.InventoryIn(epoch, fields["inventory"]))

        self._node.call(
            device,
            "inventory",
            got,
            term=follows[1],
            epoch=epoch,
            holder=self._holder,
            apply=None if forward is None else forward.version,
            coefficient=None,
            rebuild=asked.rebuild,
        )

    def _prepare(self, core: CoordinatorCore, order: c.Prepare) -> None:
        epoch, device = order.placed.epoch, order.device

        def got(fields: dict[str, Any] | None) -> None:
            trouble = PrepareFailed(epoch, "no link", device) if fields is None else None
            if fields is not None and "refused" in fields:
                trouble = PrepareFailed(epoch, fields["refused"], device)
            elif fields is not None:
                trouble = fields["trouble"]
            self._feed(core, c.ReadyIn(epoch, device, trouble))

        self._node.call(device, "prepare", got, placed=order.placed, fetches=order.fetches)

    def _plan(self, core: CoordinatorCore, order: c.MakePlan) -> None:
        """Any plan will do: a random one, where the present one cannot stay."""
        if self._is_leave and self._node.world.rng.random() < self._node.world.no_plan_share:
            self._feed(core, c.NotPlanned(order.epoch, "no plan fits without it"))
            return
        if order.present is not None:
            stages = order.present.stages
        else:
            stages = random_stages(self._node, sorted(order.devices), self._holder)
        seconds = self._node.world.rng.uniform(0.0, 0.2)
        event = c.Planned(order.epoch, stages)
        self._node.later(seconds, "planned", lambda: self._feed(core, event))


def random_stages(node: Node, devices: list[str], holder: str) -> tuple[PlacedStage, ...]:
    """A random pipeline over some of the devices; in some worlds with groups."""
    world = node.world
    rng, units = world.rng, world.truth.units
    count = rng.randint(max(1, min(len(devices), 2)), min(len(devices), units))
    chosen = rng.sample(devices, count)
    groups = [[device] for device in chosen]
    while world.groups and len(groups) > 1 and rng.random() < 0.4:
        groups[rng.randrange(len(groups) - 1)] += groups.pop()
    cuts = sorted(rng.sample(range(1, units), len(groups) - 1))
    borders = list(zip([0, *cuts], [*cuts, units], strict=True))
    stages = []
    for p, ((first, end), group) in enumerate(zip(borders, groups, strict=True)):
        neighbours = groups[p + 1] if p + 1 < len(groups) else groups[p - 1]
        keeper = None
        if len(group) == 1 and len(groups) > 1:
            keeper = neighbours[0]
        elif len(group) == 1 and len(devices) > 1:
            keeper = next(device for device in devices if device != group[0])
        stages.append(PlacedStage(first, end, tuple(group), keeper))
    return tuple(stages)
