"""The models that are trained, as one script that `p2ptrain train` takes as it is.

    p2ptrain train tools/bench/models.py -o model=vit -o batch_size=128 --wait-for 3

Rivals train what `load` gives, so that all systems train the same random weights on the same random
samples of ten classes. Dropout is off, because no two systems draw it alike.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import p2ptrain

SCRIPT = str(Path(__file__).resolve())
CLASSES = 10
_LABELS: dict[str, Any] = {"num_labels": CLASSES}
WORDS, _TOKENS = 30_522, 64
_GROWTH, _LAYERS = 32, 12


@dataclass(frozen=True, slots=True)
class Training:
    """A model to be trained.

    Attributes:
        make: the model with random weights.
        side: of its square images; 0: sequences of 64 tokens.
        loss: (model's output, targets) -> mean over the samples.
    """

    make: Callable[[], nn.Module]
    side: int
    loss: Callable[[Any, Tensor], Tensor]

    def build(self) -> nn.Module:
        """The same weights every time."""
        torch.manual_seed(0)
        return self.make().train()

    def data(self, samples: int) -> TensorDataset:
        """So many inputs and targets, the same every time."""
        torch.manual_seed(1)
        if self.side:
            inputs = torch.randn(samples, 3, self.side, self.side)
        else:
            inputs = torch.randint(WORDS, (samples, _TOKENS))
        return TensorDataset(inputs, torch.randint(CLASSES, (samples,)))


def _of_logits(output: Any, target: Tensor) -> Tensor:
    """Of a transformers output."""
    return nn.functional.cross_entropy(output.logits, target)


def _mobilenetv2() -> nn.Module:
    """2.2 M parameters, images of 32x32."""
    from transformers import MobileNetV2Config, MobileNetV2ForImageClassification

    config = MobileNetV2Config(image_size=32, classifier_dropout_prob=0.0, **_LABELS)
    return MobileNetV2ForImageClassification(config)  # type: ignore[no-any-return]


def _efficientnet_b1() -> nn.Module:
    """6.5 M parameters, images of 32x32."""
    from transformers import EfficientNetConfig, EfficientNetForImageClassification

    sizes = {"image_size": 32, "width_coefficient": 1.0, "depth_coefficient": 1.1}
    without_dropout = {"dropout_rate": 0.0, "drop_connect_rate": 0.0}
    config = EfficientNetConfig(hidden_dim=1280, **sizes, **without_dropout, **_LABELS)
    return EfficientNetForImageClassification(config)  # type: ignore[no-any-return]


def _resnet50() -> nn.Module:
    """23.5 M parameters, images of 64x64."""
    from transformers import ResNetConfig, ResNetForImageClassification

    return ResNetForImageClassification(ResNetConfig(depths=[3, 4, 6, 3], **_LABELS))  # type: ignore[no-any-return]


_WITHOUT_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def _vit() -> nn.Module:
    """12 layers, 192 wide (5.4 M parameters), images of 64x64 in patches of 8x8."""
    from transformers import ViTConfig, ViTForImageClassification

    images = {"image_size": 64, "patch_size": 8}
    layers = {"hidden_size": 192, "num_hidden_layers": 12, "num_attention_heads": 3}
    config = ViTConfig(intermediate_size=768, **images, **layers, **_WITHOUT_DROPOUT, **_LABELS)
    return ViTForImageClassification(config)  # type: ignore[no-any-return]


def _bert_small() -> nn.Module:
    """4 layers, 512 wide (28.8 M parameters)."""
    from transformers import BertConfig, BertForSequenceClassification

    layers = {"hidden_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8}
    config = BertConfig(intermediate_size=2048, **layers, **_WITHOUT_DROPOUT, **_LABELS)
    return BertForSequenceClassification(config)  # type: ignore[no-any-return]


def _adapted(model: nn.Module, layers: list[str], task: str = "SEQ_CLS") -> nn.Module:
    """Frozen but for adapters of rank 8 beside these layers, and what classifies."""
    import peft

    config = peft.LoraConfig(r=8, target_modules=layers, task_type=task, lora_dropout=0.0)
    return peft.get_peft_model(model, config)


def _bert_lora() -> nn.Module:
    return _adapted(_bert_small(), ["query", "value"])


def _llama_lora() -> nn.Module:
    """8 layers, 512 wide (42 M parameters)."""
    from transformers import LlamaConfig, LlamaForSequenceClassification

    heads = {"num_attention_heads": 8, "num_key_value_heads": 4}
    layers = {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 8, **heads}
    config = LlamaConfig(vocab_size=WORDS, pad_token_id=0, use_cache=False, **layers, **_LABELS)
    return _adapted(LlamaForSequenceClassification(config), ["q_proj", "v_proj"])


def _gpt2_lora() -> nn.Module:
    """8 layers, 512 wide (41 M parameters)."""
    from transformers import GPT2Config, GPT2ForSequenceClassification

    layers = {"n_embd": 512, "n_layer": 8, "n_head": 8, "n_positions": _TOKENS}
    config = GPT2Config(vocab_size=WORDS, pad_token_id=0, use_cache=False, **layers, **_LABELS)
    config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
    return _adapted(GPT2ForSequenceClassification(config), ["c_attn"])


class _T5Lora(nn.Module):
    """Encoder and decoder of 4 layers each, 512 wide (38 M parameters), adapted; classes are words.

    Both read the sample.
    """

    def __init__(self) -> None:
        from transformers import T5Config, T5ForConditionalGeneration

        super().__init__()
        layers = {"d_model": 512, "d_ff": 1024, "num_layers": 4, "num_heads": 8, "d_kv": 64}
        config = T5Config(vocab_size=WORDS, dropout_rate=0.0, use_cache=False, **layers)
        self.adapted = _adapted(T5ForConditionalGeneration(config), ["q", "v"], "SEQ_2_SEQ_LM")

    def forward(self, words: Tensor) -> Tensor:
        given = self.adapted(input_ids=words, decoder_input_ids=words)
        classes: Tensor = given.logits[:, -1, :CLASSES]
        return classes


class _DenseLayer(nn.Module):
    """All maps so far in, _GROWTH new ones out."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.narrow = nn.Sequential(
            nn.BatchNorm2d(channels), nn.ReLU(), nn.Conv2d(channels, 4 * _GROWTH, 1, bias=False)
        )
        self.new = nn.Sequential(
            nn.BatchNorm2d(4 * _GROWTH),
            nn.ReLU(),
            nn.Conv2d(4 * _GROWTH, _GROWTH, 3, padding=1, bias=False),
        )

    def forward(self, maps: list[Tensor]) -> Tensor:
        made: Tensor = self.new(self.narrow(torch.cat(maps, 1)))
        return made


