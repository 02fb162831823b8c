"""The families of models that every run of the tests compares: tiny, in float64, with a plan of their own or of ours."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from tests.clients.tiny_configs import build, shrink
from tests.clients.training import Batch, micro_batches
from transformers import PreTrainedConfig, PreTrainedModel

__all__ = ["FAMILIES", "Family"]

_VOCABULARY = 64


@dataclass(frozen=True)
class Family:
    """A family of models.

    Args:
        config: makes the configuration.
        kind: the class of the model, if it is not the usual one of the configuration.
        batches: makes the micro-batches of a step.
        plan: for a model that carries none.
        generates: whether the model is a language model with a cache.
    """

    config: Callable[[], PreTrainedConfig]
    batches: Callable[[], list[Batch]]
    kind: type[PreTrainedModel] | None = None
    plan: Mapping[str, str] | None = None
    generates: bool = True

    def model(self, **how: Any) -> PreTrainedModel:
        """A model with random weights; `how` is passed to `build`."""
        return build(self.config(), self.kind, **how).eval()

    def plan_of(self, model: PreTrainedModel) -> Mapping[str, str]:
        """The plan of the model, or ours."""
        return self.plan if self.plan is not None else model.tp_plan  # type: ignore[return-value]


def _tokens() -> list[Batch]:
    return list(micro_batches(_VOCABULARY))


def _decoder(config: str, **changes: Any) -> Family:
    return Family(lambda: shrink(getattr(transformers, config), **changes), _tokens)


def _other(
    config: str, model: str, batches: Callable[[], list[Batch]], generates: bool, **kwargs: Any
) -> Family:
    plan = kwargs.pop("plan")
    kind = getattr(transformers, model)
    return Family(lambda: getattr(transformers, config)(**kwargs), batches, kind, plan, generates)


def _values(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _images() -> list[Batch]:
    return [
        {"pixel_values": _values(2, 3, 8, 8, seed=i), "labels": torch.tensor([i, 1 - i])} for i in range(2)
    ]


def _speech() -> list[Batch]:
    return [
        {"input_features": _values(2, 8, 16, seed=i), "labels": b["labels"].clamp(min=3)}
        for i, b in enumerate(_tokens())
    ]


def _sequences() -> list[Batch]:
    return [{"input_ids": b["input_ids"], "labels": b["labels"].flip(1)} for b in _tokens()]


_GPT2_PLAN = {
    "transformer.wte": "embedding_rowwise",
    "transformer.h.*.attn.c_attn.weight": "[i, 3 o:tp]",
    "transformer.h.*.attn.c_attn.bias": "[3 o:tp]",
    "transformer.h.*.attn.c_proj": "rowwise",
    "transformer.h.*.mlp.c_fc": "colwise",
    "transformer.h.*.mlp.c_proj": "rowwise",
}
_BERT_PLAN = {
    "bert.encoder.layer.*.attention.self.query": "colwise",
    "bert.encoder.layer.*.attention.self.key": "colwise",
    "bert.encoder.layer.*.attention.self.value": "colwise",
    "bert.encoder.layer.*.attention.output.dense": "rowwise",
    "bert.encoder.layer.*.intermediate.dense": "colwise",
    "bert.encoder.layer.*.output.dense": "rowwise",
}
_T5_PLAN = {
    f"{side}.block.*.layer.{i}.{part}.{name}": style
    for side, i, part, names in (
        ("encoder", 0, "SelfAttention", "qkvo"),
        ("decoder", 0, "SelfAttention", "qkvo"),
        ("decoder", 1, "EncDecAttention", "qkvo"),
        ("encoder", 1, "DenseReluDense", ("wi", "wo")),
        ("decoder", 2, "DenseReluDense", ("wi", "wo")),
    )
    for name in names
    for style in ["rowwise" if name in ("o", "wo") else "colwise"]
}
_VIT_PLAN = {
    **{f"vit.layers.*.attention.{p}_proj": "colwise" for p in "qkv"},
    "vit.layers.*.attention.o_proj": "rowwise",
    "vit.layers.*.mlp.fc1": "colwise",
    "vit.layers.*.mlp.fc2": "rowwise",
}
_WHISPER_PLAN = {
    f"model.{side}.layers.*.{name}": style
    for side, attentions in (("encoder", ["self_attn"]), ("decoder", ["self_attn", "encoder_attn"]))
    for name, style in [
        *(
            (f"{a}.{p}_proj", "rowwise" if p == "out" else "colwise")
            for a in attentions
            for p in ("q", "k", "v", "out")
        ),
        ("fc1", "colwise"),
        ("fc2", "rowwise"),
    ]
}

FAMILIES: dict[str, Family] = {
    "Llama": _decoder("LlamaConfig"),
    "Qwen2": _decoder("Qwen2Config"),
    "Qwen3": _decoder("Qwen3Config"),
    "Mistral": _decoder("MistralConfig"),
    "Gemma 3": _decoder("Gemma3TextConfig"),
    "Phi-3": _decoder("Phi3Config"),
    "GPT-OSS": _decoder("GptOssConfig"),
    "Mixtral": _decoder("MixtralConfig"),
    "Qwen3-MoE": _decoder("Qwen3MoeConfig"),
    "DeepSeek-V3": _decoder("DeepseekV3Config"),
    "GPT-2": _other(
        *("GPT2Config", "GPT2LMHeadModel", _tokens, True),
        plan=_GPT2_PLAN,
        vocab_size=_VOCABULARY,
        n_embd=32,
        n_layer=2,
        n_head=4,
        n_positions=32,
    ),
    "BERT": _other(
        *("BertConfig", "BertForMaskedLM", _tokens, False),
        plan=_BERT_PLAN,
        vocab_size=_VOCABULARY,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=48,
        max_position_embeddings=32,
    ),
    "T5": _other(
        *("T5Config", "T5ForConditionalGeneration", _sequences, True),
        plan=_T5_PLAN,
        vocab_size=_VOCABULARY,
        d_model=32,
        d_kv=8,
        d_ff=48,
        num_layers=2,
        num_heads=4,
        decoder_start_token_id=0,
    ),
    "ViT": _other(
        *("ViTConfig", "ViTForImageClassification", _images, False),
        plan=_VIT_PLAN,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=48,
        image_size=8,
        patch_size=4,
    ),
    "Whisper": _other(
        *("WhisperConfig", "WhisperForConditionalGeneration", _speech, False),
        plan=_WHISPER_PLAN,
        vocab_size=_VOCABULARY,
        d_model=32,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=48,
        decoder_ffn_dim=48,
        num_mel_bins=8,
        max_source_positions=8,
        max_target_positions=16,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=3,
    ),
}
"""By name."""
