"""A plain tensor is one for all ranks of a simulation: what ranks write to it must be the same, and is written once."""

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

import shardwise as sw


def _rows(same: bool) -> Tensor:
    return sw.per_rank(lambda rank: torch.arange(6.0).view(2, 3) + (0 if same else rank))


def _set_item(t: Tensor, x: Tensor) -> None:
    t[1:3] = x


def _add_to(t: Tensor, x: Tensor) -> None:
    row = t[0]
    row += x[0]


WRITES = {
    "add_": lambda t, x: t[:2].add_(x),
    "set item": _set_item,
    "+=": _add_to,
    "index_copy_": lambda t, x: t.index_copy_(0, torch.tensor([3, 0]), x),
    "index_add_": lambda t, x: t.index_add_(0, torch.tensor([1, 1]), x),
    "scatter_": lambda t, x: t.scatter_(0, torch.tensor([[0, 1, 2]]), x),
    "out": lambda t, x: torch.mul(x, 2, out=t[2:]),
    "foreach": lambda t, x: torch._foreach_add_([t[0], t[1]], [x[0], x[1]]),
    "batch_norm": lambda t, x: F.batch_norm(x, t[0], t[1], training=True),
    "torch.batch_norm": lambda t, x: torch.batch_norm(x, None, None, t[0], t[1], True, 0.1, 1e-5, False),
    "aten": lambda t, x: torch.ops.aten.add_.Tensor(t[:2], x),
}


@pytest.mark.parametrize("name", WRITES)
def test_the_same_values_are_written_once(name: str) -> None:
    want, got = torch.ones(4, 3), torch.ones(4, 3)
    WRITES[name](want, torch.arange(6.0).view(2, 3))
    with sw.simulate(3):
        WRITES[name](got, _rows(same=True))
    assert torch.equal(got, want)


@pytest.mark.parametrize("name", WRITES)
def test_different_values_are_refused(name: str) -> None:
    t = torch.ones(4, 3)
    with sw.simulate(3), pytest.raises(RuntimeError, match="would be different on each rank"):
        WRITES[name](t, _rows(same=False))
    assert torch.equal(t, torch.ones(4, 3))


def test_a_shared_tensor_is_part_of_no_graph() -> None:
    with sw.simulate(2):
        x = sw.per_rank(lambda _: torch.ones(2, requires_grad=True))
        with pytest.raises(RuntimeError, match="part of the graph"):
            torch.zeros(2).add_(x)


def test_writes_that_no_name_tells_are_found() -> None:
    table = torch.full((3, 2), 2.0)
    with sw.simulate(2), pytest.raises(RuntimeError, match="written to by each rank"):
        F.embedding(sw.per_rank(torch.tensor), table, max_norm=1.0)
