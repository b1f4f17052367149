"""The state as Prometheus reads it (text format 0.0.4). Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

from p2ptrain.page.state import DeviceView, PageState

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_Sample = tuple[dict[str, str], float | None]


_OF_DEVICES: tuple[tuple[str, str, Callable[[DeviceView], float | None]], ...] = (
    ("memory_bytes", "Memory that p2ptrain may use on a device.", lambda d: d.memory_bytes),
    ("used_bytes", "Of that, what jobs take now.", lambda d: d.used_bytes),
    (
        "card_used_bytes",
        "Memory of a device's accelerator that p2ptrain has taken.",
        lambda d: d.card_used_bytes,
    ),
    (
        "card_offered_bytes",
        "Memory of a device's accelerator that p2ptrain may use.",
        lambda d: d.card_offered_bytes,
    ),
    (
        "needed_bytes",
        "Memory that a device needs for its part of the plan, beside an accelerator's own.",
        lambda d: d.needed_bytes,
    ),
    (
        "card_needed_bytes",
        "Memory of a device's accelerator that its part of the plan needs.",
        lambda d: d.card_needed_bytes,
    ),
    (
        "alone_samples_per_second",
        "What a device would do of the job without the others, as measured.",
        lambda d: d.alone_samples_per_s,
    ),
    ("has_part", "1 where a device has a part of the plan.", lambda d: d.part is not None),
)


def metrics_text(state: PageState) -> str:
    """What is known; what is not is left out."""
    job = state.job
    counts = sorted(Counter(d.state for d in state.devices).items())
    by_state = [({"state": name}, n) for name, n in counts]
    lines = _gauge("devices", "Devices of the household, by state.", by_state)
    for name, help_text, read in _OF_DEVICES:
        samples = [({"device": d.name}, read(d)) for d in state.devices]
        lines += _gauge(f"device_{name}", help_text, samples)
    ends = [({"from": link.sender, "to": link.receiver}, link) for link in state.links]
    lines += _gauge(
        "link_bytes_per_second",
        "A link as last measured, one direction.",
        [(labels, link.bytes_per_s) for labels, link in ends],
    )
    lines += _gauge(
        "link_carries_bytes_per_second",
        "What a link of this device carries now, one direction.",
        [(labels, link.now_bytes_per_s) for labels, link in ends],
    )
    if job is None:
        return "".join(lines)
    of_job = {"model": job.model, "holder": job.holder}
    for name, help_text, value in (
        ("running", "1 while a job runs.", job.state in ("starting", "training", "waiting")),
        ("step", "Updates that count.", job.step),
        ("steps", "Updates of the whole job.", job.steps),
        ("loss", "Of the last step.", job.loss),
        ("learning_rate", "Of the last step.", job.lr),
        ("samples_per_second", "Median of the last steps.", job.samples_per_s),
        ("tokens_per_second", "The same, of token ids.", job.tokens_per_s),
        ("predicted_samples_per_second", "By the plan.", job.predicted_samples_per_s),
        ("left_seconds", "Until the job is done.", job.seconds_left),
    ):
        lines += _gauge(f"job_{name}", help_text, [(of_job, value)])
    return "".join(lines)


def _gauge(name: str, help_text: str, samples: Iterable[_Sample]) -> list[str]:
    known = [(labels, value) for labels, value in samples if value is not None]
    if not known:
        return []
    name = f"p2ptrain_{name}"
    head = [f"# HELP {name} {help_text}\n", f"# TYPE {name} gauge\n"]
    return head + [f"{name}{{{_labels(labels)}}} {float(value):.10g}\n" for labels, value in known]


def _labels(labels: dict[str, str]) -> str:
    return ",".join(f'{key}="{_escaped(value)}"' for key, value in labels.items())


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
