"""Rows of a split table that are kept short, and distances: the dense answer, and the table is not gathered."""

import math

import pytest
import torch
from tests.dense import agrees, drawn
from torch.nn import functional

INDICES = torch.tensor([[1, 2, 4, 4], [5, 3, 2, 9]])


@pytest.mark.parametrize("lies", ["0 R", "1 R", "R R", "0 0", "1 0", "R 1"])
@pytest.mark.parametrize("kind", [1.0, 2.0])
@pytest.mark.parametrize("is_dear", [False, True])
def test_rows_are_written_where_they_lie(lies, kind, is_dear, monkeypatch):
    if is_dear:  # gathering costs the world
        monkeypatch.setattr(
            "shardwise.alternatives.registry.seconds_of", lambda plans: math.inf if any(plans) else 0.0
        )

    def looked_up(w, i):
        w = w.detach().clone()
        return functional.embedding(i, w, max_norm=1.0, norm_type=kind), w

    agrees(looked_up, [drawn(10, 7) * 3, INDICES], lies.split(), grad=False)
    agrees(looked_up, [drawn(10, 7) * 3, INDICES], lies.split(), (2,), grad=False)


def test_a_large_table_is_not_gathered():
    def renormed(w, i):
        return torch.ops.aten.embedding_renorm_(w.clone(), i, 1.0, 2.0)

    for lie in ("0", "1"):
        assert agrees(renormed, [drawn(200, 5000), INDICES], [lie, "R"], grad=False).bytes < 200 * 5000


@pytest.mark.parametrize("p", [0, 1, 2, 3, math.inf])
def test_distances(p):
    for lies in (["0", "0"], ["1", "R"], ["P", "0"], ["0", "1"]):
        agrees(lambda x, y: torch.dist(x, y, p), [drawn(5, 7), drawn(5, 7, seed=1)], lies, grad=p in (2, 3))
    large = [drawn(200, 500), drawn(200, 500, seed=1)]
    assert agrees(lambda x, y: torch.dist(x, y, p), large, ["0", "0"], grad=False).bytes < 1000
    agrees(
        lambda x, y: torch.cdist(x, y, max(p, 1)), [drawn(5, 7), drawn(6, 7, seed=1)], ["0", "0"], grad=p == 2
    )
