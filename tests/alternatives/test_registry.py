"""Every alternative: it is taken, gives the dense result and gradient, and sends what its plans say."""

import math
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from tests.dense import compare, randn
from torch.nn import functional

from shardwise.alternatives.registry import ALTERNATIVES
from shardwise.call.arguments import tensors_in
from shardwise.call.schema import op_info
from shardwise.call.trace import trace_calls
from shardwise.comm import counting
from shardwise.dispatch.router import find_route

aten = torch.ops.aten
X = randn(3, 9)  # over 4 ranks the last block is empty
ROWS = ("1", "1 1", "0 1")  # placements that split the rows, on one axis and on two
MESHES = {1: ((4,), (3,)), 2: ((2, 2),)}


class Case(NamedTuple):
    """A function and its inputs.

    Attributes:
        ops: the names of the ops in it that have an alternative.
        run: the function.
        inputs: its inputs.
        placements: the placements of the first input that are tried.
        others: the placement of each other input, on every axis.
        grad: whether to compare gradients.
    """

    ops: str
    run: Any
    inputs: tuple[torch.Tensor, ...] = (X,)
    placements: tuple[str, ...] = ROWS
    others: tuple[str, ...] = ()
    grad: bool = True

    def layouts(self) -> Iterator[tuple[list[str], tuple[int, ...]]]:
        """The placements of all inputs, and the meshes to try them on."""
        for first in self.placements:
            axes = len(first.split())
            for mesh in MESHES[axes]:
                yield [first, *(" ".join([other] * axes) for other in self.others)], mesh


def _pool(nd, name, run):
    x = randn(2, 2, *[9, 3, 3][:nd])
    ops = f"{name.format(nd)}.default {name.format(nd)}_backward.default"
    return Case(ops, run, (x,), ("2", "2 2", "0 2", "1 2"))


def _resample(nd, family, run):
    return _pool(nd, family + "{}d", run)


def _batch_norm(x, w, b, stats=None, **kwargs):
    mean, var = (None, None) if stats is None else (stats.detach().clone(), stats.detach().abs() + 1)
    out = aten._native_batch_norm_legit.default(x, w, b, mean, var, True, 0.1, 1e-5)
    return out[0], mean, var


BATCH = (randn(9, 3, 2), randn(3, seed=1), randn(3, seed=2))
GROUPS = (randn(2, 4, 9), randn(4, seed=1), randn(4, seed=2))
IMAGES = (randn(2, 3, 9, 2), randn(4, 3, 3, 2, seed=1), randn(4, seed=2))
OUT = (randn(3, 5, seed=1),)
TARGET = torch.tensor([0, 3, -100, 2, 2, 1, 0, 3, 1])
PIXELS = torch.arange(18).view(9, 1, 2) % 4
BATCHES, POSITIONS = ("0", "0 0"), ("2", "2 2", "0 2")

