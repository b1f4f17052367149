"""`python -m tests.system.sensed FILE COMMAND...`: p2ptrain where a test turns the sensors.

FILE has what they say, as the fields of a `DeviceReading`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from p2ptrain.api import node
from p2ptrain.manners.readings import DeviceReading, ReadDevice


def turn(file: Path, **sensors: object) -> None:
    """From now on they say so; the others, that nothing is known."""
    new = file.with_suffix(".new")
    new.write_text(json.dumps(sensors))
    new.replace(file)


def main() -> int:
    file = Path(sys.argv.pop(1))

    def reader(*_settings: object) -> ReadDevice:
        return lambda: DeviceReading(**json.loads(file.read_text()))

    node.DeviceReader = reader  # type: ignore[assignment, misc]
    from p2ptrain.__main__ import main as command

    return command()


if __name__ == "__main__":
    sys.exit(main())
