"""The blocks at whose borders torch pipelining may cut a model, and how long each one takes.

A block is a module that a user would cut at: a layer of an encoder, an inverted residual. Hooks
note when the whole model's forward comes to a block and when the backward leaves it, so that a
block has everything up to the next one:

    forward   | stem | layer 0 | layer 1 | ... | classifier, loss |
    backward                                                      | classifier, loss | ... | stem |
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import median
from time import thread_time
from typing import Any

import torch
from torch import Tensor, nn

from tools.bench import models
from tools.bench.worker.channel import Channel, Samples

_PATTERNS = {
    "mobilenetv2": (
        r"mobilenet_v2\.conv_stem|mobilenet_v2\.layer\.\d+|mobilenet_v2\.conv_1x1|classifier"
    ),
    "efficientnet_b1": (
        r"efficientnet\.embeddings|efficientnet\.encoder\.blocks\.\d+"
        r"|efficientnet\.encoder\.top_conv|classifier"
    ),
    "resnet50": r"resnet\.embedder|resnet\.encoder\.stages\.\d+\.layers\.\d+|classifier",
    "vit": r"vit\.embeddings|vit\.layers\.\d+|classifier",
    "bert_small": r"bert\.embeddings|bert\.encoder\.layer\.\d+|bert\.pooler|classifier",
}
RUNS = 7


def names(model: str, module: nn.Module) -> list[str]:
    """The blocks of a model, in the order in which they run."""
    pattern = re.compile(_PATTERNS[model])
    return [name for name, _ in module.named_modules() if pattern.fullmatch(name)]


def run(task: Mapping[str, Any], channel: Channel) -> None:
    """Time every block, the median of some runs; says [[name, seconds], ...]."""
    training = models.load(task["model"])
    module = training.build()
    samples = Samples.make(training, task["samples"])
    inputs, targets = (part[: task["samples"]] for part in (samples.inputs, samples.targets))
    blocks = names(task["model"], module)
    channel.ready()
    course = Course(module, blocks)
    runs = []
    for _ in range(RUNS):
        course.begin()
        torch.autograd.backward(training.loss(module(inputs), targets))
        runs.append(course.seconds())
    seconds = [median(times) for times in zip(*runs, strict=True)]
    channel.say("measured", blocks=[list(pair) for pair in zip(blocks, seconds, strict=True)])


class Course:
    """When a run comes to each block and when its backward leaves it; processor time.

    Args:
        blocks: names of modules of `module`, in the order in which they run.
    """

    def __init__(self, module: nn.Module, blocks: Sequence[str]) -> None:
        self._blocks = blocks
        self._entered: dict[str, float] = {}
        self._left: dict[str, float] = {}
        for name in blocks:
            block = module.get_submodule(name)
            block.register_forward_pre_hook(self._at(name), with_kwargs=True)

    def begin(self) -> None:
        """A new run."""
        self._entered.clear()
        self._left.clear()

    def seconds(self) -> list[float]:
        """Of each block, forward and backward, of the run that has just ended."""
        end = thread_time()
        forward = [self._entered[name] for name in self._blocks]
        backward = [self._left.get(name, end) for name in reversed(self._blocks)]
        # Between the last block's forward and its backward lie itself and the loss, both ways.
        first, *between = [forward[-1], *backward]
        both = [between[0] - first]
        both += [later - sooner for sooner, later in pairwise(between)]
        ahead = [later - sooner for sooner, later in pairwise(forward)]
        return [a + b for a, b in zip([*ahead, 0.0], reversed(both), strict=True)]

    def _at(self, name: str) -> Any:
        def note(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._entered[name] = thread_time()
            for value in (*args, *kwargs.values()):
                if isinstance(value, Tensor) and value.requires_grad:
                    value.register_hook(lambda _gradient: self._leave(name))  # type: ignore[no-untyped-call]
                    return

        return note

    def _leave(self, name: str) -> None:
        self._left[name] = thread_time()