class _DenseNet(nn.Module):
    """One dense block of 12 layers (0.8 M parameters), images of 64x64, for `tools/memory.py`.

    Huang et al. 2017, "Densely Connected Convolutional Networks": its maps are large up to the end
    and no two are of one size, which is where the C library's heap has most holes.
    """

    def __init__(self) -> None:
        super().__init__()
        first, last = 2 * _GROWTH, (2 + _LAYERS) * _GROWTH
        self.stem = nn.Sequential(
            nn.Conv2d(3, first, 7, 2, 3, bias=False),
            nn.BatchNorm2d(first),
            nn.ReLU(),
            nn.MaxPool2d(3, 2, 1),
        )
        self.layers = nn.ModuleList(_DenseLayer(first + k * _GROWTH) for k in range(_LAYERS))
        self.norm = nn.BatchNorm2d(last)
        self.classify = nn.Linear(last, CLASSES)

    def forward(self, image: Tensor) -> Tensor:
        maps = [self.stem(image)]
        for layer in self.layers:
            maps.append(layer(maps))
        read = torch.relu(self.norm(torch.cat(maps, 1)))
        classes: Tensor = self.classify(read.mean((2, 3)))
        return classes


_TRAININGS = {
    "mobilenetv2": Training(_mobilenetv2, 32, _of_logits),
    "efficientnet_b1": Training(_efficientnet_b1, 32, _of_logits),
    "resnet50": Training(_resnet50, 64, _of_logits),
    "vit": Training(_vit, 64, _of_logits),
    "bert_small": Training(_bert_small, 0, _of_logits),
    "bert_lora": Training(_bert_lora, 0, _of_logits),
    "llama_lora": Training(_llama_lora, 0, _of_logits),
    "gpt2_lora": Training(_gpt2_lora, 0, _of_logits),
    "t5_lora": Training(_T5Lora, 0, nn.functional.cross_entropy),
    "densenet": Training(_DenseNet, 64, nn.functional.cross_entropy),
}


def load(name: str) -> Training:
    """What the model `name` is trained with."""
    return _TRAININGS[name]


def job(
    model: str = "mobilenetv2", batch_size: int = 256, adam: bool = False, evaluates: bool = False
) -> p2ptrain.Job:
    """Two mini-batches again and again: only the time counts, and the loss to compare.

    Args:
        evaluates: as many samples after each epoch.
    """
    training = load(model)
    samples = training.data(2 * batch_size)
    return p2ptrain.Job(
        model=training.build(),
        data=samples,
        loss=training.loss,
        optimizer=p2ptrain.Adam(lr=0.0001) if adam else p2ptrain.SGD(lr=0.01, momentum=0.9),
        batch_size=batch_size,
        epochs=1000,
        eval_data=samples if evaluates else None,
        metrics={"loss": training.loss} if evaluates else {},
    )
