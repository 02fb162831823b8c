"""Tiny configurations of transformers: every class that carries a tensor parallel plan, at sizes of a few dozen."""

from __future__ import annotations

import copy
import dataclasses
import importlib
import inspect
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto

__all__ = ["build", "configurations_with_plans", "model_class", "shrink"]

# Sizes by the name that configurations give them. What a class does not have is left out.
_SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24,
    "shared_intermediate_size": 24,
    "prefix_dense_intermediate_size": 48,
    "dense_intermediate_size": 48,
    "expert_ffn_hidden_size": 24,
    "ffn_hidden_size": 48,
    "num_hidden_layers": 2,
    "num_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "global_head_dim": 8,
    "v_head_dim": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "q_lora_rank": 12,
    "kv_lora_rank": 12,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "num_experts_per_token": 2,
    "moe_k": 2,
    "moe_topk": 2,
    "top_k": 2,
    "top_k_experts": 2,
    "n_group": 1,
    "topk_group": 1,
    "num_expert_group": 1,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 64,
    "sliding_window": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_d_state": 8,
    "mamba_num_heads": 4,
    "mamba_head_dim": 8,
    "ssm_state_size": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
}
_LAYERS = 2
_MAX_SIZE = 300_000  # parameters

_ALSO_IF_NONE = {
    *("head_dim", "num_key_value_heads", "n_routed_experts", "n_shared_experts", "num_experts_per_tok"),
    *("pad_token_id", "bos_token_id", "eos_token_id", "sliding_window"),
}


def _mrope(*sections: int, **more: Any) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": list(sections), **more}


# What the sizes above do not fit.
_CHANGES: dict[str, dict[str, Any]] = {
    "CohereCompassTextConfig": {
        "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 10000.0}}
    },
    "Cosmos3EdgeTextConfig": {"rope_parameters": _mrope(2, 1, 1)},
    "DeepseekV4Config": {
        "layer_types": ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"],
        "mlp_layer_types": ["hash_moe", "moe", "moe"],
        "compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 4},
        "num_hidden_layers": 3,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "partial_rotary_factor": 0.5,
        "o_groups": 2,
        "o_lora_rank": 8,
        "hc_mult": 2,
        "hc_sinkhorn_iters": 2,
        "index_n_heads": 2,
        "index_head_dim": 16,
        "index_topk": 2,
    },
    "DeepseekOcr2TextConfig": {"mlp_layer_types": ["dense", "sparse"]},
    "DiffusionGemmaTextConfig": {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 24},
    "EmbeddingGemma2TextConfig": {"hidden_size_per_layer_input": 8, "embedding_dim": 24},
    "Ernie4_5_VLMoeTextConfig": {"moe_intermediate_size": [24, 24], "rope_parameters": _mrope(1, 1, 2)},
    "Ernie4_5_VLMoeVisionConfig": {"depth": 2, "num_heads": 4, "patch_size": 4},
    "EsmcConfig": {"num_key_value_heads": 4},
    "Gemma3nTextConfig": {
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 2,
        "vocab_size_per_layer_input": 64,
        "hidden_size_per_layer_input": 8,
        "laurel_rank": 4,
        "altup_num_inputs": 2,
    },
    "Gemma4TextConfig": {"vocab_size_per_layer_input": 64, "hidden_size_per_layer_input": 8},
    "Gemma4VisionConfig": {"position_embedding_size": 16, "patch_size": 4},
    "Glm4vTextConfig": {"rope_parameters": _mrope(2, 1, 1)},
    "Glm4vMoeTextConfig": {"rope_parameters": _mrope(2, 1, 1, partial_rotary_factor=1.0)},
    "Glm5NextTextConfig": {
        "linear_head_dim": 8,
        "linear_num_heads": 4,
        "hc_mult": 2,
        "index_topk": 2,
        "index_kpool": 2,
    },
    "GlmImageTextConfig": {"rope_parameters": _mrope(2, 1, 1)},
    "GlmOcrTextConfig": {"rope_parameters": _mrope(2, 1, 1)},
    "GraniteMoeHybridConfig": {"layer_types": ["mamba", "attention"], "mamba_d_head": 16},
    "HiggsAudioV2Config": {
        "codebook_size": 30,
        "num_codebooks": 2,
        "audio_stream_bos_id": 30,
        "audio_stream_eos_id": 31,
        "audio_token_id": 5,
        "audio_bos_token_id": 6,
        "audio_delay_token_id": 7,
    },
    "HunYuanMoEV1Config": {"num_experts": 4, "moe_topk": 2},
    "InklingTextConfig": {
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 2,
        "swa_head_dim": 8,
        "sliding_window_size": 4,
        "d_rel": 4,
        "rel_extent": 8,
    },
    "JambaConfig": {
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "use_mamba_kernels": False,
        "mamba_d_state": 4,
    },
    "KimiLinearConfig": {"linear_head_dim": 8, "linear_num_heads": 4},
    "Lfm2MoeConfig": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "Llama4VisionConfig": {
        "image_size": 16,
        "patch_size": 4,
        "intermediate_size": 128,
        "vision_output_dim": 32,
        "projector_input_dim": 32,
        "projector_output_dim": 32,
    },
    "LongcatFlashConfig": {"num_layers": 1, "zero_expert_num": 2},
    "MistralLarge4TextConfig": {"index_head_dim": 8, "index_n_heads": 2, "index_topk": 2},
    "MuseGlimmerAssistantConfig": {"target_layer_ids": [0, 1], "block_size": 4, "mask_token_id": 3},
    "MuseGlimmerVisionConfig": {"patch_size": 4, "pos_emb_height": 4, "pos_emb_width": 4},
    "MuseSparkTextConfig": {"moe_hidden_size": 16},
    "NemotronHConfig": {
        "layers_block_type": ["mamba", "attention", "moe"],
        "n_groups": 2,
        "moe_shared_expert_intermediate_size": 24,
        "use_mamba_kernels": False,
    },
    "NeoMMEConfig": {"head_dim": 16},
    "PaddleOCRTextConfig": {"rope_parameters": _mrope(2, 1, 1)},
    "Qwen2VLTextConfig": {"rope_parameters": _mrope(2, 1, 1)},
    "Qwen2_5OmniTextConfig": {"rope_parameters": _mrope(2, 1, 1)},
    "Qwen2_5_VLTextConfig": {"rope_parameters": _mrope(2, 1, 1)},
    "Phi4MultimodalConfig": {
        "vision_config": {
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "image_size": 16,
            "patch_size": 4,
            "crop_size": 16,
        },
        "audio_config": {
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_blocks": 2,
            "num_attention_heads": 4,
            "ext_pw_out_channel": 32,
            "depthwise_separable_out_channel": 32,
            "nemo_conv_channels": 32,
            "input_size": 16,
        },
    },
    "Qwen4ExpTextConfig": {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 4,
        "indexer_compress_ratio": 2,
        "hc_count": 2,
        "hc_lowrank": 4,
    },
    "Step3p7TextConfig": {"share_expert_dim": 24, "sliding_window": 4},
}
_SMALL_VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 16,
    "patch_size": 4,
}


