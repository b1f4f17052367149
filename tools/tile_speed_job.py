"""The job that `tools/tile_speed.py` times: YOLOv2's first 16 layers and a small head."""

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


class Classifier(nn.Module):
    """The paper's 16 layers, then what cannot be tiled: a mean over the map, and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Darknet(cfg.read_cfg(BODY))
        self.head = nn.Linear(256, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Image to classes."""
        output: Tensor = self.head(self.body(x).mean((2, 3)))
        return output


def job(size: int = 416, batch_size: int = 1) -> p2ptrain.Job:
    """Only the time counts; `size`: of the images."""
    torch.manual_seed(0)
    return p2ptrain.Job(
        model=Classifier(),
        data=torch.utils.data.TensorDataset(
            torch.randn(SAMPLES, 3, size, size), torch.randint(CLASSES, (SAMPLES,))
        ),
        loss=nn.functional.cross_entropy,
        optimizer=p2ptrain.SGD(lr=0.001),
        batch_size=batch_size,
        micro_batch=batch_size,
        epochs=1000,
    )
