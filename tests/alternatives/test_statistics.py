"""Ops along a split dim by statistics of the rows: dense results, and large rows are not gathered."""

import math

import pytest
import torch
from tests.dense import compare, randn
from torch.nn import functional

import shardwise as sw
from shardwise.alternatives import statistics
from shardwise.comm import counting

CASES = {
    "softmax": lambda x: x.softmax(-1),
    "log_softmax": lambda x: x.log_softmax(-1),
    "logsumexp": lambda x: x.logsumexp(-1),
    "norm 2": lambda x: torch.linalg.vector_norm(x, 2, -1),
    "norm 1": lambda x: torch.linalg.vector_norm(x, 1, -1, keepdim=True),
    "norm 3": lambda x: torch.linalg.vector_norm(x, 3),
    "norm inf": lambda x: torch.linalg.vector_norm(x, float("inf"), -1),
    "norm -inf": lambda x: torch.linalg.vector_norm(x, float("-inf"), -1),
    "norm 0": lambda x: torch.linalg.vector_norm(x, 0, -1),
    "var": lambda x: x.var(-1),
    "std": lambda x: x.std((0, 1), correction=0),
    "var_mean": lambda x: torch.var_mean(x, -1)[1] + torch.var_mean(x, -1, keepdim=True)[0],
    "layer_norm": lambda x: torch.nn.functional.layer_norm(x, (x.shape[-1],)),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("size", [7, 9])  # over 4 ranks the last block is short, or empty
def test_result_and_gradient_equal_the_dense_ones(name, size, taken):
    compare(CASES[name], [randn(3, size)], ["1"], grad=name != "norm 0")
    assert set(taken) & statistics.ALTERNATIVES.keys()


def test_large_rows_are_not_gathered():
    with sw.simulate(4):
        mesh = sw.init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
        x = sw.ones(4, 400_000, device_mesh=mesh, placements=[sw.Shard(1)])
        with counting() as ledger:
            y = x.softmax(-1)
        assert str(y.sharding) == "[4, 400000:tp]"
        assert ledger.bytes < 1000
        small = sw.ones(4, 8, device_mesh=mesh, placements=[sw.Shard(1)])
        with counting() as ledger:
            small.softmax(-1)
        assert ledger.collectives == 1


MORE = {
    "safe_softmax": lambda x: torch.ops.aten._safe_softmax(x, -1),
    "norm": lambda x: torch.ops.aten.norm.ScalarOpt_dim(x, None, [-1]),
    "norm of all": lambda x: torch.ops.aten.norm.Scalar(x, 3),
    "layer_norm with weights": lambda x: functional.layer_norm(x, (x.shape[-1],), x[0], x[1]),
    "batch_norm": lambda x: functional.batch_norm(x.mT, None, None, training=True),
    "group_norm": lambda x: functional.group_norm(x[None], 1),
}
EXACT = torch.float64


@pytest.mark.usefixtures("taken")
@pytest.mark.parametrize("name", [*CASES, *MORE])
@pytest.mark.parametrize("dtype", [EXACT, torch.bfloat16, torch.float16])
def test_narrow_values_are_added_in_float32(name, dtype):
    x = randn(3, 9, dtype=dtype)
    tol = {EXACT: 1e-9, torch.bfloat16: 4e-2, torch.float16: 5e-3}[dtype]
    for layout, mesh in (("1", (4,)), ("1 1", (2, 2)), ("0 1", (2, 2))):
        compare((CASES | MORE)[name], [x], [layout], mesh, grad=dtype is EXACT and name != "norm 0", tol=tol)


@pytest.mark.usefixtures("taken")
def test_rows_that_are_masked_entirely():
    x = torch.full((3, 9), -math.inf, dtype=EXACT)
    x[1, 4] = 0
    for fn in (MORE["safe_softmax"], CASES["softmax"], CASES["logsumexp"]):
        compare(fn, [x], ["1"], grad=False)


@pytest.mark.usefixtures("taken")
def test_a_gradient_in_another_layout_than_the_result():
    def backward(grad, out):
        return torch.ops.aten._softmax_backward_data(grad, out, 1, EXACT)

    for layouts in (["R", "1"], ["1", "R"], ["0", "1"], ["P", "1"], ["1", "0"]):
        compare(backward, [randn(3, 9), randn(3, 9, seed=1)], layouts, grad=False)


def test_gradients_along_large_rows_are_not_gathered():
    for fn in (CASES["softmax"], CASES["log_softmax"], CASES["layer_norm"]):
        assert compare(fn, [randn(2, 40_000)], ["1"]).bytes < 1000


@pytest.mark.parametrize(
    ("order", "reduce_op"), [(0, "sum"), (1, "sum"), (math.inf, "max"), (-math.inf, "min")]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_norms_that_are_sums_or_extrema_stay_pending(order, reduce_op, dtype):
    whole = randn(6, 3).to(dtype)
    whole[1, 2] = 0
    with sw.simulate(3):
        mesh = sw.init_device_mesh("cpu", (3,))
        x = sw.distribute_tensor(whole, mesh, [sw.Shard(0)])
        with counting() as ledger:
            norm = torch.linalg.vector_norm(x, order)
        assert ledger.collectives == 0
        assert norm.placements == (sw.Partial(reduce_op),)
        torch.testing.assert_close(norm.full_tensor(), torch.linalg.vector_norm(whole, order))
        pending = sw.distribute_tensor(whole, mesh, [sw.Partial()])
        torch.testing.assert_close(
            torch.linalg.vector_norm(pending, order).full_tensor(), torch.linalg.vector_norm(whole, order)
        )
