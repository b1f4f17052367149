"""Asteroid's devices and environments as clusters, and its models as profiles on those devices.

Speeds. Asteroid's table 1 gives the seconds of an epoch on Jetson TX2 and Nano for three models
(CIFAR-10: 50,000 images; Mini-ImageNet: 64 training classes of 600). The NX stands in no such
table; table 8's profiling times say that it takes 25/51 of a TX2's time. For Bert-small no time is
published at all: each device is given the rate (flops/s) that it reaches on ResNet-50.

Models. Random weights and synthetic data, sizes as in Asteroid's section 5.1: 3x32x32 images for
MobileNetV2 and EfficientNet-B1, 3x224x224 for ResNet-50, 32 tokens for Bert-small. Built for
ImageNet, MobileNetV2 and EfficientNet shrink a 32x32 image to a single point; as usual for CIFAR
the first strides are 1 here, which the paper does not say, but its times do: with the original
strides a TX2 would reach 4 Gflop/s of the 55 it reaches otherwise.

Profiles. The units and their bytes are what p2ptrain itself cuts and counts. How a model's time
falls on its units and grows with the batch is measured on this machine (`measured`), or follows the
units' flops (`by_flops`: the same everywhere); either way all is scaled by one factor a device so
that a sample of the best batch size takes what the paper's device needs.

Memory: what the boards have, less one GiB for system and CUDA.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import p2ptrain
from p2ptrain.plan.types.cluster import Cluster, ClusterDevice, ClusterLink
from p2ptrain.plan.types.profile import Profile
from p2ptrain.plan.types.unit_times import TimeTable, UnitTimes
from tools.bench import models

MBIT = 1e6 / 8
GIB = 2**30
LATENCY_S = 0.5e-3
MEASURED_SIZES = {"resnet50": (1, 4, 16)}
DEFAULT_SIZES = (1, 4, 16, 64)
MEMORY_BYTES = {"nano": 3 * GIB, "tx2": 7 * GIB, "nx": 7 * GIB}
EPOCH_SECONDS = {  # TX2, Nano; images of an epoch
    "efficientnet-b1": (11.2 * 60, 26.7 * 60, 50_000),
    "mobilenetv2": (8.5 * 60, 22 * 60, 50_000),
    "resnet50": (1.14 * 3600, 3.48 * 3600, 38_400),
}
NX_OVER_TX2 = 25 / 51
BATCH_SIZE = {"efficientnet-b1": 2048, "mobilenetv2": 2048, "resnet50": 256, "bert-small": 2048}
ENVIRONMENTS = {
    "A": ("nano",) * 5,
    "B": ("nx",) * 3 + ("tx2",) * 2,
    "C": ("nx",) + ("tx2",) * 2 + ("nano",) * 3,
    "D": ("tx2",) + ("nano",) * 3,
}


SAMPLES = 256
SHAPES = {
    **{"efficientnet-b1": (3, 32, 32), "mobilenetv2": (3, 32, 32)},
    **{"resnet50": (3, 224, 224), "bert-small": (32,)},
}
"""Of one input."""


class Logits(nn.Module):
    """A transformers classifier whose output is the tensor of logits alone."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.model(x).logits
        return logits


def job(name: str) -> p2ptrain.Job:
    """The model named, with synthetic samples of the paper's shape."""
    built: Any = models.load(name.replace("-", "_")).build()
    if name == "efficientnet-b1":
        embeddings = built.efficientnet.embeddings
        embeddings.convolution.stride, embeddings.padding = (1, 1), nn.ZeroPad2d(1)
    if name == "mobilenetv2":  # pads by what the stride then needs
        strided = [m for m in built.modules() if getattr(m, "stride", 0) == (2, 2)]
        for convolution in strided[:2]:
            convolution.stride = (1, 1)
    shape = (SAMPLES, *SHAPES[name])
    inputs = torch.randint(models.WORDS, shape) if len(shape) == 2 else torch.randn(shape)
    return p2ptrain.Job(
        model=Logits(built),
        data=TensorDataset(inputs, torch.randint(models.CLASSES, (SAMPLES,))),
        loss=nn.functional.cross_entropy,
        optimizer=p2ptrain.SGD(lr=0.01, momentum=0.9),
        batch_size=SAMPLES,
        epochs=1,
    )


