"""Norms, losses, attention, embeddings and argmax on real processes: dense values and gradients on each rank."""

from contextlib import nullcontext

import pytest
import torch
from tests.alternatives.forcing import force_alternatives
from tests.dense import parse_placements, randn
from torch.nn import functional as F  # noqa: N812 (the usual name)

import shardwise as sw

pytestmark = pytest.mark.processes

X, W = randn(5, 9), randn(9, seed=1)
IMAGE = randn(5, 6, 3)
HEADS, KEYS = randn(2, 8, 6, 4), randn(2, 4, 6, 4, seed=1)
TARGET = torch.tensor([0, 8, -100, 3, 5])


def _batch_norm(x, w):
    mean, var = x.detach()[0, :, 0] * 0, x.detach()[0, :, 0] * 0 + 1
    return F.batch_norm(x, mean, var, training=True), mean, var


CASES = {
    "cross entropy": (lambda x, t: F.cross_entropy(x, t), (X, TARGET), ("1 R", "0 0", "1 0")),
    "nll sum": (lambda x, t: F.nll_loss(x, t, reduction="sum"), (X, TARGET), ("1 R", "0 0")),
    "mse": (lambda x, w: F.mse_loss(x, x.detach() * 2), (X, W), ("0 R", "1 0")),
    "softmax": (lambda x, w: x.softmax(1), (X, W), ("0 R", "1 0")),
    "argmax": (lambda x, w: (x.argmax(1), *x.max(1), *x.aminmax(dim=1), x.argmin()), (X, W), ("1 R", "0 R")),
    "topk": (lambda x, w: x.topk(1, 0), (X[:4], W), ("1 R", "0 R")),
    "batch norm": (_batch_norm, (IMAGE, W), ("0 R", "1 R", "2 R")),
    "batch norm, evaluation": (lambda x, w: F.batch_norm(x, w.detach()[:6], w.detach()[:6].abs()), (IMAGE, W), ("0 R", "2 R")),
    "group norm": (lambda x, w: F.group_norm(x, 2), (IMAGE, W), ("0 R", "1 R", "2 R")),
    "attention": (lambda q, k: F.scaled_dot_product_attention(q, k, k, enable_gqa=True), (HEADS, KEYS), ("1 1", "0 0", "2 R")),
    "embedding bag": (lambda x, i: F.embedding_bag(i.clamp(0, 4)[None], x, mode="mean"), (X, TARGET), ("1 R", "0 R")),
    "renorm": (lambda x, i: F.embedding(i.clamp(0, 4), x.detach().clone(), max_norm=1.0), (X, TARGET), ("0 R", "1 0")),
}  # fmt: skip


def differences(forced):
    """The cases and layouts with other results than the dense ones; `forced` to take alternatives."""
    torch.set_num_threads(1)
    mesh = sw.init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
    with force_alternatives() if forced else nullcontext():
        return [
            (name, layouts)
            for name, (fn, inputs, every) in CASES.items()
            for layouts in every
            if not _is_dense(fn, inputs, [sw.distribute_tensor(t, mesh, parse_placements(p)) for t, p in zip(inputs, layouts.split(), strict=True)])
        ]  # fmt: skip


def _is_dense(fn, dense, distributed):
    found = []
    for inputs in (dense, distributed):
        x = inputs[0].detach().clone().requires_grad_()
        result = fn(x, *inputs[1:])
        results = list(result) if isinstance(result, tuple) else [result]
        smooth = [r for r in results if r.requires_grad]
        if smooth:
            sum((r * r).sum() for r in smooth).backward()
        found.append([*results, *([x.grad] if smooth else [])])
    return all(torch.allclose(g.full_tensor(), w) for w, g in zip(*found, strict=True))


@pytest.mark.parametrize("forced", [False, True])
def test_every_rank_gets_the_dense_result(workers, forced):
    assert workers.run(differences, forced) == [[]] * 4