def _compose(kind: type[PreTrainedConfig]) -> PreTrainedConfig | None:
    """The configuration of a whole model around a part that is no model itself, or of parts that are shrunk; else None."""
    module = importlib.import_module(kind.__module__)
    match kind.__name__:
        case "T5GemmaModuleConfig":
            part = shrink_alone(kind)
            return module.T5GemmaConfig(encoder=part, decoder=part, vocab_size=64)  # type: ignore[no-any-return]
        case "T5Gemma2TextConfig" | "T5Gemma2DecoderConfig":
            text, decoder = (
                shrink_alone(c) for c in (module.T5Gemma2TextConfig, module.T5Gemma2DecoderConfig)
            )
            encoder = module.T5Gemma2EncoderConfig(text_config=text, vision_config=_SMALL_VISION)
            return module.T5Gemma2Config(encoder=encoder, decoder=decoder)  # type: ignore[no-any-return]
        case "Llama4Config":
            parts = (module.Llama4TextConfig, module.Llama4VisionConfig)
            text, vision = (shrink_alone(c) for c in parts)
            whole = module.Llama4Config(text_config=text, vision_config=vision, image_token_index=5)
            whole.pad_token_id, whole.vocab_size = 0, 64
            return whole  # type: ignore[no-any-return]
    return None


# for the first the mapping names a model that is not exported, for the second the text part
_NOT_IN_AUTO = {"VoxtralRealtimeTextConfig", "Llama4Config"}
_HEADS = ("CausalLM", "ConditionalGeneration", "MaskedLM")
_AUTO = (
    modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
    modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING,
    modeling_auto.MODEL_FOR_MASKED_LM_MAPPING,
    modeling_auto.MODEL_MAPPING,
)


