"""The jobs that `tools/tile_speed.py` times: a network's convolutions and a small head.

YOLOv2's first 16 layers, or VGG-16's, where nothing normalises.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

import p2ptrain
from tools.darknet import cfg
from tools.darknet.network import Darknet

SAMPLES = 32
CLASSES = 10
BODY = Path(cfg.__file__).parent / "yolov2_first16.cfg"
VGG_LEVELS = ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3))
"""(channels, convolutions) between poolings (Simonyan and Zisserman 2014, network D)."""


class Classifier(nn.Module):
    """Convolutions, then what cannot be tiled: a mean over the map, and a linear layer."""

    def __init__(self, network: str) -> None:
        super().__init__()
        self.body = _vgg() if network == "vgg16" else Darknet(cfg.read_cfg(BODY))
        self.head = nn.Linear(512 if network == "vgg16" else 256, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Image to classes."""
        output: Tensor = self.head(self.body(x).mean((2, 3)))
        return output


def _vgg() -> nn.Sequential:
    layers: list[nn.Module] = []
    before = 3
    for channels, count in VGG_LEVELS:
        for _ in range(count):
            layers += [nn.Conv2d(before, channels, 3, padding=1), nn.ReLU(inplace=True)]
            before = channels
        layers.append(nn.MaxPool2d(2, 2))
    return nn.Sequential(*layers)


def job(size: int = 416, batch_size: int = 1, network: str = "yolov2") -> p2ptrain.Job:
    """Only the time counts; `size`: of the images; `network`: yolov2 or vgg16."""
    torch.manual_seed(0)
    return p2ptrain.Job(
        model=Classifier(network),
        data=torch.utils.data.TensorDataset(
            torch.randn(SAMPLES, 3, size, size), torch.randint(CLASSES, (SAMPLES,))
        ),
        loss=nn.functional.cross_entropy,
        optimizer=p2ptrain.SGD(lr=0.001),
        batch_size=batch_size,
        micro_batch=batch_size,
        epochs=1000,
    )
