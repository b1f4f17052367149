"""Shells of the simulator: a holder's way to a new generation, and how it has a plan made."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from p2ptrain.recovery.cores import holder_events, planner_core, reconfigure_events
from p2ptrain.recovery.cores.worker_events import PrepareFailed
from p2ptrain.recovery.generation_request import (
    GenerationRequest,
    ReconfigureFailure,
    ReconfigureReason,
)
from p2ptrain.recovery.placement import PlacedStage

if TYPE_CHECKING:
    from tests.simulation.recovery.holder import Holder
    from tests.simulation.recovery.node import Node


class Changing:
    """One request of a holder; a newer one cancels it."""

    def __init__(self, node: Holder, ask: GenerationRequest) -> None:
        self._node = node
        self._ask = ask
        self._is_leave = ask.reason is ReconfigureReason.LEAVE and bool(ask.without)
        alive = {node.id, *(p for p, alive in node.alive.items() if alive)}
        self._core = node.change_type(ask, frozenset(alive))

    def start(self) -> None:
        """Ask everybody."""
        if self._node.change is self:
            self._do(self._core.start())

    def on_died(self, peer: str) -> None:
        """A device is dead."""
        self._feed(reconfigure_events.MemberGone(peer))

    def _feed(self, event: reconfigure_events.ChangeEvent) -> None:
        if self._node.change is self:
            self._do(self._core.handle(event))

    def _do(self, out: list[reconfigure_events.ChangeInstruction]) -> None:
        for instruction in out:
            self._node.world.failpoint(self._node)
            match instruction:
                case reconfigure_events.AskStateReport():
                    self._ask_inventory(instruction)
                case reconfigure_events.MakePlan():
                    self._plan(instruction)
                case reconfigure_events.PrepareDevice():
                    self._prepare(instruction)
                case reconfigure_events.ReconfigurationReady(number, placed, choice):
                    self._tell(holder_events.GenerationReady(number, placed, choice))
                case ReconfigureFailure():
                    self._tell(instruction)

    def _tell(self, event: holder_events.HolderEvent) -> None:
        self._node.later(0.001, "changed", lambda: self._node.tell(event))

    def _ask_inventory(self, asked: reconfigure_events.AskStateReport) -> None:
        device, generation, forward = asked.device, asked.generation, asked.forward

        def got(fields: dict[str, Any] | None) -> None:
            if fields is None or "inventory" not in fields:
                reason = "no link" if fields is None else fields["refused"]
                self._feed(reconfigure_events.StateReportFailed(generation, device, reason))
            else:
                self._feed(reconfigure_events.StateReported(generation, fields["inventory"]))

        self._node.call(
            device,
            "inventory",
            got,
            generation=generation,
            apply=None if forward is None else forward.version,
            coefficient=None,
            rebuild=asked.rebuild,
        )

    def _prepare(self, order: reconfigure_events.PrepareDevice) -> None:
        generation, device = order.placed.generation, order.device

        def got(fields: dict[str, Any] | None) -> None:
            trouble = PrepareFailed(generation, "no link", device) if fields is None else None
            if fields is not None and "refused" in fields:
                trouble = PrepareFailed(generation, fields["refused"], device)
            elif fields is not None:
                trouble = fields["trouble"]
            self._feed(reconfigure_events.DeviceReady(generation, device, trouble))

        self._node.call(device, "prepare", got, placed=order.placed, fetches=order.fetches)

    def _plan(self, order: reconfigure_events.MakePlan) -> None:
        """Any plan will do: a random one, where the present one cannot stay."""
        node = self._node
        if self._is_leave and node.world.rng.random() < node.world.no_plan_share:
            self._feed(reconfigure_events.PlanFailed(order.generation, "no plan fits without it"))
            return
        if order.present is not None:
            stages = order.present.stages
            self._feed(reconfigure_events.PlanMade(order.generation, stages))
            return
        devices = sorted(order.devices)
        Asking(
            node,
            devices,
            lambda stages: self._feed(reconfigure_events.PlanMade(order.generation, stages)),
        ).start()


class Asking:
    """A holder has a plan made: by the coordinator, by itself where that answers nothing of use."""

    def __init__(
        self, node: Holder, devices: list[str], then: Callable[[tuple[PlacedStage, ...]], None]
    ) -> None:
        self._node = node
        self._devices = devices
        self._then = then
        self._core = node.planner.asked(node.world.now, node.coordinator)

    def start(self) -> None:
        """Ask."""
        self._do(self._core.start())
        self._wake()

    def _feed(self, event: planner_core.PlannerEvent) -> None:
        self._do(self._core.handle(event, self._node.world.now))

    def _wake(self) -> None:
        seconds = self._core.next_wakeup - self._node.world.now
        if seconds < float("inf"):
            self._node.later(max(seconds, 0.0), "planner", self._tick)

    def _tick(self) -> None:
        self._do(self._core.tick(self._node.world.now))
        self._wake()

    def _do(self, out: list[planner_core.PlannerInstruction]) -> None:
        node = self._node
        for instruction in out:
            match instruction:
                case planner_core.AskPlanner(device):
                    node.call(device, "plan", self._got, devices=self._devices)
                case planner_core.AskForSign(device):
                    node.call(device, "works", self._signed)
                case planner_core.PlanHere():
                    node.later(node.world.rng.uniform(0.0, 0.2), "planned", self._plan_here)
                case planner_core.PassOver(device, _):
                    node.passed_over(device)

    def _got(self, fields: dict[str, Any] | None) -> None:
        if fields is None:
            self._feed(planner_core.NoAnswer())
            return
        stages = fields["stages"]
        if not is_plan(stages, self._devices, self._node.world.truth.units):
            self._feed(planner_core.Useless("gave no plan"))
            return
        self._take(stages, planner_core.PlanAnswered())

    def _signed(self, fields: dict[str, Any] | None) -> None:
        self._feed(planner_core.Sign(fields is not None))

    def _plan_here(self) -> None:
        self._take(
            random_stages(self._node, self._devices, self._node.id), planner_core.FoundHere()
        )

    def _take(
        self,
        stages: tuple[PlacedStage, ...],
        event: planner_core.PlanAnswered | planner_core.FoundHere,
    ) -> None:
        is_over = self._core.is_over
        self._feed(event)
        if not is_over:
            self._then(stages)


def is_plan(stages: object, devices: list[str], units: int) -> bool:
    """Whether an answer covers all units, once, with these devices."""
    if not isinstance(stages, tuple) or not all(isinstance(x, PlacedStage) for x in stages):
        return False
    ends = [(stage.first, stage.end) for stage in stages]
    placed = [device for stage in stages for device in stage.devices]
    return (
        [0, *(end for _, end in ends)] == [*(first for first, _ in ends), units]
        and len(set(placed)) == len(placed)
        and set(placed) <= set(devices)
    )


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
