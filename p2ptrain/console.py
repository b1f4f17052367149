"""How events are shown to users: a line of plain English for each. Pure, so that tests can check
the words."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from p2ptrain import events
from p2ptrain.markup import rounded
from p2ptrain.net.forms import one_line

_MEMBER_WORDS = {
    "alive": "is here",
    "dead": "stopped answering",
    "left": "has left",
}

_PLAN_WORDS = {
    "start": "First plan",
    "failure": "New plan (training broke off)",
    "drift": "New plan (speeds have changed)",
    "join": "New plan (a device has joined)",
    "leave": "New plan (a device is leaving)",
}

_ALLOCATION_WORDS = {
    "samples": "sharing the samples of each piece",
    "micro_batches": "sharing whole pieces",
    "tiles": "sharing the image in tiles",
}


def describe(event: events.Event) -> str:
    """`event` in a line (a plan in several), without the end of line; "" where no user needs it.

    Texts of other devices were checked where they came in; here nothing passes that a terminal
    would obey, whatever was forgotten there.
    """
    return "\n".join(map(one_line, _describe(event).split("\n")))


def _describe(event: events.Event) -> str:
    say = _SENTENCES.get(type(event))
    return f"{event.event}: {event.to_json()}" if say is None else say(event)


def _step(event: events.Step) -> str:
    tokens = event.tokens_per_s
    of_tokens = "" if tokens is None else f"  {tokens:,.0f} tokens/s"
    speed = f"{event.samples_per_s:,.1f} samples/s{of_tokens}"
    return f"step {event.step}  loss {event.loss:.4f}  {speed}"


def _recovered(event: events.Recovered) -> str:
    again = f", {counted(event.replayed_steps, 'step')} repeated"
    lost = f"{event.seconds:.1f} s lost{again if event.replayed_steps else ''}"
    return f"Training continues ({lost})."


def _pairing_failed(event: events.PairingFailed) -> str:
    left = event.attempts_left  # the message says where none is
    rest = {0: "", 1: " (1 try left)"}.get(left, f" ({left} tries left)")
    return f"pairing failed: {event.message}{rest}"


def _member(event: events.Member) -> str:
    if event.state == "suspect":
        return ""  # the household sorts it out by itself
    return f"{event.name} {_MEMBER_WORDS.get(event.state, event.state)}"


def metrics_text(event: events.Eval) -> str:
    """The metrics by name, such as `accuracy 0.978`."""
    return "  ".join(f"{name} {value:.4g}" for name, value in event.metrics.items())


def done_line(event: events.Done) -> str:
    """The last line of a job."""
    kept = f", weights in {event.out}" if event.out else ""
    seconds = f"{event.seconds:.1f}" if event.seconds >= 1 else f"{event.seconds:.2g}"
    made = counted(event.steps - event.steps_before, "step")
    total = f", {event.steps:,} in all" if event.steps_before else ""
    return (
        f"done: {made} in {seconds} s{total} "
        f"({event.samples_per_s:,.1f} samples/s{_energy_text(event)}){kept}"
    )


def _energy_text(event: events.Done) -> str:
    if event.joules_per_sample is None:
        return ", energy not measurable" if event.energy_missing else ""
    return f", {event.joules_per_sample:.3g} J a sample on {' and '.join(event.energy_of)}"


def pairing_line(code: str) -> str:
    """How to let another device in."""
    return (
        f"Pairing code {spaced_code(code)}. On each other device run, within 10 minutes:  "
        f"p2ptrain join --code {code}"
    )


def spaced_code(code: str) -> str:
    """An eight-digit code in two groups, as users read it aloud."""
    return f"{code[:4]} {code[4:]}"


def plan_lines(event: events.Plan) -> list[str]:
    """The plan: its reason, who computes which layers, and who is not used and why."""
    lines = [f"  {devices_text(stage)}: {layers_text(stage)}" for stage in event.stages]
    if event.mode_reason:
        lines.append(f"  --mode {event.mode} is used: {event.mode_reason}")
    if event.wire != "exact":
        lines.append(f"  values are rounded between devices (--wire {event.wire})")
    unused = (f"  {out.name} is not used: {out.reason}" for out in event.left_out)
    return [plan_head(event), *lines, *unused]


def plan_head(event: events.Plan) -> str:
    """Why there is a plan, how a batch is computed and how fast that should be."""
    reason = _PLAN_WORDS.get(event.reason, f"New plan ({event.reason})")
    speed = event.predicted_samples_per_s
    about = f", about {rounded(speed)} samples/s" if speed else ""  # torchrun has no prediction
    return f"{reason}: {_pieces(event)}{about}"


def _pieces(event: events.Plan) -> str:
    if event.mode == "async" and event.micro_batches == 1:
        return f"batches of {event.micro_batch}, {len(event.stages)} at a time"
    if event.micro_batches == 1:
        return f"batches of {event.micro_batch} in one piece"
    return f"batches in {event.micro_batches} pieces of {event.micro_batch}"


def layers_text(stage: events.PlanStage) -> str:
    """A stage's first and last layer that has weights, such as `layers conv1 to layer3.0`."""
    layers = list(dict.fromkeys(name.rpartition(".")[0] or name for name in stage.parameters))
    if not layers:
        return "layers without weights"
    return f"layer {layers[0]}" if len(layers) == 1 else f"layers {layers[0]} to {layers[-1]}"


def devices_text(stage: events.PlanStage) -> str:
    """The devices of a stage, such as `laptop` or `laptop + pi (sharing whole pieces 5:3)`."""
    names = " + ".join(device.name for device in stage.devices)
    if len(stage.devices) == 1:
        return names
    how = _ALLOCATION_WORDS.get(stage.allocation, stage.allocation)
    return f"{names} ({how} {':'.join(str(device.share) for device in stage.devices)})"


def counted(number: int, thing: str) -> str:
    """Such as `1 step` or `1,320 steps`."""
    return f"{number:,} {thing}{'' if number == 1 else 's'}"


_SENTENCES: Mapping[type[events.Event], Callable[[Any], str]] = {
    events.Plan: lambda event: "\n".join(plan_lines(event)),
    events.Step: _step,
    events.Eval: lambda event: f"step {event.step}  {metrics_text(event)}",
    events.Waiting: lambda event: f"Training waits until {event.waiting_for} is back.",
    events.Paused: lambda event: f"Paused on {event.by}. The weights and the devices are kept.",
    events.Resumed: lambda event: f"Training continues, says {event.by}.",
    events.Failure: lambda event: f"Lost {event.name}. The others go on without it.",
    events.Recovered: _recovered,
    events.Done: done_line,
    events.Warning: lambda event: f"note: {event.message}",
    events.Error: lambda event: f"error: {event.message}",
    events.Ready: lambda event: f"{event.name} is ready at {event.address} port {event.port}",
    events.Device: lambda event: event.reason,
    events.Pairing: lambda event: pairing_line(event.code),
    events.PairingFailed: _pairing_failed,
    events.PairingClosed: lambda event: (
        f"No device can pair now: {event.reason}. To let one in, run  p2ptrain invite"
    ),
    events.Renamed: lambda event: (
        f"{event.previous} is another device's name: this one is now {event.name}"
    ),
    events.Coordinator: lambda _: "",  # as of a member that is suspect
    events.Member: _member,
    events.Condition: lambda event: f"{event.name} {event.sentence or 'works fully again'}",
    events.Stopped: lambda _: "stopped",
}
