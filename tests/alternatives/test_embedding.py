"""Renormalized rows of a split embedding table, and distances: equal to the dense ones, without a gather."""

import math

import pytest
import torch
from tests.alternatives.forcing import force_alternatives
from tests.dense import compare, randn
from torch.nn import functional

INDICES = torch.tensor([[1, 2, 4, 4], [5, 3, 2, 9]])
LAYOUTS = ["0 R", "1 R", "R R", "0 0", "1 0", "R 1"]


def lookup(norm_type):
    def run(w, i):
        w = w.detach().clone()
        return functional.embedding(i, w, max_norm=1.0, norm_type=norm_type), w

    return run


@pytest.mark.parametrize("layouts", LAYOUTS)
@pytest.mark.parametrize("norm_type", [1.0, 2.0])
@pytest.mark.parametrize("forced", [False, True])
def test_rows_are_scaled_in_place(layouts, norm_type, forced):
    for mesh in ((4,), (2,)):
        arguments = [randn(10, 7) * 3, INDICES], layouts.split(), mesh
        if not forced:
            compare(lookup(norm_type), *arguments, grad=False)
            continue
        with force_alternatives() as taken:
            compare(lookup(norm_type), *arguments, grad=False)
        assert torch.ops.aten.embedding_renorm_.default in taken or layouts in ("R R", "R 1")


def test_a_factored_table(taken):
    def run(w, i):
        w = w.detach().clone().flatten(0, 1)
        return functional.embedding(i, w, max_norm=1.0), w

    compare(run, [randn(2, 5, 7) * 3, INDICES], ["1", "R"], grad=False)
    assert torch.ops.aten.embedding_renorm_.default in taken


def test_a_large_table_is_not_gathered():
    def renorm(w, i):
        return torch.ops.aten.embedding_renorm_(w.clone(), i, 1.0, 2.0)

    for layout in ("0", "1"):
        assert compare(renorm, [randn(200, 5000), INDICES], [layout, "R"], grad=False).bytes < 200 * 5000


@pytest.mark.parametrize("p", [0, 1, 2, 3, math.inf])
def test_distances(p):
    for layouts in (["0", "0"], ["1", "R"], ["P", "0"], ["0", "1"]):
        inputs = [randn(5, 7), randn(5, 7, seed=1)]
        compare(lambda x, y: torch.dist(x, y, p), inputs, layouts, grad=p in (2, 3))
    large = [randn(200, 500), randn(200, 500, seed=1)]
    assert compare(lambda x, y: torch.dist(x, y, p), large, ["0", "0"], grad=False).bytes < 1000
    pair = [randn(5, 7), randn(6, 7, seed=1)]
    compare(lambda x, y: torch.cdist(x, y, max(p, 1)), pair, ["0", "0"], grad=p == 2)
