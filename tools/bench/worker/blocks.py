"""The blocks at whose borders torch pipelining may cut a model, and how long each one takes.

A block is a module that a user would cut at: a layer of an encoder, an inverted residual. Its time
is that of its forward and backward, run by itself on what it gets in the whole model.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from tools.bench import models
from tools.bench.worker.channel import Channel
from tools.bench.worker.samples import Samples
from tools.bench.worker.stopwatch import timed

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
SAMPLES = 16
RUNS = 3


def names(model: str, module: nn.Module) -> list[str]:
    """The blocks of a model, in the order in which they run."""
    pattern = re.compile(_PATTERNS[model])
    return [name for name, _ in module.named_modules() if pattern.fullmatch(name)]


def run(task: Mapping[str, Any], channel: Channel) -> None:
    """Time every block; says [[name, seconds], ...]."""
    training = models.load(task["model"])
    module = training.build()
    samples = Samples.make(training, SAMPLES)
    channel.ready()
    calls = _calls(module, names(task["model"], module), samples.inputs[:SAMPLES])
    channel.say("measured", blocks=[[name, _seconds(block, call)] for name, block, call in calls])


_Call = tuple[tuple[Any, ...], dict[str, Any]]


def _calls(
    module: nn.Module, blocks: list[str], inputs: Tensor
) -> list[tuple[str, nn.Module, _Call]]:
    """Every block with the arguments of its call."""
    seen: list[tuple[str, nn.Module, _Call]] = []

    def note(name: str) -> Any:
        return lambda block, args, kwargs: seen.append((name, block, (args, kwargs)))

    hooks = [
        module.get_submodule(name).register_forward_pre_hook(note(name), with_kwargs=True)
        for name in blocks
    ]
    module(inputs)
    for hook in hooks:
        hook.remove()
    return seen


def _seconds(block: nn.Module, call: _Call) -> float:
    args, kwargs = call
    fresh = [_leaf(value) for value in args]

    def once() -> None:
        outputs = [value for value in _tensors(block(*fresh, **kwargs)) if value.requires_grad]
        torch.autograd.backward(outputs, [torch.ones_like(value) for value in outputs])

    once()
    return median(timed(once) for _ in range(RUNS))


def _leaf(value: Any) -> Any:
    if isinstance(value, Tensor) and value.is_floating_point():
        return value.detach().requires_grad_()
    return value


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, Mapping):
        yield from _tensors(list(value.values()))
