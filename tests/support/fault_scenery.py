"""What makes a short job wait for what a long one would come to: copies, a newcomer's plan."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from p2ptrain.coordinator import replan_decision
from p2ptrain.coordinator.measured_cluster import MeasuredCluster, planner_question
from p2ptrain.holder.driver import JobDriver
from p2ptrain.holder.rounds.generation import HolderGeneration
from p2ptrain.holder.snapshots.snapshot_manager import SnapshotManager
from p2ptrain.messages.plan_request import JobPlanRequest
from p2ptrain.messages.round_orders import RoundOrder
from p2ptrain.plan.replan.hysteresis import ReplanAction, ReplanDecision
from p2ptrain.plan.replan.migration import plan_migration
from p2ptrain.plan.replan.replica_holders import place_replicas
from p2ptrain.plan.types.plan import Plan
from p2ptrain.plan.types.request import PlanRequest
from p2ptrain.recovery.cores.holder_port import PortCall
from p2ptrain.recovery.recovery_settings import RecoverySettings
from tests.integration.training.group_plans import Stage, plan

KEPT = (2, 5)
"""Updates after which stages are copied; before a round of more than the first, nobody dies."""


class Gate:
    """Rounds from one on are not ordered while it is closed.

    Args:
        first: the round that waits for the first of `KEPT`, if it is before the last one.
    """

    def __init__(self, first: int) -> None:
        self._closed_from: int | None = None
        self._first = first
        self._changed = asyncio.Event()

    def close(self, first: int) -> None:
        """Order no round from this one on."""
        self._closed_from = first

    def open(self) -> None:
        """Order them."""
        self._closed_from = None
        self._changed.set()

    def _is_closed(self, generation: HolderGeneration, step: int, stable: SnapshotManager) -> bool:
        if generation.draining.is_set():
            return False  # a change waits for the rounds that are ordered
        if step >= self._first and stable.stable is None:
            return True
        return self._closed_from is not None and step >= self._closed_from

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """All jobs of this process wait at it."""
        order, do, take = HolderGeneration.order, JobDriver._do, SnapshotManager._take
        copies: list[SnapshotManager] = []
        begin = SnapshotManager.begin

        async def gated(generation: HolderGeneration, what: RoundOrder) -> None:
            while self._is_closed(generation, what.round.step, copies[-1]):
                self._changed.clear()
                await self._changed.wait()
            await order(generation, what)

        def watched(driver: JobDriver, calls: list[PortCall]) -> None:
            do(driver, calls)
            self._changed.set()

        def begun(kept: SnapshotManager, *args: Any) -> None:
            copies.append(kept)
            begin(kept, *args)

        def taken(kept: SnapshotManager, results: Any) -> None:
            take(kept, results)
            self._changed.set()

        with ExitStack() as stack:
            stack.enter_context(patch.object(HolderGeneration, "order", gated))
            stack.enter_context(patch.object(JobDriver, "_do", watched))
            stack.enter_context(patch.object(SnapshotManager, "begin", begun))
            stack.enter_context(patch.object(SnapshotManager, "_take", taken))
            yield


@contextmanager
def kept_early() -> Iterator[None]:
    """Copies are made after the updates of `KEPT`."""

    def wants(_copies: SnapshotManager, step: int) -> bool:
        return step in KEPT

    with patch.object(SnapshotManager, "wants", wants):
        yield


SETTINGS = RecoverySettings(snapshot_cost_share=1.0, first_snapshot_rounds=1)
"""Rounds take a millisecond: by what copies cost, these short jobs would end before one."""


@contextmanager
def nothing_better() -> Iterator[None]:
    """Whatever is looked at, the plan stays: however slow the machine, whichever device is idle."""

    def decide(
        request: JobPlanRequest,
        household: MeasuredCluster,
        present: replan_decision.PresentPlan,
        *_: Any,
        **_rest: Any,
    ) -> ReplanDecision:
        profile, cluster = planner_question(request, household)
        held = place_replicas(present.plan, chain=False)
        nothing = plan_migration(profile, cluster, present.plan, held, present.plan)
        return ReplanDecision(ReplanAction.STAY, present.plan, nothing, 0.0, "a test wants it")

    with patch.object(replan_decision, "decide_replan", decide):
        yield


@contextmanager
def taken_in(stages: Sequence[Stage], places: Sequence[str]) -> Iterator[None]:
    """A plan of these stages on these devices is better."""

    def decide(
        request: JobPlanRequest,
        household: MeasuredCluster,
        present: replan_decision.PresentPlan,
        found: Sequence[Plan],
        **_rest: Any,
    ) -> ReplanDecision:
        profile, cluster = planner_question(request, household)
        size = PlanRequest(request.batch_size, micro_batch=request.micro_batch)
        forced = plan(stages, profile, cluster, size, names=places)
        better = replace(forced, planner=present.plan.planner)
        held = place_replicas(present.plan, chain=False)
        migration = plan_migration(profile, cluster, present.plan, held, better)
        return ReplanDecision(ReplanAction.MOVE, better, migration, None, "a test wants it")

    with patch.object(replan_decision, "decide_replan", decide):
        yield