CASES = [
    Case("_softmax.default _softmax_backward_data.default", lambda x: aten._softmax(x, 1, False)),
    Case("_safe_softmax.default", lambda x: aten._safe_softmax(x, 1)),
    Case("_log_softmax.default _log_softmax_backward_data.default", lambda x: aten._log_softmax(x, -1, False)),
    Case("logsumexp.default", lambda x: aten.logsumexp(x, [1])),
    *(Case("linalg_vector_norm.default", lambda x, p=p: aten.linalg_vector_norm(x, p, [1])) for p in (1, 2, 3, math.inf)),
    Case("linalg_vector_norm.default", lambda x: aten.linalg_vector_norm(x, 0, [1]), grad=False),
    Case("norm.Scalar", lambda x: aten.norm.Scalar(x, 3)),
    Case("norm.ScalarOpt_dim", lambda x: aten.norm.ScalarOpt_dim(x, None, [1])),
    Case("norm.ScalarOpt_dtype", lambda x: aten.norm.ScalarOpt_dtype(x, 1, dtype=torch.float64)),
    Case("norm.ScalarOpt_dim_dtype", lambda x: aten.norm.ScalarOpt_dim_dtype(x, 2, [1], True, dtype=torch.float64)),
    Case("var.correction", lambda x: aten.var.correction(x, [1])),
    Case("std.correction", lambda x: aten.std.correction(x, [1], correction=0, keepdim=True)),
    Case("var_mean.correction", lambda x: aten.var_mean.correction(x, [1])),
    Case("std_mean.correction", lambda x: aten.std_mean.correction(x, [0, 1])),
    Case("native_layer_norm.default native_layer_norm_backward.default",
         lambda x, w, b: aten.native_layer_norm(x, [9], w, b, 1e-5)[0], (X, randn(9, seed=1), randn(9, seed=2)), others=("R", "0")),
    Case("native_layer_norm.default", lambda x: aten.native_layer_norm(x, [9], None, None, 1e-5), grad=False),
    Case("slice.Tensor slice_backward.default", lambda x: aten.slice.Tensor(x, 1, 1, 8, 2)),
    Case("slice_scatter.default", lambda x, y: aten.slice_scatter(x, y, 1, 2, 7), (X, *OUT), others=("R",)),
    Case("select.int", lambda x: aten.select.int(x, 1, -3)),
    Case("split.Tensor", lambda x: aten.split.Tensor(x, 4, 1)),
    Case("split_with_sizes.default", lambda x: aten.split_with_sizes(x, [2, 0, 7], 1)),
    Case("roll.default", lambda x: aten.roll(x, [2], [1])),
    Case("flip.default", lambda x: aten.flip(x, [1])),
    Case("constant_pad_nd.default", lambda x: aten.constant_pad_nd(x, [2, 3], 1.5)),
    Case("cat.default", lambda x, y: aten.cat([x, y], 1), (X, *OUT), others=("1",)),
    Case("unfold.default unfold_backward.default", lambda x: aten.unfold(x, 1, 3, 2)),
    Case("convolution.default convolution_backward.default",
         lambda x, w, b: functional.conv2d(x, w, b, padding=1), IMAGES, POSITIONS, ("R", "R")),
    Case("convolution.default convolution_backward.default",  # channels are split between groups
         lambda x, w: functional.conv1d(x, w, groups=12), (randn(2, 24, 4), randn(36, 2, 3, seed=1)), ("1",), ("0",)),
    *(_pool(n, "avg_pool{}d", partial(getattr(functional, f"avg_pool{n}d"), kernel_size=3, stride=2, padding=1)) for n in (2, 3)),
    *(_pool(n, "max_pool{}d_with_indices", partial(getattr(functional, f"max_pool{n}d"), kernel_size=3, stride=1, padding=1))
      for n in (2, 3)),
    *(_resample(n, "upsample_nearest", partial(functional.interpolate, size=[5] * n)) for n in (1, 2, 3)),
    *(_resample(n, "_upsample_nearest_exact", partial(functional.interpolate, size=[13] * n, mode="nearest-exact")) for n in (1, 2, 3)),
    *(_resample(n, "reflection_pad", partial(functional.pad, pad=[1, 2] * n, mode="reflect")) for n in (1, 2, 3)),
    *(_resample(n, "replication_pad", partial(functional.pad, pad=[2, 1] * n, mode="replicate")) for n in (1, 2, 3)),
    Case("native_batch_norm.default native_batch_norm_backward.default",
         lambda x, w, b: functional.batch_norm(x, None, None, w, b, training=True), BATCH, BATCHES, ("R", "0")),
    Case("native_batch_norm_backward.default",  # of an input that needs no gradient
         lambda x, w, b: functional.batch_norm(x.detach(), None, None, w, b, training=True), BATCH, BATCHES, ("R", "0")),
    Case("_native_batch_norm_legit.default", _batch_norm, (*BATCH, randn(3, seed=3)), BATCHES, ("R", "R", "0")),
    Case("_native_batch_norm_legit.no_stats",
         lambda x, w, b: aten._native_batch_norm_legit.no_stats(x, w, b, True, 0.1, 1e-5)[0], BATCH, BATCHES, ("R", "R")),
    Case("native_group_norm.default native_group_norm_backward.default",
         lambda x, w, b: aten.native_group_norm(x, w, b, 2, 4, 9, 2, 1e-5)[0], GROUPS, ("2", "2 2"), ("R", "R")),
    Case("nll_loss_forward.default", lambda x, t, w: aten.nll_loss_forward(x, t, w.detach(), 1, -100),
         (randn(9, 4), TARGET, randn(4).abs()), ("0", "1", "0 1", "1 0"), ("R", "R")),
    Case("nll_loss2d_forward.default", lambda x, t: aten.nll_loss2d_forward(x, t, None, 1, 2),
         (randn(9, 4, 1, 2), PIXELS), ("0", "1", "3", "0 1", "1 3"), ("R",)),
    Case("argmax.default", lambda x: aten.argmax(x, 1)),
    Case("argmin.default", lambda x: aten.argmin(x)),
    Case("max.dim", lambda x: aten.max.dim(x, 1)),
    Case("min.dim", lambda x: aten.min.dim(x, 1, True)),
    Case("aminmax.default", lambda x: aten.aminmax(x, dim=1)),
    Case("_aminmax.default", lambda x: aten._aminmax(x), grad=False),
    Case("_aminmax.dim", lambda x: aten._aminmax.dim(x, 1), grad=False),
    Case("topk.default", lambda x: aten.topk(x, 2, 1), (randn(3, 30),)),
    Case("embedding_renorm_.default", lambda w, i: aten.embedding_renorm_(w.clone(), i, 1.0, 2.0),
         (randn(9, 7) * 3, torch.tensor([1, 2, 4, 4, 8])), ("0", "1", "0 1"), ("R",), grad=False),
    Case("_scaled_dot_product_flash_attention_for_cpu.default _scaled_dot_product_flash_attention_for_cpu_backward.default",
         lambda q, k, v: functional.scaled_dot_product_attention(q, k, v, enable_gqa=True),
         (randn(2, 24, 3, 4), randn(2, 2, 3, 4, seed=1), randn(2, 2, 3, 4, seed=2)), ("1",), ("R", "R")),
    Case("fill_.Scalar", lambda x: aten.fill_(x.clone(), 2.5), placements=("P", "P P", "1 P"), grad=False),
    Case("dist.default", lambda x, y: aten.dist(x, y, 3), (X, randn(3, 9, seed=1)), others=("1",)),
]  # fmt: skip


