"""Inputs of a compiled program that share memory: a write to one of them is seen in the other, or the program is refused."""

import warnings

import pytest
import torch
from tests.compile.matrix import tensor

from shardwise.compile import fake_mesh

VIEWS = {
    "columns": lambda x: x[:, 2:],
    "flattened": lambda x: x.view(36),
    "detached": lambda x: x.detach(),
    "block": lambda x: x.to_local(),
}


def write_to_second(x, y):
    y.mul_(3)
    return x + 1, y.sum()


def write_to_first(x, y):
    x.mul_(3)
    return x + 1, y.sum()


@pytest.fixture
def mesh():
    torch._dynamo.reset()
    with fake_mesh((1,), ("tp",)) as mesh, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield mesh


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("view", VIEWS)
def test_a_write_to_shared_memory(mesh, view, dynamic):
    for fn in (write_to_first, write_to_second):
        found = []
        for f in (fn, torch.compile(fn, backend="aot_eager", dynamic=dynamic)):
            x = tensor(mesh, 6, 6, grad=False)
            found.append([getattr(t, "_local_tensor", t) for t in (*f(x, VIEWS[view](x)), x)])
        assert all(map(torch.allclose, *found))


def test_in_one_graph_it_is_refused(mesh):
    x = tensor(mesh, 6, 6, grad=False)
    step = torch.compile(write_to_second, backend="aot_eager", fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="writes to memory that its inputs"):
        step(x, x[1:])


def test_parts_of_one_memory_that_share_nothing_are_compiled(mesh):
    step = torch.compile(write_to_second, backend="aot_eager", fullgraph=True)
    x, y = (tensor(mesh, 6, 6, grad=False) for _ in range(2))
    for got, expected in zip(step(x[:, :2], x[:, 2:]), write_to_second(y[:, :2], y[:, 2:]), strict=True):
        assert torch.allclose(got.to_local(), expected.to_local())
    assert torch.equal(x.to_local(), y.to_local())
