"""One line of plain English an event, for people. Pure, so that its words can be tested."""

from __future__ import annotations

from p2ptrain.net.read_form import one_line
from p2ptrain.observe import events as ev

_MEMBER_WORDS = {
    "alive": "is here",
    "suspect": "does not answer, asking others about it",
    "dead": "is gone",
    "left": "has left",
}
_PLAN_WORDS = {
    "start": "first plan",
    "failure": "new plan after a device was lost",
    "drift": "new plan, speeds have changed",
    "join": "new plan, a device has joined",
    "leave": "new plan, a device is leaving",
}


_ALLOCATION_WORDS = {
    "samples": "samples of each micro-batch",
    "micro_batches": "whole micro-batches",
    "tiles": "tiles of its maps",
}


def describe(event: ev.Event) -> str:
    """`event` in a line (a plan in several), without the end of line.

    Texts of other devices were checked where they came in; here nothing passes that a terminal
    would obey, whatever was forgotten there.
    """
    return "\n".join(map(one_line, _describe(event).split("\n")))


def _describe(event: ev.Event) -> str:
    match event:
        case ev.PlanEvent():
            return "\n".join(plan_lines(event))
        case ev.Step() | ev.Eval() | ev.Waiting() | ev.Failure() | ev.Recovered() | ev.Done():
            return _describe_job(event)
        case ev.Warned(message=message):
            return f"note: {message}"
        case ev.Failed(message=message):
            return f"error: {message}"
        case _:
            return _describe_member(event)


def _describe_member(event: ev.Event) -> str:
    match event:
        case ev.Ready():
            return f"{event.name} is ready at {event.address} port {event.port}"
        case ev.Pairing(code=code):
            return pairing_line(code)
        case ev.PairingFailed():
            return f"pairing failed: {event.message} ({event.attempts_left} tries left)"
        case ev.PairingClosed(reason=reason):
            return f"no device can pair now: {reason}; `p2ptrain invite` opens the window again"
        case ev.Renamed():
            return f"another device is called {event.previous}: this one is now {event.name}"
        case ev.MemberEvent():
            return f"{event.name} {_MEMBER_WORDS.get(event.state, event.state)}"
        case ev.CoordinatorEvent():
            return f"{event.name} coordinates (term {event.term})"
        case ev.Stopped():
            return "stopped"
        case _:
            return f"{event.event}: {event.to_json()}"


def _describe_job(
    event: ev.Step | ev.Eval | ev.Waiting | ev.Failure | ev.Recovered | ev.Done,
) -> str:
    match event:
        case ev.Step():
            return f"step {event.step}  loss {event.loss:.4f}  {event.samples_per_s:,.1f} samples/s"
        case ev.Eval():
            return f"step {event.step}  {metrics_text(event)}"
        case ev.Waiting():
            return f"waiting for {event.waiting_for} to come back"
        case ev.Failure():
            return f"lost {event.name}"
        case ev.Recovered():
            again = f", {event.replayed_steps} steps done again" if event.replayed_steps else ""
            return f"going on after {event.seconds:.1f} s{again}"
        case ev.Done():
            return done_line(event)


def metrics_text(event: ev.Eval) -> str:
    """The metrics by name, such as `accuracy 0.978`."""
    return "  ".join(f"{name} {value:.4g}" for name, value in event.metrics.items())


def done_line(event: ev.Done) -> str:
    """The last line of a job."""
    kept = f", weights in {event.out}" if event.out else ""
    return (
        f"done: {event.steps} steps in {event.seconds:.1f} s "
        f"({event.samples_per_s:,.1f} samples/s){kept}"
    )


def pairing_line(code: str) -> str:
    """How to let another device in."""
    return (
        f"pairing code {spaced_code(code)}: on each other device run  "
        f"p2ptrain join --code {code}  (within 10 minutes)"
    )


def spaced_code(code: str) -> str:
    """An eight-digit code in two groups, as people read it aloud."""
    return f"{code[:4]} {code[4:]}"


def plan_lines(event: ev.PlanEvent) -> list[str]:
    """The plan: its reason, its stages, and who is left out and why."""
    head = (
        f"plan {event.epoch} ({_PLAN_WORDS.get(event.reason, event.reason)}): "
        f"{_pieces(event)}, predicted {event.predicted_samples_per_s:,.1f} samples/s"
    )
    stages = [f"  stage {i}: {stage_text(stage)}" for i, stage in enumerate(event.stages)]
    if event.mode_reason:
        chosen = "without a barrier" if event.mode == "async" else "in synchronous rounds"
        stages.append(f"  {chosen}: {event.mode_reason}")
    if event.wire != "exact":
        stages.append(f"  values are rounded between devices (--wire {event.wire})")
    return [head, *stages, *(f"  left out: {o.name}: {o.reason}" for o in event.left_out)]


def _pieces(event: ev.PlanEvent) -> str:
    if event.mode == "sync" or event.micro_batches > 1:
        return f"{event.micro_batches} micro-batches of {event.micro_batch}"
    return f"mini-batches of {event.micro_batch}, {len(event.stages)} under way"


def stage_text(stage: ev.PlannedStage) -> str:
    """A stage's units and devices, with shares where several devices have one."""
    first, end = stage.units
    return f"units {first} to {end - 1} on {devices_text(stage)}"


def devices_text(stage: ev.PlannedStage) -> str:
    """The devices of a stage, such as `laptop` or `laptop + pi, whole micro-batches 5:3`."""
    names = " + ".join(device.name for device in stage.devices)
    if len(stage.devices) == 1:
        return names
    what = _ALLOCATION_WORDS.get(stage.allocation, stage.allocation)
    return f"{names}, {what} {':'.join(str(device.share) for device in stage.devices)}"
