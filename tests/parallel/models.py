"""Small models of the usual kinds, written for one device, with the plans that parallelize them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

VOCABULARY = 14


class Mlp(nn.Module):
    def __init__(self, width: int = 6, hidden: int = 10) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)
        self.drop = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.drop(F.gelu(self.up(x))))


class FusedAttention(nn.Module):
    """Causal attention with one projection for queries, keys and values."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        b, s, w = x.shape
        q, k, v = self.qkv(x).view(b, s, 3, self.heads, w // self.heads).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(b, s, w))


class GptBlock(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn, self.mlp = FusedAttention(width, heads), Mlp(width, 3 * width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Gpt(nn.Module):
    """Learned positions made in the forward pass, tied embedding and head."""

    def __init__(self, width: int = 12, heads: int = 3, layers: int = 2) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCABULARY, width), nn.Embedding(16, width)
        self.blocks = nn.ModuleList(GptBlock(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.wte.weight
        self.drop = nn.Dropout(0.1)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.drop(self.wte(ids) + self.wpe(torch.arange(ids.shape[1])))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat([a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()], -1)


class LlamaAttention(nn.Module):
    def __init__(self, width: int, heads: int, kv_heads: int, head_dim: int) -> None:
        super().__init__()
        self.head_dim, self.groups = head_dim, heads // kv_heads
        self.wq = nn.Linear(width, heads * head_dim, bias=False)
        self.wk, self.wv = (nn.Linear(width, kv_heads * head_dim, bias=False) for _ in range(2))
        self.wo = nn.Linear(heads * head_dim, width, bias=False)
        self.q_norm = nn.RMSNorm(head_dim)

    def forward(self, x: Tensor) -> Tensor:
        b, s, _ = x.shape
        q, k, v = (w(x).view(b, s, -1, self.head_dim).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        frequencies = 100.0 ** (-torch.arange(self.head_dim // 2) / (self.head_dim // 2))
        angles = torch.arange(s)[:, None] * frequencies
        q, k = rotate(self.q_norm(q), angles), rotate(k, angles)
        k, v = (t.repeat_interleave(self.groups, 1) for t in (k, v))
        mask = torch.ones(s, s, dtype=torch.bool).tril()
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.wo(y.transpose(1, 2).reshape(b, s, -1))


class LlamaBlock(nn.Module):
    def __init__(self, width: int, heads: int, kv_heads: int, head_dim: int, hidden: int) -> None:
        super().__init__()
        self.attn = LlamaAttention(width, heads, kv_heads, head_dim)
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.gate, self.up = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Llama(nn.Module):
    def __init__(self, heads: int = 4, kv_heads: int = 2, head_dim: int = 4, layers: int = 2) -> None:
        super().__init__()
        width = heads * head_dim
        self.embed = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleList(
            LlamaBlock(width, heads, kv_heads, head_dim, 2 * width + 1) for _ in range(layers)
        )
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


class Encoder(nn.Module):
    """torch's own encoder layer, with dropout."""

    def __init__(self, width: int = 8, heads: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.layer = nn.TransformerEncoderLayer(width, heads, 18, dropout=0.1, batch_first=True)
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.layer(self.embed(ids)))


class ConvNet(nn.Module):
    def __init__(self, channels: int = 6) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(3, channels, 3, padding=1), nn.Conv2d(channels, 5, 3, stride=2)
        self.norm1, self.norm2 = nn.BatchNorm2d(channels), nn.BatchNorm2d(5)
        self.head = nn.Linear(5, VOCABULARY)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm1(self.conv1(x)))
        x = F.relu(self.norm2(self.conv2(x)))
        return self.head(x.mean((2, 3)))


class Lstm(nn.Module):
    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.embed, self.lstm = nn.Embedding(VOCABULARY, width), nn.LSTM(width, width, batch_first=True)
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.lstm(self.embed(ids))[0])


class Experts(nn.Module):
    """Experts as 3-D parameters; each token is computed by those that the router chose."""

    def __init__(self, experts: int, width: int, hidden: int) -> None:
        super().__init__()
        self.gate_up = nn.Parameter(torch.empty(experts, 2 * hidden, width))
        self.down = nn.Parameter(torch.empty(experts, width, hidden))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for p in self.parameters():
            nn.init.normal_(p, std=0.3)

    def forward(self, x: Tensor, weights: Tensor) -> Tensor:
        gate, up = torch.einsum("th,efh->tef", x, self.gate_up).chunk(2, -1)
        return torch.einsum("tef,ehf,te->th", F.silu(gate) * up, self.down, weights)


class Moe(nn.Module):
    def __init__(self, experts: int = 4, width: int = 6, hidden: int = 5) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.router, self.experts = nn.Linear(width, experts, bias=False), Experts(experts, width, hidden)
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        flat = x.flatten(0, 1)
        scores = self.router(flat).softmax(-1)
        top, chosen = scores.topk(2, -1)
        weights = torch.zeros_like(scores).scatter(1, chosen, top / top.sum(-1, keepdim=True))
        return self.head(x + self.experts(flat, weights).view_as(x))


def _ids(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, VOCABULARY, (4, 8), generator=generator)
    return ids, torch.randint(0, VOCABULARY, (4, 8), generator=generator)


def _features(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(4, 8, 6, generator=generator, dtype=torch.float64)
    return x, torch.randint(0, 6, (4, 8), generator=generator)


def _images(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(4, 3, 8, 8, generator=generator, dtype=torch.float64)
    return x, torch.randint(0, VOCABULARY, (4,), generator=generator)


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, -2), labels.flatten())


@dataclass(frozen=True)
class Case:
    """A model, its plans by name, and its batches by seed."""

    build: Callable[[], nn.Module]
    plans: dict[str, dict[str, str]]
    batch: Callable[[int], tuple[Tensor, Tensor]] = _ids
    arguments: dict[str, Any] = field(default_factory=dict)


_GPT = {
    "wte": "embedding_rowwise",
    "blocks.*.attn.qkv.weight": "[3 h:tp, i]",
    "blocks.*.attn.qkv.bias": "[3 h:tp]",
    "blocks.*.attn.out": "rowwise",
    "blocks.*.mlp.up": "colwise",
    "blocks.*.mlp.down": "rowwise",
    "head": "colwise_gather_output",
}
_LLAMA = {
    "embed": "embedding_rowwise",
    "layers.*.attn.w[qkv]": "colwise",
    "layers.*.attn.wo": "rowwise",
    "layers.*.gate": "colwise",
    "layers.*.up": "colwise",
    "layers.*.down": "rowwise",
    "head": "colwise_gather_output",
}
_NORMS = {"layers.*.norm[12]": "sequence_parallel", "norm": "sequence_parallel"}

CASES = {
    "mlp": Case(Mlp, {"tp": {"up": "colwise", "down": "rowwise"}}, _features),
    "gpt": Case(
        Gpt,
        {"tp": _GPT, "sp": {**_GPT, "blocks.*.norm[12]": "sequence_parallel", "norm": "sequence_parallel"}},
    ),
    "llama": Case(Llama, {"tp": _LLAMA, "sp": {**_LLAMA, **_NORMS}}),
    "uneven llama": Case(
        lambda: Llama(heads=6, kv_heads=3, layers=1), {"tp": _LLAMA, "sp": {**_LLAMA, **_NORMS}}
    ),
    "encoder": Case(
        Encoder,
        {
            "tp": {
                "layer.self_attn.in_proj_weight": "[3 h:tp, i]",
                "layer.self_attn.in_proj_bias": "[3 h:tp]",
                "layer.self_attn.out_proj.weight": "[o, i:tp]",
                "layer.linear1": "colwise",
                "layer.linear2": "rowwise",
            }
        },
    ),
    "convnet": Case(
        ConvNet,
        {"tp": {"conv1": "colwise", "norm1": "colwise", "conv2": "rowwise", "head": "colwise_gather_output"}},
        _images,
    ),
    "lstm": Case(
        Lstm,
        {
            "tp": {"head": "colwise", "embed": "embedding_colwise"},
            "gates": {
                "lstm.weight_[ih]h_l0": "[4 h:tp, i]",
                "lstm.bias_[ih]h_l0": "[4 h:tp]",
                "head": "rowwise_rep",
            },
        },
    ),
    "moe": Case(
        Moe,
        {
            "tp": {
                "experts.gate_up": "packed_colwise",
                "experts.down": "rowwise",
                "experts": "moe_tp_experts",
            },
            "ep": {
                "router": "ep_router",
                "experts.gate_up": "grouped_gemm",
                "experts.down": "grouped_gemm",
                "experts": "moe_tp_experts",
            },
        },
    ),
}
