"""Starts one task; see the package."""

from __future__ import annotations

import importlib
import json
import sys
import warnings

import torch

from tools.bench.worker.channel import Channel

TASKS = {
    "alone": ("alone", "run"),
    "torch": ("alone", "run_plain"),
    "ddp": ("ddp", "run"),
    "ddp-default": ("ddp", "run"),
}
"""Task -> its module, loaded when it is asked for, and the function there."""


def main() -> None:
    """Run the task that the command line names; an error is the last thing said."""
    warnings.simplefilter("ignore")
    channel = Channel()
    torch.set_num_threads(1)
    module, function = TASKS[sys.argv[1]]
    try:
        task = getattr(importlib.import_module(f"tools.bench.worker.{module}"), function)
        task(json.loads(sys.argv[2]), channel)
    except Exception as error:
        channel.say("error", message=f"{type(error).__name__}: {error}")
        raise


if __name__ == "__main__":
    main()
