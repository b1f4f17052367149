"""What the devices did until the first step, from their own logs.

With `--debug` a device writes on stderr when a phase was over and how long it took:

    2026-01-31 12:00:07,125 INFO p2ptrain.worker.service event='measured' seconds=4.2
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

_LINE = re.compile(
    r"(?P<time>\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}) INFO \S+ event='(?P<what>\w+)' "
    r"(?:.* )?seconds=(?P<seconds>[0-9.]+)"
)


@dataclass(frozen=True, slots=True)
class Phase:
    """Something that a device did.

    Attributes:
        begin, end: seconds after `train` was started.
    """

    device: str
    what: str
    begin: float
    end: float

    def __str__(self) -> str:
        seconds = self.end - self.begin
        return f"{self.begin:6.2f} {self.end:6.2f} {seconds:6.2f}  {self.device:<10} {self.what}"


def phases(logs: Mapping[str, Sequence[str]], started: float, until: float) -> list[Phase]:
    """Every phase that ended between start and first step, in the order of the ends.

    Args:
        logs: device -> the lines of its stderr.
        started: when `train` was, in seconds since 1970.
        until: seconds after `started`.
    """
    found = [phase for name, lines in logs.items() for phase in _phases(name, lines, started)]
    return sorted((p for p in found if 0 <= p.end <= until), key=lambda p: (p.end, p.begin))


def _phases(device: str, lines: Sequence[str], started: float) -> Iterator[Phase]:
    for line in lines:
        match = _LINE.match(line)
        if match is not None:
            at = datetime.strptime(match["time"], "%Y-%m-%d %H:%M:%S,%f").timestamp()
            end = at - started
            yield Phase(device, match["what"], end - float(match["seconds"]), end)
