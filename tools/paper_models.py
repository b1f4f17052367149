"""The models of the papers' tables as a training script: random weights, synthetic data.

    p2ptrain profile tools/paper_models.py -o name=mobilenetv2 --threads 1 --out P.json

Sizes as in Asteroid's section 5.1: 3x32x32 images for MobileNetV2 and EfficientNet-B1, 3x224x224
for ResNet-50, and 32 tokens for Bert-small (4 layers of 512, input shape 32x512). Nothing is
downloaded; the definitions come from the transformers library, without dropout.

Built for ImageNet, MobileNetV2 and EfficientNet shrink a 32x32 image to a single point. As usual
for CIFAR the first strides are 1 here, which the paper does not say, but its times do: with the
original strides a TX2 would reach 4 Gflop/s of the 55 it reaches otherwise.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import p2ptrain

SAMPLES = 256


@dataclass(frozen=True, slots=True)
class PaperModel:
    """How to build a model, and what one sample of it looks like.

    Attributes:
        shape: of one input; of token numbers where `words` is above 0.
        labels: number of classes.
    """

    build: Callable[[int], nn.Module]
    shape: tuple[int, ...]
    labels: int
    words: int = 0


class Logits(nn.Module):
    """A transformers classifier whose output is the tensor of logits alone."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.model(x).logits
        return logits


def _labels(count: int) -> dict[str, Any]:
    return {"num_labels": count}


def _efficientnet_b1(labels: int) -> nn.Module:
    from transformers import EfficientNetConfig, EfficientNetForImageClassification

    config = EfficientNetConfig(
        image_size=32,
        width_coefficient=1.0,
        depth_coefficient=1.1,
        hidden_dim=1280,
        dropout_rate=0.0,
        drop_connect_rate=0.0,
        **_labels(labels),
    )
    model = EfficientNetForImageClassification(config)
    embeddings = model.efficientnet.embeddings
    embeddings.convolution.stride, embeddings.padding = (1, 1), nn.ZeroPad2d(1)
    return Logits(model)


def _mobilenetv2(labels: int) -> nn.Module:
    from transformers import MobileNetV2Config, MobileNetV2ForImageClassification

    config = MobileNetV2Config(image_size=32, classifier_dropout_prob=0.0, **_labels(labels))
    model = MobileNetV2ForImageClassification(config)  # pads by what the stride then needs
    for convolution in [m for m in model.modules() if getattr(m, "stride", 0) == (2, 2)][:2]:
        convolution.stride = (1, 1)
    return Logits(model)


def _resnet50(labels: int) -> nn.Module:
    from transformers import ResNetConfig, ResNetForImageClassification

    return Logits(ResNetForImageClassification(ResNetConfig(**_labels(labels))))


def _bert_small(labels: int) -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        hidden_size=512,
        num_hidden_layers=4,
        num_attention_heads=8,
        intermediate_size=2048,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        **_labels(labels),
    )
    return Logits(BertForSequenceClassification(config))


MODELS = {
    "efficientnet-b1": PaperModel(_efficientnet_b1, (3, 32, 32), 10),
    "mobilenetv2": PaperModel(_mobilenetv2, (3, 32, 32), 10),
    "resnet50": PaperModel(_resnet50, (3, 224, 224), 64),
    "bert-small": PaperModel(_bert_small, (32,), 2, words=30522),
}


def job(name: str = "mobilenetv2") -> p2ptrain.Job:
    """The model named, with synthetic samples of the paper's shape."""
    model = MODELS[name]
    generator = torch.Generator().manual_seed(0)
    if model.words:
        inputs = torch.randint(model.words, (SAMPLES, *model.shape), generator=generator)
    else:
        inputs = torch.randn(SAMPLES, *model.shape, generator=generator)
    targets = torch.randint(model.labels, (SAMPLES,), generator=generator)
    return p2ptrain.Job(
        model=model.build(model.labels),
        data=TensorDataset(inputs, targets),
        loss=nn.functional.cross_entropy,
        optimizer=p2ptrain.SGD(lr=0.01, momentum=0.9),
        batch_size=SAMPLES,
        epochs=1,
    )
