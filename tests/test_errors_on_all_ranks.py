"""What all ranks can check, shapes, dims and indices of Python, raises on all ranks alike, as on one device.

Each rank runs on its own, in a world whose collectives do nothing, so a rank that raises alone leaves no other waiting.
"""

from __future__ import annotations

import sys

import pytest
import torch
import torch.distributed as dist
from tests.dense import parse_placements
from torch.nn import functional

import shardwise as sw
from shardwise import DTensor
from shardwise.comm import axes_of, coord_of
from shardwise.layout import Layout, owned

CALLS = {
    "item of several": lambda x, v: x.item(),
    "a matrix product": lambda x, v: x @ x,
    "sizes of a sum": lambda x, v: x + v,
    "sizes of a write": lambda x, v: v.add_(x),
    "a dim of a sum": lambda x, v: x.sum(5),
    "a dim twice": lambda x, v: x.sum((0, 0)),
    "a dim of softmax": lambda x, v: x.softmax(3),
    "a view": lambda x, v: x.view(5, 2),
    "expand": lambda x, v: x.expand(3, 4),
    "permute": lambda x, v: x.permute(0, 0),
    "cat": lambda x, v: torch.cat([x, v]),
    "stack": lambda x, v: torch.stack([x, x.t()]),
    "an index": lambda x, v: x[2],
    "an index of a split dim": lambda x, v: x[:, -5],
    "a list of indices": lambda x, v: x[[0, 9]],
    "a list of indices of another dim": lambda x, v: x[:, [0, 9]],
    "a list of indices after an ellipsis": lambda x, v: x[..., None, [-5, 0]],
    "a write to a list of indices": lambda x, v: x.__setitem__((slice(None), [0, 9]), 0.0),
    "the sizes of a write to a slice": lambda x, v: x.__setitem__(slice(0, 1), x.t()),
    "narrow": lambda x, v: x.narrow(1, 3, 3),
    "a write to a row": lambda x, v: x.select_scatter(v[:2], 1, 4),
    "topk": lambda x, v: x.topk(5),
    "topk of rows": lambda x, v: x.topk(3, dim=0),
    "unfold": lambda x, v: x.unfold(0, 4, 1),
    "linear": lambda x, v: functional.linear(x, x.t()),
    "layer norm": lambda x, v: functional.layer_norm(x, (5,)),
    "cross entropy": lambda x, v: functional.cross_entropy(x, v.long()),
    "a pool": lambda x, v: functional.avg_pool1d(x[None], 9),
    "fft": lambda x, v: torch.fft.fft(x, dim=3),
    "a fill value": lambda x, v: x.fill_(v),
    "a gradient": lambda x, v: (x.clone().requires_grad_() * 2).backward(),
    "foreach": lambda x, v: torch._foreach_add([x], [v, v]),
}


def tensors():
    return torch.arange(8.0).view(2, 4), torch.arange(3.0)


def outcome(call, *args):
    """The type of the error, or None."""
    try:
        call(*args)
    except (RuntimeError, IndexError, ValueError, TypeError) as error:
        return type(error)
    return None


def block(t, mesh, text):
    """This rank's block, without communication."""
    placements, local = parse_placements(text), t
    for dim, indices in enumerate(owned(Layout.of(t.shape, axes_of(mesh), placements), coord_of(mesh))):
        local = local.index_select(dim, torch.tensor(list(indices), dtype=torch.int64))
    return DTensor.from_local(local, mesh, placements, shape=t.shape)


@pytest.mark.parametrize("placements", ["1", "R"])
def test_errors_are_the_same_on_all_ranks(placements, monkeypatch):
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # init_process_group replaces it
    wanted = {name: outcome(call, *tensors()) for name, call in CALLS.items()}
    assert None not in wanted.values()
    for rank in range(2):
        dist.init_process_group("fake", rank=rank, world_size=2)
        try:
            mesh = sw.init_device_mesh("cpu", (2,))
            for name, call in CALLS.items():
                args = [block(t, mesh, p) for t, p in zip(tensors(), (placements, "R"), strict=True)]
                assert outcome(call, *args) is wanted[name], f"{name} on rank {rank}"
        finally:
            dist.destroy_process_group()


INDEXED = {
    "index": lambda x, i: x[:, i],
    "index of rows": lambda x, i: x[i],
    "index_select": lambda x, i: x.index_select(1, i),
    "index_add": lambda x, i: x.index_add(1, i, x[:, : len(i)]),
    "index_copy": lambda x, i: x.index_copy(1, i, x[:, : len(i)]),
    "index_fill": lambda x, i: x.index_fill(1, i, 2.0),
    "index_put": lambda x, i: x.clone().__setitem__((slice(None), i), 2.0),
    "gather": lambda x, i: x.gather(1, i.expand(len(x), -1)),
    "gather in a row": lambda x, i: x.gather(1, i.expand(len(x), -1) * (i.new_tensor([[1]] + [[0]] * (len(x) - 1)))),
    "scatter": lambda x, i: x.scatter(1, i.expand(len(x), -1), 1.0),
    "scatter_add": lambda x, i: x.scatter_add(1, i.expand(len(x), -1), x),
    "scatter_reduce": lambda x, i: x.scatter_reduce(1, i.expand(len(x), -1), x, "amax"),
    "embedding": lambda x, i: functional.embedding(i, x.t()),
    "cross entropy": lambda x, i: functional.cross_entropy(x, i[i.abs() > 1].expand(len(x))),
    "a write to an expanded tensor": lambda x, i: x.expand(2, *x.shape).add_(1),
}  # fmt: skip


@pytest.mark.parametrize("rows", [1, 3])
def test_indices_that_all_ranks_know(rows, monkeypatch):
    """Some ranks have no rows, or only valid rows of the index."""
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    x = torch.arange(4.0 * rows).view(rows, 4)
    for values in ([1, 9], [-9, 0]):
        index = torch.tensor(values)
        wanted = {name: outcome(call, x, index) for name, call in INDEXED.items()}
        assert None not in wanted.values()
        for rank in range(4):
            dist.init_process_group("fake", rank=rank, world_size=4)
            try:
                mesh = sw.init_device_mesh("cpu", (4,))
                for name, call in INDEXED.items():
                    args = block(x, mesh, "0"), block(index, mesh, "R")
                    with sw.policy(plain="replicate"):
                        found = outcome(call, *args)
                    assert found is not None, f"{name} on rank {rank}"
            finally:
                dist.destroy_process_group()


def lists_of_indices():
    """Errors of indices that are lists, on a tensor of which one rank has no rows."""
    x = sw.distribute_tensor(torch.arange(8.0).view(2, 4), sw.init_device_mesh("cpu", (4,)), [sw.Shard(0)])
    found = []
    for index in ([0, 9], (slice(None), [0, 9]), (..., [-5]), (None, [0, 1], [0, 4])):
        for use in (lambda: x[index], lambda: x.__setitem__(index, 0.0)):  # noqa: B023 - called at once
            try:
                use()
                found.append(None)
            except IndexError as error:
                found.append(str(error))
    return found


@pytest.mark.processes
def test_indices_that_are_lists_raise_on_ranks_without_rows(workers):
    first, *others = workers.run(lists_of_indices)
    assert None not in first
    assert first[0] == "index 9 is out of bounds for dimension 0 with size 2"
    assert all(found == first for found in others)
