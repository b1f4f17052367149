"""Starts one task; see the package."""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Callable, Mapping
from typing import Any

from tools.bench.errors import CannotRunError
from tools.bench.worker.channel import Channel


def _task(name: str) -> Callable[[Mapping[str, Any], Channel], None]:
    if name == "alone":
        from tools.bench.worker import alone

        return alone.run
    if name == "torch":
        from tools.bench.worker import plain

        return plain.run
    if name in ("ddp", "ddp-default"):
        from tools.bench.worker import ddp

        return ddp.run
    if name == "torch-pp":
        from tools.bench.worker import pipelining

        return pipelining.run
    if name == "blocks":
        from tools.bench.worker import blocks

        return blocks.run
    if name == "units":
        from tools.bench.worker import units

        return units.run
    raise SystemExit(f"there is no task {name!r}")


def main() -> None:
    """Run the task that the command line names; an error is the last thing said."""
    warnings.simplefilter("ignore")
    channel = Channel()
    import torch

    torch.set_num_threads(1)
    try:
        _task(sys.argv[1])(json.loads(sys.argv[2]), channel)
    except Exception as error:
        refused = isinstance(error, CannotRunError)
        message = str(error) if refused else f"{type(error).__name__}: {error}"
        channel.say("error", message=message, cannot_run=refused)
        raise


if __name__ == "__main__":
    main()
