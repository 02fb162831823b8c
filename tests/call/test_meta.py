"""Outputs that are remembered are those of equal calls: shapes, strides, dtypes and numbers with their types count."""

import torch

from shardwise.call.meta import infer_outputs, remember_outputs

aten = torch.ops.aten


def described(func, *args):
    return [(tuple(t.shape), t.stride(), t.dtype) for t in infer_outputs(func, args, {}) or ()]


def test_only_equal_calls_are_the_same():
    x = torch.ones(2, 3)
    calls = [
        (aten.clone.default, x),
        (aten.clone.default, x.t()),
        (aten.clone.default, x.double()),
        (aten.add.Tensor, x.long(), 1),
        (aten.add.Tensor, x.long(), 1.0),
        (aten.add.Tensor, x.long(), True),
        (aten.cat.default, [x, x], 0),
        (aten.cat.default, [x, x], 1),
        (aten.cat.default, [x, x.double()], 1),
        (aten.mm.default, x, x),  # refused
    ]
    alone = [described(*call) for call in calls]
    with remember_outputs():
        assert [described(*call) for call in calls * 2] == alone * 2
        sparse = torch.ones(2, 2).to_sparse()  # has no strides
        assert infer_outputs(aten.clone.default, (sparse,), {}) is not None
