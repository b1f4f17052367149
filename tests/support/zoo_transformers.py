"""Real architectures from the transformers library, with small configurations and random weights.

Name -> (kind of data, builder). The library is imported when a model is built: it takes a second.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

_LABELS: dict[str, Any] = {"num_labels": 5}
_TEXT: dict[str, Any] = {"vocab_size": 40, "num_hidden_layers": 2, "hidden_size": 32}


def mobilenet_v2() -> nn.Module:
    from transformers import MobileNetV2Config, MobileNetV2ForImageClassification

    config = MobileNetV2Config(
        image_size=32, depth_multiplier=0.25, **_LABELS, classifier_dropout_prob=0.0
    )
    return MobileNetV2ForImageClassification(config)


def resnet() -> nn.Module:
    from transformers import ResNetConfig, ResNetForImageClassification

    config = ResNetConfig(
        embedding_size=8,
        hidden_sizes=[16, 24],
        depths=[1, 2],
        **_LABELS,
        layer_type="bottleneck",
    )
    return ResNetForImageClassification(config)


def vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        image_size=32,
        patch_size=8,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=48,
        hidden_dropout_prob=0.0,
        **_LABELS,
    )
    return ViTForImageClassification(config)


def convnext() -> nn.Module:
    from transformers import ConvNextConfig, ConvNextForImageClassification

    config = ConvNextConfig(
        num_stages=2, hidden_sizes=[12, 16], depths=[1, 2], patch_size=4, **_LABELS
    )
    return ConvNextForImageClassification(config)


def regnet() -> nn.Module:
    from transformers import RegNetConfig, RegNetForImageClassification

    config = RegNetConfig(
        embedding_size=8, hidden_sizes=[16, 24], depths=[1, 2], groups_width=8, **_LABELS
    )
    return RegNetForImageClassification(config)


def bert() -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        **_TEXT,
        num_attention_heads=2,
        intermediate_size=48,
        max_position_embeddings=16,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        **_LABELS,
    )
    return BertForSequenceClassification(config)


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=40,
        n_positions=16,
        n_embd=32,
        n_layer=2,
        n_head=2,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
    )
    return GPT2LMHeadModel(config)


def opt() -> nn.Module:
    from transformers import OPTConfig, OPTForCausalLM

    config = OPTConfig(
        **_TEXT,
        ffn_dim=48,
        num_attention_heads=2,
        max_position_embeddings=16,
        word_embed_proj_dim=32,
        dropout=0.0,
        pad_token_id=1,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
    )
    return OPTForCausalLM(config)


def llama(**changes: Any) -> nn.Module:
    """`changes` take the place of these values of its configuration."""
    from transformers import LlamaConfig, LlamaForCausalLM

    values: dict[str, Any] = {
        **_TEXT,
        "intermediate_size": 48,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 16,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "use_cache": False,
    }
    return LlamaForCausalLM(LlamaConfig(**values | changes))


def mixtral() -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        **_TEXT,
        intermediate_size=48,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_local_experts=4,
        max_position_embeddings=16,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
    )
    return MixtralForCausalLM(config)


def swin() -> nn.Module:
    from transformers import SwinConfig, SwinForImageClassification

    config = SwinConfig(
        image_size=32,
        patch_size=2,
        embed_dim=8,
        depths=[1, 2],
        num_heads=[1, 2],
        window_size=4,
        drop_path_rate=0.0,
        **_LABELS,
    )
    return SwinForImageClassification(config)


TRANSFORMERS: dict[str, tuple[str, Callable[[], nn.Module]]] = {
    "mobilenet_v2": ("image", mobilenet_v2),
    "resnet": ("image", resnet),
    "vit": ("image", vit),
    "convnext": ("image", convnext),
    "regnet": ("image", regnet),
    "bert": ("label", bert),
    "gpt2": ("tokens", gpt2),
    "opt": ("tokens", opt),
    "llama": ("tokens", llama),
    "mixtral": ("tokens", mixtral),
    "swin": ("image", swin),
}
