"""Ports of the simulator: a holder's way to a new generation, and how it has a plan made."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, ParamSpec

from p2ptrain.recovery.choose_version import RollForward, VersionChoice
from p2ptrain.recovery.cores import holder_events
from p2ptrain.recovery.cores.reconfigure_core import MakePlan
from p2ptrain.recovery.fetch_plan import Fetch
from p2ptrain.recovery.generation_request import (
    GenerationRequest,
    PrepareFailed,
    ReconfigureFailure,
    ReconfigureReason,
)
from p2ptrain.recovery.placement import PlacedStage, Placement
from p2ptrain.recovery.rebuild_plan import Rebuild

if TYPE_CHECKING:
    from tests.simulation.recovery.holder import Holder
    from tests.simulation.recovery.node import Node

P = ParamSpec("P")


class Changing:
    """One request of a holder, and its core's port; a newer one cancels it."""

    def __init__(self, node: Holder, ask: GenerationRequest) -> None:
        self._node = node
        self._ask = ask
        self._is_leave = ask.reason is ReconfigureReason.LEAVE and bool(ask.without)
        alive = {node.id, *(p for p, alive in node.alive.items() if alive)}
        self._core = node.change_type(ask, frozenset(alive), self)

    def start(self) -> None:
        """Ask everybody."""
        self._feed(self._core.start)

    def on_died(self, peer: str) -> None:
        """A device is dead."""
        self._feed(self._core.gone, peer)

    def _feed(self, event: Callable[P, None], *args: P.args, **kwargs: P.kwargs) -> None:
        if self._node.change is self:
            event(*args, **kwargs)

    def _tell(self, event: holder_events.HolderEvent) -> None:
        self._node.world.failpoint(self._node)
        self._node.later(0.001, "changed", lambda: self._node.tell(event))

    def generation_ready(self, placed: Placement, choice: VersionChoice) -> None:
        """See `ChangePort`, as of all that follow."""
        self._tell(holder_events.GenerationReady(self._ask.number, placed, choice))

    def refused(self, failure: ReconfigureFailure) -> None:
        """In a moment."""
        self._tell(failure)

    def ask_state(
        self,
        device: str,
        generation: int,
        forward: RollForward | None = None,
        rebuild: Rebuild | None = None,
    ) -> None:
        """Over the network."""

        def got(fields: dict[str, Any] | None) -> None:
            if fields is None or "state_report" not in fields:
                self._feed(self._core.no_report, generation, device)
            else:
                self._feed(self._core.state_reported, generation, fields["state_report"])

        self._node.world.failpoint(self._node)
        asked = {"apply": None if forward is None else forward.version, "rebuild": rebuild}
        self._node.call(
            device, "state_report", got, generation=generation, coefficient=None, **asked
        )

    def prepare(
        self, placed: Placement, wanted: Mapping[str, tuple[Fetch, ...]], *, gathers: bool
    ) -> None:
        """Over the network."""
        for device in placed.devices:
            self._node.world.failpoint(self._node)
            got = partial(self._ready, placed.generation, device)
            self._node.call(device, "prepare", got, placed=placed, fetches=wanted[device])

    def _ready(self, generation: int, device: str, fields: dict[str, Any] | None) -> None:
        trouble = PrepareFailed("no link", device) if fields is None else None
        if fields is not None and "refused" in fields:
            trouble = PrepareFailed(fields["refused"], device)
        elif fields is not None:
            trouble = fields["trouble"]
        self._feed(self._core.ready, generation, device, trouble)

    def make_plan(self, make: MakePlan) -> None:
        """Any plan will do: a random one, where the present one cannot stay."""
        node, planned = self._node, partial(self._feed, self._core.planned, make.generation)
        node.world.failpoint(node)
        if self._is_leave and node.world.rng.random() < node.world.no_plan_share:
            self._feed(self._core.no_plan, make.generation, "no plan fits without it")
        elif make.present is not None:
            planned(make.present.stages)
        else:
            Asking(node, sorted(make.devices), planned).start()


class Asking:
    """A holder has a plan made: by the coordinator, by itself where that answers nothing of use.

    The port of `planner_core`.
    """

    def __init__(
        self, node: Holder, devices: list[str], then: Callable[[tuple[PlacedStage, ...]], None]
    ) -> None:
        self._node = node
        self._devices = devices
        self._then = then
        self._core = node.planner.asked(node.world.now, node.coordinator, self)

    def start(self) -> None:
        """Ask."""
        self._core.start()
        self._wake()

    def _wake(self) -> None:
        seconds = self._core.next_wakeup - self._node.world.now
        if seconds < float("inf"):
            self._node.later(max(seconds, 0.0), "planner", self._tick)

    def _tick(self) -> None:
        self._core.tick(self._node.world.now)
        self._wake()

    def ask(self, device: str) -> None:
        """Over the network."""
        self._node.call(device, "plan", self._got, devices=self._devices)

    def ask_for_sign(self, device: str) -> None:
        """Over the network."""
        self._node.call(device, "works", self._signed)

    def plan_here(self) -> None:
        """It takes a moment."""
        self._node.later(self._node.world.rng.uniform(0.0, 0.2), "planned", self._plan_here)

    def pass_over(self, device: str, why: str) -> None:
        """As all devices of the job hear."""
        self._node.passed_over(device)

    def _got(self, fields: dict[str, Any] | None) -> None:
        if fields is None:
            self._core.no_answer()
        elif is_plan(fields["stages"], self._devices, self._node.world.truth.units):
            self._take(fields["stages"], self._core.answered)
        else:
            self._core.useless("gave no plan")

    def _signed(self, fields: dict[str, Any] | None) -> None:
        self._core.sign(self._node.world.now, works=fields is not None)

    def _plan_here(self) -> None:
        stages = random_stages(self._node, self._devices, self._node.id)
        self._take(stages, self._core.found_here)

    def _take(self, stages: tuple[PlacedStage, ...], say: Callable[[], None]) -> None:
        is_over = self._core.is_over
        say()
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
        backup_peer = None
        if len(group) == 1 and len(groups) > 1:
            backup_peer = neighbours[0]
        elif len(group) == 1 and len(devices) > 1:
            backup_peer = next(device for device in devices if device != group[0])
        stages.append(PlacedStage(first, end, tuple(group), backup_peer))
    return tuple(stages)