@dataclass(frozen=True, slots=True)
class Model:
    """A model on the papers' devices.

    Attributes:
        profile: times of the TX2.
        slowdown: by kind of device, over the TX2.
    """

    profile: Profile
    slowdown: dict[str, float]
    batch_size: int


def model(name: str, profile: Profile, flops_of_resnet50: float) -> Model:
    """`profile`, in any unit of time, on the papers' devices."""
    if name in EPOCH_SECONDS:
        tx2, nano, images = EPOCH_SECONDS[name]
        sample_seconds = tx2 / images
    else:
        tx2, nano, images = EPOCH_SECONDS["resnet50"]
        flops = sum(unit.flops for unit in profile.units)
        sample_seconds = tx2 / images * flops / flops_of_resnet50
    slowdown = {"tx2": 1.0, "nano": nano / tx2, "nx": NX_OVER_TX2}
    return Model(scaled(profile, sample_seconds), slowdown, BATCH_SIZE[name])


def scaled(profile: Profile, sample_seconds: float) -> Profile:
    """The same shape of times, a sample of the best batch size taking `sample_seconds`."""
    table = profile.times
    now = min(
        (sum(times.forward) + sum(times.backward)) / size
        for size, times in zip(table.sizes, table.times, strict=True)
    )
    return replace(profile, times=profile.times.times_slowdown(sample_seconds / now))


def fed_locally(profile: Profile) -> Profile:
    """Every device has its own data, as in the papers: the holder sends nothing."""
    return replace(profile, input_bytes=0, target_bytes=0)


def cluster(model: Model, kinds: Sequence[str], mbit_per_s: float) -> Cluster:
    """Devices of these kinds in one network; the holder is the first, a fastest one."""
    devices = tuple(
        ClusterDevice(f"{kind}{i:02}", MEMORY_BYTES[kind], model.slowdown[kind], holder=i == 0)
        for i, kind in enumerate(kinds)
    )
    return Cluster(devices, ClusterLink(mbit_per_s * MBIT, LATENCY_S))


def measured(name: str, folder: Path) -> Profile:
    """FOLDER/NAME.json, measured on this machine now if it is not there (one thread)."""
    from p2ptrain.cli.commands.profile import measured_profile

    path = folder / f"{name}.json"
    if path.exists():
        return Profile.from_json(json.loads(path.read_text(encoding="utf-8")), str(path))
    sizes = MEASURED_SIZES.get(name, DEFAULT_SIZES)
    profile = measured_profile(job(name), sizes, threads=1)
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(profile.to_json(), indent=1) + "\n", encoding="utf-8")
    return profile


def by_flops(name: str) -> Profile:
    """Units as p2ptrain cuts them; a unit's time is its flops, its backward's twice that."""
    from p2ptrain.cli.commands.profile import measured_profile

    torch.set_num_threads(1)
    profile = measured_profile(job(name), (1,), threads=1)
    forward = tuple(float(unit.flops) for unit in profile.units)
    times = UnitTimes(forward, tuple(2 * flops for flops in forward))
    smallest = UnitTimes(*(tuple(t / 64 for t in part) for part in (times.forward, times.backward)))
    return replace(profile, times=TimeTable((1, 64), (smallest, times)))


def all_models(folder: Path | None) -> dict[str, Model]:
    """Every model of the tables, measured (kept in `folder`) or by flops."""
    profiles = {name: measured(name, folder) if folder else by_flops(name) for name in SHAPES}
    flops = sum(unit.flops for unit in profiles["resnet50"].units)
    return {name: model(name, profile, flops) for name, profile in profiles.items()}
