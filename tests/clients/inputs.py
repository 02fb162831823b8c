"""The inputs of a model by its configuration: token ids, or what vision models and parts of larger models take."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from tests.clients.training import Batch, micro_batches
from torch import Tensor
from transformers import PreTrainedModel

__all__ = ["batches_for"]


def _values(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _positions(side: int) -> Tensor:
    """The coordinates of the patches of a square image."""
    return torch.cartesian_prod(torch.arange(side), torch.arange(side)).flip(-1)


_SPECIAL: dict[str, Callable[[int], dict[str, Any]]] = {
    "Ernie4_5_VLMoeVisionConfig": lambda seed: {
        "hidden_states": _values(32, 48, seed=seed),
        "grid_thw": torch.tensor([[1, 4, 4], [1, 4, 4]]),
    },
    "Gemma4VisionConfig": lambda seed: {
        "pixel_values": _values(2, 9, 48, seed=seed).sigmoid(),
        "pixel_position_ids": _positions(3).expand(2, 9, 2),
    },
    "Llama4VisionConfig": lambda seed: {"pixel_values": _values(2, 3, 16, 16, seed=seed)},
    "MuseGlimmerVisionConfig": lambda seed: {
        "pixel_values": _values(32, 96, seed=seed),
        "grid_thw": torch.tensor([[1, 4, 4], [1, 4, 4]]),
    },
    "MuseGlimmerAssistantConfig": lambda seed: {
        "noise_embeds": _values(2, 4, 32, seed=seed),
        "context_hidden_states": _values(2, 6, 64, seed=seed + 10),
    },
    "VoxtralRealtimeTextConfig": lambda seed: {"t_cond": _values(1, 32, seed=7)},
}
"""By configuration, of one micro-batch; those without `hidden_states` or the like take token ids, too."""
_WITHOUT_TOKENS = ("hidden_states", "pixel_values", "noise_embeds")


def batches_for(model: PreTrainedModel) -> list[Batch]:
    """Two micro-batches, with labels if the model takes them."""
    special = _SPECIAL.get(type(model.config).__name__, lambda seed: {})
    out = []
    for i in range(2):
        given = special(i)
        if given.keys().isdisjoint(_WITHOUT_TOKENS):
            takes_labels = "labels" in inspect.signature(model.forward).parameters
            kept = ("input_ids", "labels") if takes_labels else ("input_ids",)
            tokens = micro_batches(model.config.vocab_size)[i]
            given = {**{k: tokens[k] for k in kept}, **given}
        out.append(given)
    return out
