"""Writes docs/internals/messages.md: the fields of every message of a job, from their declarations.

python -m tools.protocol_tables          # writes the page
python -m tools.protocol_tables --print
"""

from __future__ import annotations

import argparse
import types
from collections.abc import Iterator, Mapping
from dataclasses import is_dataclass
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from p2ptrain.messages import (
    findings,
    job_requests,
    kinds,
    plan_request,
    round_orders,
    snapshots,
    spans,
    tensors,
)
from p2ptrain.net.forms import (
    By,
    Count,
    Flat,
    Id,
    Length,
    Range,
    Row,
    Text,
    declared,
    is_required,
    key_of,
    mark,
)

PAGE = Path(__file__).parent.parent / "docs/internals/messages.md"

HEAD = """# The messages of a job, field by field

Made from the declarations in `p2ptrain/messages/` by `python -m tools.protocol_tables`; a test
holds it to them. What the messages are for: [protocol_job.md](protocol_job.md). A field in
brackets may lack; a count is a whole number from 0 to 2^53, an id a text of at most 64 characters.
Larger values (assignments, state reports, plans) travel as parts of a message, each a form of its
own.

| kind | fields of the message | fields of the answer |
|---|---|---|
"""

FORMS: Mapping[str, tuple[tuple[type, ...], tuple[type, ...]]] = {
    kinds.STATE_REPORT: ((job_requests.StateRequest,), ()),
    kinds.FACTS: ((job_requests.FactsRequest,), ()),
    kinds.FETCH_MODEL: ((job_requests.ModelRequest,), ()),
    kinds.PASSED_OVER: ((plan_request.PassedOver,), ()),
    kinds.PREPARE: ((job_requests.PrepareRequest,), (job_requests.PrepareReply,)),
    kinds.STATE_MANIFEST: ((snapshots.StateKey,), (snapshots.ManifestReply,)),
    kinds.STATE_READ: ((snapshots.StateKey, snapshots.RangeRequest), ()),
    kinds.ROUND: ((round_orders.GenerationKey, round_orders.RoundOrder), ()),
    f"{kinds.ROUND} (the last)": ((round_orders.GenerationKey, round_orders.EndOfRounds), ()),
    kinds.VALUES: ((tensors.StreamId, tensors.MicroBatchSlice, tensors.ValuesFields), ()),
    kinds.STARTED: ((tensors.StreamId,), ()),
    kinds.NORMS: ((round_orders.StageKey, round_orders.NormsReport), ()),
    kinds.DONE: ((round_orders.StageKey, round_orders.RoundReport), ()),
    kinds.COMMIT: ((round_orders.GenerationKey, round_orders.Commit), ()),
    kinds.FAILED: ((round_orders.StageKey, round_orders.FailureReport), ()),
    kinds.DIAGNOSE: (
        (round_orders.GenerationKey, round_orders.DiagnoseRequest),
        (findings.FindingFields,),
    ),
    kinds.ARRIVED: ((round_orders.GenerationKey, round_orders.RoundQuestion), ()),
    kinds.STANDING: ((round_orders.GenerationKey,), ()),
    kinds.SPANS: ((spans.SpansRequest,), (spans.SpansReply,)),
    kinds.ENERGY: ((), (job_requests.EnergyReply,)),
    kinds.EXPLAIN: ((), ()),
    kinds.ROUND_PICTURE: ((), ()),
    kinds.SNAPSHOT_OFFER: ((snapshots.SnapshotOffer,), ()),
    kinds.SNAPSHOT_KEPT: ((snapshots.SnapshotKept,), ()),
    kinds.BACKUP_PEER: ((snapshots.BackupAssignment,), ()),
    kinds.VERSIONS_KEEP: ((snapshots.RetainSnapshots,), ()),
    kinds.LOG_SEND: ((tensors.ResendLogged,), ()),
    kinds.FEED_SEND: ((tensors.ResendSamples,), ()),
    kinds.FIND: ((), (job_requests.JobKept,)),
    kinds.OVER: ((job_requests.JobQuestion,), (job_requests.JobOver,)),
    kinds.LEAVING: ((job_requests.JobQuestion,), (job_requests.LeaveReply,)),
    kinds.END: ((job_requests.JobEnd,), ()),
}
"""Kind -> the forms of the message's fields, and of its answer's."""


def page() -> str:
    """The whole page."""
    rows = [
        f"| `{kind}` | {_cell(sent)} | {_cell(answered)} |"
        for kind, (sent, answered) in FORMS.items()
    ]
    return HEAD + "\n".join(rows) + "\n"


def _cell(forms: tuple[type, ...]) -> str:
    return ", ".join(line for form in forms for line in _fields(form))


def _fields(form: type) -> Iterator[str]:
    for field, hint, marks in declared(form):
        if mark(marks, Flat):
            yield from _fields(hint)
            continue
        said = f"{key_of(field, marks)}: {_what(hint, marks)}"
        yield said if is_required(field) else f"[{said}]"


def _what(hint: Any, marks: tuple[Any, ...] = ()) -> str:
    """The type of a field and its limits, in a few words."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return _what(inner[0], (*marks, *hint.__metadata__))
    if origin in (Union, types.UnionType):
        return _what(next(one for one in inner if one is not type(None)), marks)
    if mark(marks, By):
        return "text"
    if origin is Literal:
        return " or ".join(map(str, inner))
    if origin in (tuple, frozenset):
        return _items(inner, marks)
    if isinstance(hint, type) and issubclass(hint, Enum):
        return " or ".join(str(one.value) for one in hint)
    if is_dataclass(hint) and isinstance(hint, type):
        each = ", ".join(_fields(hint))
        return f"[{each}]" if mark(marks, Row) else f"({each})"
    return _plain(hint, marks)


def _items(inner: tuple[Any, ...], marks: tuple[Any, ...]) -> str:
    if inner[-1] is Ellipsis or len(inner) == 1:
        length = mark(marks, Length)
        most = "" if length is None else f" (at most {length.most})"
        return f"list of {_what(inner[0])}{most}"
    return f"[{', '.join(_what(one) for one in inner)}]"


def _plain(hint: Any, marks: tuple[Any, ...]) -> str:
    if (hint, marks) in (_of(Count), _of(Id)):
        return "count" if hint is int else "id"
    limits = mark(marks, Range)
    if hint in (int, float) and limits is not None and limits.finite:
        least, most = (_number(one) for one in (limits.least, limits.most))
        return f"{hint.__name__} {least} to {most}"
    text, length = mark(marks, Text), mark(marks, Length)
    if hint is str and text is not None:
        return f"text of at most {text.most}"
    if hint is bytes and length is not None:
        return f"at most {length.most} bytes"
    return "plain data" if hint is Any else str(hint.__name__)


def _of(alias: Any) -> tuple[Any, tuple[Any, ...]]:
    """The type and the marks of a named form."""
    return get_args(alias)[0], alias.__metadata__


def _number(value: float) -> str:
    if value and value == int(value) and int(value) & (int(value) - 1) == 0 and value > 1 << 16:
        return f"2^{int(value).bit_length() - 1}"
    return f"{value:g}"


def main() -> None:
    """Write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--print", action="store_true", help="to stdout instead")
    if parser.parse_args().print:
        print(page(), end="")
    else:
        PAGE.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
