"""Functional collectives do what their docstrings say, on real processes and while torch traces."""

import ast
import inspect

import pytest
import torch
import torch.distributed as dist
from torch.fx.experimental.proxy_tensor import make_fx

from shardwise.torch_internals import collectives
from shardwise.torch_internals.collectives import (
    all_gather,
    all_reduce,
    all_to_all,
    broadcast,
    collective_name,
    reduce_scatter,
    wait,
)
from shardwise.torch_internals.process_groups import fake_world


def all_of_them():
    """On one of four ranks: the result of each collective, and the inputs afterwards."""
    rank, group = dist.get_rank(), dist.group.WORLD.group_name
    x = torch.full((4, 2), float(rank))
    rows = torch.arange(4.0) + 10 * rank  # row i is for rank i, and rank 3 gets two
    results = [
        all_gather(x[:1], 4, group),
        all_reduce(x, "sum", group),
        all_reduce(x, "max", group),
        reduce_scatter(x + torch.arange(4.0)[:, None], "sum", 4, group),
        all_to_all(torch.cat([rows, rows[3:]]), [2 if rank == 3 else 1] * 4, [1, 1, 1, 2], group),
        broadcast(x, 2, group),
    ]
    return [wait(r).tolist() for r in results], torch.equal(x, torch.full((4, 2), float(rank)))


@pytest.mark.processes
def test_collectives_on_real_processes(workers):
    for rank, (results, kept) in enumerate(workers.run(all_of_them)):
        gathered, total, largest, scattered, exchanged, copied = results
        assert gathered == [[float(r)] * 2 for r in range(4)]
        assert total == [[6.0] * 2] * 4
        assert largest == [[3.0] * 2] * 4
        assert scattered == [[6.0 + 4 * rank] * 2]
        assert exchanged == [rank + 10.0 * r for r in range(4) for _ in range(2 if rank == 3 else 1)]
        assert copied == [[2.0] * 2] * 4
        assert kept


def test_collectives_are_traced_as_one_op_each():
    with fake_world(4):
        group = dist.group.WORLD.group_name
        graph = make_fx(lambda x: wait(all_reduce(x, "sum", group)))(torch.ones(2)).graph
    assert [node.op for node in graph.nodes] == ["placeholder", "call_function", "call_function", "output"]


def test_names_of_collectives():
    functional = torch.ops._c10d_functional
    for op in (functional.all_gather_into_tensor, functional.all_gather_into_tensor.default):
        assert collective_name(op) == "functional.all_gather"
    assert collective_name(functional.wait_tensor.default) == "functional.wait"
    assert collective_name(functional.all_gather_into_tensor_coalesced.default) is not None
    for name in ("all_reduce", "broadcast", "all_gather_into_tensor", "send", "barrier"):
        assert collective_name(getattr(dist, name)) == name
    for other in (torch.add, torch.Tensor.sum, torch.ops.aten.add.Tensor, len, lambda x: x):
        assert collective_name(other) is None


def test_every_collective_is_marked_as_ours():
    """Otherwise `CommDebugMode` would count it twice: in the ledger, and as one that the program called itself."""
    tree = ast.parse(inspect.getsource(collectives))
    called = {n.func.id for n in ast.walk(tree) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)}
    ops = {name for name, value in vars(collectives).items() if isinstance(value, torch._ops.OpOverload)}
    assert len(ops) >= 6
    assert called & ops == {"_wait"}
