"""A byte-level language model in plain PyTorch, and text to train it on. Nothing here knows of meshes or layouts."""

from __future__ import annotations

import ast
import random
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 (the usual name)

__all__ = ["LanguageModel", "batch_of", "documentation", "generate"]


class Block(nn.Module):
    """A transformer block: attention and an MLP, each after a norm, with dropout."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.out = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm1(x)
        q, k, v = (self._split_heads(project(h)) for project in (self.q, self.k, self.v))
        h = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.dropout(self.out(h.transpose(1, 2).flatten(2)))
        return x + self.dropout(self.down(F.gelu(self.up(self.norm2(x)))))

    def _split_heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)


class LanguageModel(nn.Module):
    """Predicts each byte of a text from those before it."""

    def __init__(
        self, width: int = 128, layers: int = 3, heads: int = 4, length: int = 96, dropout: float = 0.1
    ) -> None:
        super().__init__()
        self.length = length
        self.embed, self.position = nn.Embedding(256, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256)

    def forward(self, text: Tensor) -> Tensor:
        x = self.embed(text) + self.position(torch.arange(text.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def documentation(limit: int = 1_000_000) -> Tensor:
    """The documentation strings of Python's standard library, as bytes."""
    found, size = [], 0
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        tree = ast.parse(path.read_bytes(), path.name)
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                text = (ast.get_docstring(node) or "").encode("ascii", "ignore")
                if len(text) > 40:
                    found.append(text)
                    size += len(text) + 2
        if size > limit:
            break
    data = b"\n\n".join(found)[:limit]
    if len(data) < 10_000:
        sys.exit("Python's standard library has no documentation strings here.")
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).long()


def batch_of(text: Tensor, step: int, size: int, length: int) -> tuple[Tensor, Tensor]:
    """The inputs and targets of a step: the same on every rank, whatever the layout."""
    draw = random.Random(step)
    starts = torch.tensor([draw.randrange(len(text) - length - 1) for _ in range(size)])
    windows = text[starts[:, None] + torch.arange(length + 1)]
    return windows[:, :-1], windows[:, 1:]


@torch.no_grad()
def generate(
    model: LanguageModel,
    prompt: str,
    count: int,
    predict: Callable[[Tensor], Tensor] | None = None,
    temperature: float = 0.6,
) -> str:
    """Continue a text byte by byte; `predict` computes the logits, if the model itself does not."""
    text = torch.tensor([list(prompt.encode())])
    draw = random.Random(0)
    for _ in range(count):
        logits = (predict or model)(text[:, -model.length :])[0, -1]
        cumulated = (logits / temperature).softmax(-1).double().cumsum(0)
        chosen = torch.searchsorted(cumulated, draw.random() * cumulated[-1])
        text = torch.cat([text, chosen.view(1, 1)], 1)
    return bytes(text[0].tolist()).decode("ascii", "replace")
