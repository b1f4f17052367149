"""The numbers of the recovery rules that a person or a test may turn: units and what each costs."""

from __future__ import annotations

from dataclasses import dataclass

from p2ptrain.recovery.work_signs import PLANS, TALKS, USUAL, SignLimits


@dataclass(frozen=True, slots=True)
class RecoverySettings:
    """Of one job, at its holder.

    Attributes:
        snapshot_cost_share: of the time, for snapshots. Raise: slower training. Lower: more is
            computed again.
        first_snapshot_rounds: until the first snapshot of a generation: one early costs no more
            than one late, and until then a death has all go back to where the generation began. No
            sooner, nor the second one: they pay for new memory, and there is little to lose.
        replay_limit_seconds: most undisturbed training between two snapshots: what a death costs.
        first_weights_replay_seconds: as much is computed again for want of anything newer than the
            first weights: the first snapshot is made after `replay_limit_seconds` at most, and may
            be on its way for as long.
        rebuild_min_steps: a lost stage is computed again by one device, from its snapshot and the
            tensors that its neighbours keep, where all would go back so many steps.
        link_grace_seconds: longest wait for a verdict on a link of the holder; membership takes
            4.2 s for the silent.
        relink_seconds: the same for a link between two others: who cannot reach whom by then is
            planned around.
        verdict_seconds: a stage only sees a dead link; the mesh has so long to find out who is
            gone.
        quiet_seconds: without a report of any stage, before the devices are asked what they do, and
            between two such looks.
        quiet_cpu_seconds: a process that only waits takes less of them meanwhile.
        silence_look_seconds: between two looks at who waits for whom.
        silence_seconds: a stage has waited so long where nothing moves, though what it waits for
            was due: then its sender is to blame.
        answer_seconds: for a device's answer to a question that needs no work.
        work_limits: how long a device that works on something may show nothing.
        talk_limits: the same where it only has to answer others.
        plan_limits: as work_limits, for a device that is asked for a plan.
        less_memory_share: what is left of a memory budget that proved too large, where the device
            does not know better.
        newcomer_settle_seconds: without another newcomer, before one look for all of them: devices
            are switched on together.
        evaluation_retry_seconds: after a look that failed or did not see all newcomers; twice as
            long after each further one.
        drift_window_seconds: rounds are put together until they took so long: shorter ones are
            noise.
        drift_look_seconds: between looks that nothing hastens: one costs more than a hundred rounds
            of milliseconds.
        drift_copying_seconds: rounds beside one snapshot that do not count: where it takes longer,
            it is what rounds are like.
        repartition_judged_share: of a step: FTPipeHD judges only a device whose tasks take as much.
    """

    snapshot_cost_share: float = 0.032
    first_snapshot_rounds: int = 8
    replay_limit_seconds: float = 60.0
    first_weights_replay_seconds: float = 180.0
    rebuild_min_steps: int = 2
    link_grace_seconds: float = 6.0
    relink_seconds: float = 2.0
    verdict_seconds: float = 3.0
    quiet_seconds: float = 30.0
    quiet_cpu_seconds: float = 3.0
    silence_look_seconds: float = 1.5
    silence_seconds: float = 4.0
    answer_seconds: float = 2.0
    work_limits: SignLimits = USUAL
    talk_limits: SignLimits = TALKS
    plan_limits: SignLimits = PLANS
    less_memory_share: float = 0.9
    newcomer_settle_seconds: float = 1.0
    evaluation_retry_seconds: float = 2.0
    drift_window_seconds: float = 0.3
    drift_look_seconds: float = 2.0
    drift_copying_seconds: float = 10.0
    repartition_judged_share: float = 1 / 3


HOME = RecoverySettings()
"""For the devices of a household."""
