"""Ports of the simulator: a holder's way to a new generation, and how it has a plan made."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec

from p2ptrain.recovery.choose_version import RollForward, VersionChoice
from p2ptrain.recovery.cores.holder_port import PortCall
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

HEAD_START_SECONDS = 5.0

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

    def _tell(
        self,
        event: Callable[Concatenate[float, P], list[PortCall]],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> None:
        self._node.world.failpoint(self._node)
        self._node.later(0.001, "changed", lambda: self._node.tell(event, *args, **kwargs))

    def generation_ready(self, placed: Placement, choice: VersionChoice) -> None:
        """See `ChangePort`, as of all that follow."""
        self._tell(self._node.holder.generation_ready, self._ask.generation, placed)

    def refused(self, failure: ReconfigureFailure) -> None:
        """In a moment."""
        self._tell(self._node.holder.refused, failure)

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
    """A holder has a plan made: by the coordinator, by itself where that answers nothing of use."""

    def __init__(
        self, node: Holder, devices: list[str], then: Callable[[tuple[PlacedStage, ...]], None]
    ) -> None:
        self._node = node
        self._devices = devices
        self._then: Callable[[tuple[PlacedStage, ...]], None] | None = then

    def start(self) -> None:
        """Ask; one that is late is passed over."""
        node = self._node
        if node.coordinator is None:
            self._plan_soon()
        else:
            got, late = (
                partial(self._got, node.coordinator),
                partial(self._useless, node.coordinator),
            )
            node.call(node.coordinator, "plan", got, devices=self._devices)
            node.later(HEAD_START_SECONDS, "no plan yet", late)

    def _got(self, device: str, fields: dict[str, Any] | None) -> None:
        if fields is None:
            self._plan_soon()
        elif is_plan(fields["stages"], self._devices, self._node.world.truth.units):
            self._take(fields["stages"])
        else:
            self._useless(device)

    def _useless(self, device: str) -> None:
        if self._then is not None:
            self._node.passed_over(device)
            self._plan_soon()

    def _plan_soon(self) -> None:
        self._node.later(self._node.world.rng.uniform(0.0, 0.2), "planned", self._plan_here)

    def _plan_here(self) -> None:
        self._take(random_stages(self._node, self._devices, self._node.id))

    def _take(self, stages: tuple[PlacedStage, ...]) -> None:
        then, self._then = self._then, None
        if then is not None:
            then(stages)


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
