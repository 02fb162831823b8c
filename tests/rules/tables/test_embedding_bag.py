"""Bags of embeddings from a table whose width is split: the dense value and gradient, and nothing sent."""

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - as everybody calls it
from tests.dense import agrees, drawn

TABLE = drawn(10, 7)
INDICES = torch.tensor([1, 2, 4, 5, 4, 3, 2, 9])
OFFSETS = torch.tensor([0, 4, 4])  # a bag in the middle is empty


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("lie", ["0", "1", "P"])
def test_bags(mode, lie):
    def bag(w, i, o):
        return F.embedding_bag(i, w, o, mode=mode)

    ledger = agrees(bag, [TABLE, INDICES, OFFSETS], [lie, "R", "R"])
    assert lie == "0" or (lie, mode) == ("P", "max") or ledger.bytes == 0
    agrees(bag, [TABLE, INDICES, OFFSETS], [lie, "0", "0"])
    agrees(
        lambda w, i, o: F.embedding_bag(i, w, o, mode=mode, padding_idx=4),
        [TABLE, INDICES, OFFSETS],
        [lie, "R", "R"],
    )


@pytest.mark.parametrize("lies", ["1 R", "1 0", "P 0", "0 P"])
def test_weights_of_each_sample(lies):
    table, weights = lies.split()
    agrees(
        lambda w, i, o, p: F.embedding_bag(i, w, o, mode="sum", per_sample_weights=p),
        [TABLE, INDICES, OFFSETS, drawn(8, seed=1)],
        [table, "R", "R", weights],
    )


def test_frequencies_and_two_dims_of_indices():
    agrees(lambda w, i, o: F.embedding_bag(i, w, o, scale_grad_by_freq=True, mode="sum"),
           [TABLE, INDICES, OFFSETS], ["1", "R", "R"])  # fmt: skip
    agrees(lambda w, i: F.embedding_bag(i, w, mode="max"), [TABLE, INDICES.view(4, 2)], ["1", "0"])
