"""Models as users write them: a GPT, a ConvNet, recurrent networks, a GAN, adapters, experts, a graph network."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional


class Attention(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        b, t, d = x.shape
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        q, k, v = (y.view(b, t, self.heads, d // self.heads).transpose(1, 2) for y in (q, k, v))
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(b, t, d))


class Block(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attention = Attention(dim, heads)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """A decoder whose embedding and head share their weight."""

    def __init__(
        self, vocabulary: int = 11, length: int = 6, dim: int = 8, heads: int = 2, layers: int = 1
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, dim)
        self.positions = nn.Parameter(torch.zeros(length, dim))
        self.blocks = nn.Sequential(*(Block(dim, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocabulary, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions[: tokens.shape[1]]
        return self.head(self.norm(self.blocks(x)))


class ConvNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.norm = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.conv2 = nn.Conv2d(4, 6, 3, stride=2)
        self.head = nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.max_pool2d(functional.relu(self.norm(self.conv1(x))), 2)
        x = functional.relu(self.conv2(x))
        return self.head(functional.adaptive_avg_pool2d(x, 1).flatten(1))


class Tagger(nn.Module):
    """An LSTM that tags each token."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(9, 4)
        self.lstm = nn.LSTM(4, 5, batch_first=True)
        self.head = nn.Linear(5, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden, _ = self.lstm(self.embedding(tokens))
        return self.head(hidden)


class LoRA(nn.Module):
    """A frozen linear layer with a low-rank adapter."""

    def __init__(self, base: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


class Experts(nn.Module):
    """A mixture of experts: each token goes to its two best experts."""

    def __init__(self, dim: int = 6, hidden: int = 5, experts: int = 4) -> None:
        super().__init__()
        self.router = nn.Linear(dim, experts, bias=False)
        self.w1 = nn.Parameter(torch.zeros(experts, dim, hidden))
        self.w2 = nn.Parameter(torch.zeros(experts, hidden, dim))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        probabilities = self.router(x).softmax(-1)
        values, indices = probabilities.topk(2, dim=-1)
        gates = torch.zeros_like(probabilities).scatter(-1, indices, values)
        gates = gates / gates.sum(-1, keepdim=True)
        hidden = torch.einsum("td,edh->teh", x, self.w1).relu()
        out = torch.einsum("teh,ehd,te->td", hidden, self.w2, gates)
        load = probabilities.mean(0)
        return out, (load * load).sum() * probabilities.shape[-1]


class GraphLayer(nn.Module):
    """Sums the messages of a node's neighbours."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.message, self.update = nn.Linear(2 * dim, dim), nn.Linear(2 * dim, dim)

    def forward(self, x: Tensor, source: Tensor, target: Tensor) -> Tensor:
        messages = self.message(torch.cat([x[source], x[target]], dim=-1)).relu()
        received = torch.zeros_like(x).index_add(0, target, messages)
        degree = torch.zeros_like(x).scatter_add(
            0, target[:, None].expand_as(messages), torch.ones_like(messages)
        )
        return self.update(torch.cat([x, received / degree.clamp(min=1)], dim=-1))


def perceptron(*sizes: int) -> nn.Sequential:
    """Linear layers with tanh between them."""
    layers: list[Any] = []
    for a, b in pairwise(sizes):
        layers += [nn.Linear(a, b), nn.Tanh()]
    return nn.Sequential(*layers[:-1])