def configurations_with_plans() -> dict[str, type[PreTrainedConfig]]:
    """Every configuration class of transformers that states a `base_model_tp_plan`, by `family.Class`."""
    root = Path(transformers.__file__).parent / "models"
    found = {}
    for path in sorted(root.glob("*/configuration_*.py")):
        if "base_model_tp_plan" not in path.read_text():
            continue
        module = importlib.import_module(f"transformers.models.{path.parent.name}.{path.stem}")
        for name, kind in vars(module).items():
            if (
                inspect.isclass(kind)
                and issubclass(kind, PreTrainedConfig)
                and kind.__module__ == module.__name__
                and vars(kind).get("base_model_tp_plan")
            ):
                found[f"{path.parent.name}.{name}"] = kind
    return found


def model_class(config: type[PreTrainedConfig]) -> type[PreTrainedModel]:
    """The model of a configuration: with a language model head if there is one."""
    for mapping in _AUTO:
        if config in mapping and config.__name__ not in _NOT_IN_AUTO:
            kind = mapping[config]
            return kind[0] if isinstance(kind, tuple) else kind
    module = importlib.import_module(config.__module__.replace("configuration_", "modeling_"))
    models = [
        kind
        for name, kind in vars(module).items()
        if inspect.isclass(kind)
        and issubclass(kind, PreTrainedModel)
        and kind.config_class is config
        and not name.endswith("PreTrainedModel")
    ]
    if not models:
        raise LookupError(f"{module.__name__} has no model of {config.__name__}")
    return min(models, key=lambda m: not any(h in m.__name__ for h in _HEADS))


def shrink(kind: type[PreTrainedConfig], **changes: Any) -> PreTrainedConfig:
    """A configuration of this class, or of the model that it is a part of, with small sizes."""
    return _compose(kind) or shrink_alone(kind, **changes)


def shrink_alone(kind: type[PreTrainedConfig], **changes: Any) -> PreTrainedConfig:
    """A configuration of this class with small sizes and layers of each kind, at least two."""
    defaults = {f.name: f.default for f in dataclasses.fields(kind)}
    sizes = {n: s for n, s in _SIZES.items() if n in defaults and _takes_number(defaults[n], n)}
    heads = defaults.get("num_attention_heads")
    if defaults.get("num_key_value_heads") == heads or "kv_lora_rank" in defaults:
        sizes["num_key_value_heads"] = sizes.get("num_attention_heads")
    usual = kind()
    types = getattr(usual, "layer_types", None)
    if "layer_types" in defaults and isinstance(types, list):
        some = list(dict.fromkeys(types))
        sizes["layer_types"] = (some * _LAYERS)[: max(_LAYERS, len(some))]
        sizes["num_hidden_layers"] = len(sizes["layer_types"])
    layers = sizes.get("num_hidden_layers", _LAYERS)
    feed_forward = getattr(usual, "mlp_layer_types", None)
    if "mlp_layer_types" in defaults and isinstance(feed_forward, list):
        some = list(dict.fromkeys(feed_forward))
        sizes["mlp_layer_types"] = (some + [some[-1]] * layers)[:layers]
    sizes = {n: s for n, s in sizes.items() if n in defaults}
    return kind(**{**sizes, **_CHANGES.get(kind.__name__, {}), **changes})


def _takes_number(default: Any, name: str) -> bool:
    if default is None:
        return name in _ALSO_IF_NONE
    return (
        isinstance(default, int | float) and not isinstance(default, bool) and default != 0
    ) or name == "pad_token_id"


def build(
    config: PreTrainedConfig,
    kind: type[PreTrainedModel] | None = None,
    *,
    seed: int = 0,
    attention: str | None = None,
    experts: str | None = "eager",
    dtype: torch.dtype = torch.float64,
) -> PreTrainedModel:
    """A model of a configuration; all parameters are random, those that start as zeros or ones, too.

    Args:
        config: the configuration, of which the model gets a copy.
        kind: the class of the model, if it is not the usual one.
        seed: of the parameters.
        attention: the implementation of attention; transformers' default (`sdpa`) if None.
        experts: the implementation of experts; the default (`grouped_mm`) if None, which has no float64.
        dtype: of the parameters.
    """
    config, kind = copy.deepcopy(config), kind or model_class(type(config))
    config._attn_implementation, config._experts_implementation = attention, experts
    with torch.device("meta"):
        size = sum(p.numel() for p in kind(config).parameters())
    if size > _MAX_SIZE:
        raise ValueError(f"{type(config).__name__} is not shrunk: {size} parameters")
    torch.manual_seed(seed)
    model = kind(config).to(dtype)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.15 * torch.randn(p.shape, generator=generator, dtype=torch.float64))
    return model
