"""Calls whose kernels check values: a bad value is in the block of one rank, and only that rank raises."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.utils.checkpoint
from torch.nn import functional

import shardwise as sw
from shardwise import Replicate, Shard

ROWS = 9
"""On 4 ranks they split into 3, 3, 3 and 0, so that the last block is empty; on 3 evenly."""
BAD_ROW = 4
"""Of the second rank."""
BAD_RANK = 1


class ValueError_(NamedTuple):  # noqa: N801 - ValueError is Python's
    """A call, and a part of the message of its kernel."""

    call: Callable[[], Any]
    message: str


def mesh() -> sw.DeviceMesh:
    return sw.init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))


def split(t: torch.Tensor, dim: int = 0) -> Any:
    return sw.distribute_tensor(t, mesh(), [Shard(dim)])


def whole(t: torch.Tensor) -> Any:
    return sw.distribute_tensor(t, mesh(), [Replicate()])


def indices(bad: int = 99, *size: int) -> Any:
    index = torch.zeros(size or (ROWS,), dtype=torch.int64)
    index[BAD_ROW] = bad
    return split(index)


def numbers(bad: float, good: float = 0.5, *size: int) -> Any:
    values = torch.full(size or (ROWS,), good)
    values[BAD_ROW] = bad
    return split(values)


def table() -> Any:
    return split(torch.arange(45.0).view(ROWS, 5))


def matrices(bad: torch.Tensor) -> Any:
    each = torch.eye(2).repeat(ROWS, 1, 1)
    each[BAD_ROW] = bad
    return split(each)


def write(t: Any, index: Any, value: float) -> Any:
    rows = split(torch.arange(ROWS))
    t[rows, index] = value
    return t


def _embedding_bag() -> Any:
    weight = whole(torch.ones(10, 4))
    return functional.embedding_bag(indices(99, ROWS, 1), weight)


def _masked_scatter() -> Any:
    """Every block has a value for each row of its mask; only the second has more rows than values."""
    mask = torch.zeros(ROWS, 5, dtype=torch.bool)
    mask[BAD_ROW] = True
    return table().masked_scatter(split(mask), split(torch.zeros(0)))


NAN = torch.tensor([[float("nan"), 0.0], [0.0, 1.0]])
VALUE_ERRORS: dict[str, ValueError_] = {
    "embedding": ValueError_(lambda: functional.embedding(indices(), whole(torch.ones(10, 4))), "index out of range"),
    "embedding_bag": ValueError_(_embedding_bag, "Index"),
    "take": ValueError_(lambda: whole(torch.ones(10)).take(indices()), "out of range"),
    "gather": ValueError_(lambda: table().gather(1, indices(99, ROWS, 1)), "out of bounds"),
    "scatter": ValueError_(lambda: table().scatter(1, indices(99, ROWS, 1), 1.0), "out of bounds"),
    "scatter_add_": ValueError_(
        lambda: table().scatter_add_(1, indices(99, ROWS, 5), split(torch.ones(ROWS, 5))), "out of bounds"
    ),
    "scatter_reduce": ValueError_(
        lambda: table().scatter_reduce(1, indices(99, ROWS, 5), split(torch.ones(ROWS, 5)), "sum"), "out of bounds"
    ),
    "x[rows, index]": ValueError_(lambda: table()[split(torch.arange(ROWS)), indices()], "out of"),
    "x[:, index]": ValueError_(lambda: whole(torch.ones(4, 10))[:, indices()], "out of"),
    "x[rows, index] = 0": ValueError_(lambda: write(table(), indices(), 0.0), "out of"),
    "index_select": ValueError_(lambda: whole(torch.ones(10, 2)).index_select(0, indices()), "out of"),
    "cross_entropy": ValueError_(lambda: functional.cross_entropy(table(), indices()), "Target 99 is out of bounds"),
    "nll_loss": ValueError_(lambda: functional.nll_loss(table(), indices(), reduction="sum"), "Target 99 is out of bounds"),
    "cross_entropy of pixels": ValueError_(
        lambda: functional.cross_entropy(split(torch.ones(ROWS, 5, 2)), indices(99, ROWS, 2)), "out of bounds"
    ),
    "multi_margin_loss": ValueError_(lambda: functional.multi_margin_loss(table(), indices(99)), "out of range"),
    "binary_cross_entropy": ValueError_(
        lambda: functional.binary_cross_entropy(numbers(7.0), split(torch.ones(ROWS))), "between 0 and 1"
    ),
    "one_hot": ValueError_(lambda: functional.one_hot(indices(99), 5), "smaller than num_classes"),
    "one_hot of a negative": ValueError_(lambda: functional.one_hot(indices(-3), 5), "non-negative"),
    "multinomial": ValueError_(lambda: torch.multinomial(numbers(-1.0, 0.5, ROWS, 3), 1), "probability"),
    "bernoulli": ValueError_(lambda: torch.bernoulli(numbers(7.0)), "p"),
    "poisson": ValueError_(lambda: torch.poisson(numbers(-3.0)), ""),
    "cholesky": ValueError_(lambda: torch.linalg.cholesky(matrices(-torch.eye(2))), "not positive-definite"),
    "inverse": ValueError_(lambda: torch.linalg.inv(matrices(torch.zeros(2, 2))), "singular"),
    "solve": ValueError_(
        lambda: torch.linalg.solve(matrices(torch.zeros(2, 2)), split(torch.ones(ROWS, 2, 1))), "singular"
    ),
    "svdvals": ValueError_(lambda: torch.linalg.svdvals(matrices(NAN)), "linalg"),
    "eigvals": ValueError_(lambda: torch.linalg.eigvals(matrices(NAN)).real, "linalg"),
    "integer division": ValueError_(lambda: split(torch.full((ROWS,), 8)) // (1 - indices(1)), "ZeroDivision"),
    "integer remainder": ValueError_(lambda: split(torch.full((ROWS,), 8)) % (1 - indices(1)), "ZeroDivision"),
    "repeat_interleave": ValueError_(
        lambda: torch.repeat_interleave(split(torch.ones(ROWS)), indices(-1)), "negative"
    ),
    "bincount": ValueError_(lambda: torch.bincount(indices(-1)), "non-negative"),
    "bucketed histogram": ValueError_(lambda: torch.histc(numbers(float("nan"))), "finite"),
    "put_": ValueError_(lambda: whole(torch.ones(10)).put_(indices(), split(torch.ones(ROWS))), "out of range"),
    "masked_scatter": ValueError_(lambda: _masked_scatter(), "number of ones"),
    "index_add": ValueError_(lambda: whole(torch.ones(10, 2)).index_add(0, indices(), split(torch.ones(ROWS, 2))), "out of"),
    "index_copy": ValueError_(lambda: whole(torch.ones(10, 2)).index_copy(0, indices(), split(torch.ones(ROWS, 2))), "out of"),
    "index_fill": ValueError_(lambda: whole(torch.ones(10, 2)).index_fill(0, indices(), 2.0), "out of"),
    "index_reduce": ValueError_(
        lambda: whole(torch.ones(10, 2)).index_reduce(0, indices(), split(torch.ones(ROWS, 2)), "prod"), "out of"
    ),
    "index_put, accumulated": ValueError_(
        lambda: whole(torch.ones(10)).index_put((indices(),), split(torch.ones(ROWS)), accumulate=True), "out of"
    ),
    "x[index]": ValueError_(lambda: whole(torch.ones(10, 4))[indices()], "out of"),
    "x[index] of negative": ValueError_(lambda: whole(torch.ones(10, 4))[indices(-11)], "out of"),
    "x[i, j]": ValueError_(lambda: whole(torch.ones(10, 12))[indices(0), indices(77)], "out of"),
    "embedding with max_norm": ValueError_(
        lambda: functional.embedding(indices(), whole(torch.ones(10, 4)), max_norm=1.0), "out of range"
    ),
    "multilabel_margin_loss": ValueError_(
        lambda: functional.multilabel_margin_loss(table(), indices(99, ROWS, 5)), "out of range"
    ),
    "cross_entropy with weights": ValueError_(
        lambda: functional.cross_entropy(table(), indices(), weight=whole(torch.ones(5))), "Target 99 is out of bounds"
    ),
    "nll_loss of pixels": ValueError_(
        lambda: functional.nll_loss(split(torch.ones(ROWS, 5, 2)), indices(99, ROWS, 2)), "out of bounds"
    ),
    "svd": ValueError_(lambda: torch.linalg.svd(matrices(NAN))[1], "linalg"),
    "solve_triangular of lu": ValueError_(lambda: torch.linalg.lu_factor(matrices(torch.zeros(2, 2)))[0], "linalg"),
    "matrix_power": ValueError_(lambda: torch.linalg.matrix_power(matrices(torch.zeros(2, 2)), -1), "singular"),
    "integer fmod": ValueError_(lambda: torch.fmod(split(torch.full((ROWS,), 8)), 1 - indices(1)), "ZeroDivision"),
    "integer division, truncated": ValueError_(
        lambda: torch.div(split(torch.full((ROWS,), 8)), 1 - indices(1), rounding_mode="trunc"), "ZeroDivision"
    ),
    "integer division in place": ValueError_(
        lambda: split(torch.full((ROWS,), 8)).floor_divide_(1 - indices(1)), "ZeroDivision"
    ),
    "normal": ValueError_(lambda: torch.normal(0.0, numbers(-1.0)), "std"),
    "binomial": ValueError_(lambda: torch.binomial(numbers(-1.0, 3.0), numbers(0.5)), "count"),
    "max_unpool1d": ValueError_(
        lambda: functional.max_unpool1d(split(torch.ones(ROWS, 1, 2)), indices(99, ROWS, 1, 2), 2), "invalid max index"
    ),
    "max_unpool2d": ValueError_(
        lambda: functional.max_unpool2d(split(torch.ones(ROWS, 1, 2, 2)), indices(99, ROWS, 1, 2, 2), 2), "invalid max"
    ),
    "searchsorted": ValueError_(
        lambda: torch.searchsorted(table(), split(torch.ones(ROWS, 1)), sorter=indices(99, ROWS, 5)), "sorter"
    ),
    "_assert_async": ValueError_(lambda: _assert_async(numbers(0.0)), "Expected"),
}  # fmt: skip


def _assert_async(x: Any) -> Any:
    torch._assert_async((x > 0.2).all())
    return x


def _backward_of_a_checked_op(forward: Callable[[Any], Any], *size: int) -> Any:
    x = split(torch.ones(size or (ROWS, 5))).requires_grad_()
    forward(x).sum().backward()
    return x.grad


class _Checks(torch.autograd.Function):
    """An op whose backward pass looks up an index that only one block has."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return grad * functional.embedding(indices(), whole(torch.ones(10, 5)))


def _hooked(x: Any) -> Any:
    y = x * 2
    y.register_hook(lambda grad: grad * functional.embedding(indices(), whole(torch.ones(10, 5))))
    return y


IN_BACKWARD: dict[str, ValueError_] = {
    "an autograd function": ValueError_(
        lambda: _backward_of_a_checked_op(_Checks.apply), "index out of range"
    ),
    "a hook": ValueError_(lambda: _backward_of_a_checked_op(_hooked), "index out of range"),
    "a checkpointed function": ValueError_(
        lambda: _backward_of_a_checked_op(
            lambda x: torch.utils.checkpoint.checkpoint(_second_time(), x, use_reentrant=False)
        ),
        "index out of range",
    ),
}


def _second_time() -> Callable[[Any], Any]:
    calls: list[None] = []

    def f(x: Any) -> Any:
        calls.append(None)
        index = indices() if len(calls) > 1 else whole(torch.zeros(ROWS, dtype=torch.int64))
        return (
            x * 2 * functional.embedding(index.redistribute(placements=[Shard(0)]), whole(torch.ones(10, 5)))
        )

    return f
