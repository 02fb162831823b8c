"""Patches: indices whose values C++ code reads, and plain tensors, for which patches change nothing."""

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import shardwise as sw


@pytest.mark.parametrize("given", [torch.tensor([1, 3]), torch.tensor([4, -1, 2]), torch.tensor(3)])
@pytest.mark.parametrize("placement", [sw.Replicate(), sw.Shard(0), sw.Partial()])
def test_tensor_split_at_distributed_indices(given, placement):
    t = torch.arange(15.0).view(5, 3)
    with sw.simulate(2):
        mesh = sw.init_device_mesh("cpu", (2,))
        x = sw.distribute_tensor(t, mesh, [sw.Shard(0)]).requires_grad_()
        at = sw.distribute_tensor(given, mesh, [sw.Replicate() if given.dim() == 0 else placement])
        got, want = torch.tensor_split(x, at), torch.tensor_split(t, given)
        assert len(got) == len(want)
        for mine, dense in zip(got, want, strict=True):
            assert torch.equal(mine.full_tensor().ranks[0], dense)
        (got[0] * 2).sum().backward()
        assert torch.equal(x.grad.full_tensor().ranks[0][: len(want[0])], torch.full_like(want[0], 2))
        plain = torch.tensor_split(x, given)  # a plain tensor of indices
        assert torch.equal(plain[1].full_tensor().ranks[0], want[1])


def test_tensor_split_of_plain_tensors_is_torchs():
    assert [len(t) for t in torch.tensor_split(torch.arange(5), torch.tensor([2]))] == [2, 3]


class Passing(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("mode", [Passing, sw.one_device, FakeTensorMode])
def test_plain_tensors_in_a_mode_run_torchs_kernels(mode):
    x, classes = torch.arange(6.0).view(2, 3), torch.tensor([0, 2, 1])
    with mode() as active:
        if isinstance(active, FakeTensorMode):
            x, classes = active.from_tensor(x), active.from_tensor(classes)
        found = [
            torch.nn.functional.one_hot(classes, 3),
            x.clone().requires_grad_().prod(0),
            torch.nn.functional.dropout1d(x, 0.0),
            torch.tensor_split(x, 2)[0],
        ]
    assert [tuple(t.shape) for t in found] == [(3, 3), (3,), (2, 3), (1, 3)]
    assert not any(isinstance(t, sw.DTensor) for t in found)


@pytest.mark.parametrize("mode", [Passing, sw.one_device])
@pytest.mark.parametrize("grad", [False, True])
def test_shapes_that_torchs_own_code_changes_in_a_mode(mode, grad):
    with sw.simulate(2):
        mesh = sw.init_device_mesh("cpu", (2,))
        x, w = (sw.distribute_tensor(torch.ones(s), mesh, [sw.Shard(0)]) for s in ((4,), (3, 4)))
        with mode():
            # C++ code that calls `squeeze_` and `transpose_` on what it has computed
            assert torch.nn.functional.linear(x.requires_grad_(grad), w).shape == (3,)
            assert torch.quantile(x.detach().requires_grad_(grad), 0.5, dim=0, keepdim=True).shape == (1,)
            v = w[0]
            torch.ops.aten.t_(w)
        assert w.shape == (4, 3)
        assert v.shape == (4,)
