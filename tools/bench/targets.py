"""What the benchmark should show: fractions of aggregate, by household, model and size.

What the best 1F1B plans known reach in simulation, less 5% for the runtime.
"""

from __future__ import annotations

_COLUMNS = ("A", "B", "C", "D", "F", "B1000")
_FRACTIONS = {
    "mobilenetv2": (".84 .84 .83 .85 .90 .89", ".88 .87 .85 .87 .92 .91"),
    "efficientnet_b1": (".56 .58 .59 .63 .78 .69", ".78 .79 .78 .82 .85 .82"),
    "resnet50": (".32 .37 .37 .43 .63 .49", ".55 .60 .58 .63 .80 .70"),
    "vit": (".70 .72 .72 .75 .79 .80", ".76 .77 .74 .80 .84 .84"),
    "bert_small": (".62 .63 .61 .71 .75 .74", ".70 .70 .68 .76 .80 .80"),
}
_LINEAR = {"P2": 0.92, "P3": 0.90, "P4": 0.89, "P5": 0.87, "P6": 0.86}
OVER_RIVALS = {"S": 1.25, "L": 1.1}
"""At least so many times the better of DistributedDataParallel and torch pipelining."""


def fraction(household: str, model: str, size: str) -> float | None:
    """The part of aggregate to reach; None where nothing is asked."""
    if model == "mobilenetv2" and size == "L" and household in _LINEAR:
        return _LINEAR[household]
    if household not in _COLUMNS:
        return None
    row = _FRACTIONS[model]["SL".index(size)]
    return float(row.split()[_COLUMNS.index(household)])
