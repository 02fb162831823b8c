"""Embedding bags from a table whose width is split: dense values and gradients, without communication."""

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - the usual name
from tests.dense import compare, randn

TABLE = randn(10, 7)
INDICES = torch.tensor([1, 2, 4, 5, 4, 3, 2, 9])
OFFSETS = torch.tensor([0, 4, 4])  # the middle bag is empty


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("placement", ["0", "1", "P"])
def test_bags(mode, placement):
    def bag(w, i, o):
        return F.embedding_bag(i, w, o, mode=mode)

    ledger = compare(bag, [TABLE, INDICES, OFFSETS], [placement, "R", "R"])
    assert placement == "0" or (placement, mode) == ("P", "max") or ledger.bytes == 0
    compare(bag, [TABLE, INDICES, OFFSETS], [placement, "0", "0"])
    compare(
        lambda w, i, o: F.embedding_bag(i, w, o, mode=mode, padding_idx=4),
        [TABLE, INDICES, OFFSETS],
        [placement, "R", "R"],
    )


@pytest.mark.parametrize(("table", "weights"), ["1R", "10", "P0", "0P"])
def test_per_sample_weights(table, weights):
    compare(
        lambda w, i, o, p: F.embedding_bag(i, w, o, mode="sum", per_sample_weights=p),
        [TABLE, INDICES, OFFSETS, randn(8, seed=1)],
        [table, "R", "R", weights],
    )


def test_scaling_by_frequency_and_indices_of_two_dims():
    compare(lambda w, i, o: F.embedding_bag(i, w, o, scale_grad_by_freq=True, mode="sum"),
           [TABLE, INDICES, OFFSETS], ["1", "R", "R"])  # fmt: skip
    compare(lambda w, i: F.embedding_bag(i, w, mode="max"), [TABLE, INDICES.view(4, 2)], ["1", "0"])