def _name(op):
    return str(op).removeprefix("aten.")


@pytest.mark.filterwarnings("ignore:_aminmax is deprecated")
@pytest.mark.parametrize("op", ALTERNATIVES, ids=_name)
def test_an_alternative_is_taken_and_gives_the_dense_result(op, taken):
    cases = [c for c in CASES if _name(op) in c.ops.split()]
    assert cases, f"{op} has an alternative that no case takes"
    for case in cases:
        for placements, mesh in case.layouts():
            taken.clear()
            compare(case.run, list(case.inputs), placements, mesh, grad=case.grad)
            assert op in taken, f"the alternative of {op} was not taken on {placements}"


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.ops)
@pytest.mark.usefixtures("taken")
def test_a_route_names_what_is_sent_and_returned(case):
    """Each call that takes an alternative runs once more; the plans of a program are those of its dry run."""
    compared = []

    def run_again(call):
        if call.route == "alternative" and not op_info(call.op).written:
            route = find_route(call.op, call.args, dict(call.kwargs))
            with counting() as ledger:
                result = call.op(*call.args, **call.kwargs)
            compared.append(call.op)
            assert ledger.bytes == sum(plan.bytes for plan in route.plans), call.op
            specs = [t._spec for t in tensors_in([result])]
            assert [(s.layout, s.dtype) for s in specs] == [(s.layout, s.dtype) for s in route.specs], call.op

    for placements, mesh in case.layouts():
        with trace_calls(run_again):
            compare(case.run, list(case.inputs), placements, mesh, grad=case.grad)
    assert compared or "_." in case.ops
