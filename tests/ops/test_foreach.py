"""Each foreach op of torch on lists of DTensors, compared with plain tensors."""

import pytest
import torch

import shardwise as sw
from shardwise.comm import counting

OPS = sorted(name for name in dir(torch) if name.startswith("_foreach_"))


def lists(number: int) -> list[list[torch.Tensor]]:
    torch.manual_seed(0)
    return [[torch.rand(3, 2) + 0.5, torch.rand(4) + 0.5] for _ in range(number)]


def arguments():
    a, b, c = lists(3)
    square = [torch.rand(3, 3), torch.rand(2, 2)]  # for products
    return [[a], [a, b], [a, 2.0], [a, b, c], [a, [1.0, 2.0]], [a, b, 0.5], [square, square]]


@pytest.mark.parametrize("shard", [True, False])
@pytest.mark.parametrize("name", OPS)
def test_a_foreach_op_equals_the_one_on_plain_tensors(name, shard, caplog):
    caplog.set_level("ERROR", logger="shardwise")
    op, compared = getattr(torch, name), 0
    with sw.simulate(2):
        mesh = sw.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        placements = [sw.Shard(0) if shard else sw.Replicate()]

        def distribute(values):
            return [sw.distribute_tensor(t, mesh, placements) for t in values]

        for args in arguments():
            dense = [
                [t.clone() for t in x] if isinstance(x, list) and isinstance(x[0], torch.Tensor) else x
                for x in args
            ]
            distributed = [
                distribute(x) if isinstance(x, list) and isinstance(x[0], torch.Tensor) else x for x in args
            ]
            try:
                want = op(*dense)
            except (TypeError, RuntimeError):
                continue  # the op does not take such arguments
            got = op(*distributed)
            compared += 1
            pairs = zip(
                distributed[0] if want is None else got, dense[0] if want is None else want, strict=True
            )
            for x, t in pairs:
                torch.testing.assert_close(x.full_tensor().ranks[1], t, equal_nan=True)
    assert compared


@pytest.mark.parametrize("ord", [1, 2, 3.5, float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_norms_of_tensors_split_over_the_same_axes_are_reduced_by_one_collective(ord, dtype):
    torch.manual_seed(0)
    with sw.simulate(4), sw.policy(implicit="allow"):
        mesh = sw.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        full = [torch.randn(n, 6, dtype=dtype) for n in (8, 5, 1, 3, 4)]  # rank 1 has no row of the third
        split = [(sw.Shard(0), sw.Replicate())] * 4 + [(sw.Shard(1), sw.Shard(0))]
        x = [sw.distribute_tensor(t, mesh, p) for t, p in zip(full, split, strict=True)]
        with counting() as ledger:
            norms = torch._foreach_norm(x, ord)
        assert ledger.collectives == (1 if ord in (1, float("inf")) and dtype.itemsize == 4 else 2)
        assert all(n.placements == (sw.Replicate(), sw.Replicate()) for n in norms[:4])
        for norm, t in zip(norms, full, strict=True):
            assert norm.dtype == dtype
            expected = torch.linalg.vector_norm(t.double(), ord).to(dtype)
            torch.testing.assert_close(norm.full_tensor().ranks[3], expected)


def test_clipping_by_norm_is_one_collective_and_equals_that_of_one_device():
    with sw.simulate(2):
        mesh = sw.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        plain = [torch.nn.Parameter(torch.ones(n, 3)) for n in (2, 5, 7)]
        params = [torch.nn.Parameter(sw.distribute_tensor(p, mesh, [sw.Shard(0)])) for p in plain]
        for p, q in zip(plain, params, strict=True):
            p.grad = torch.full_like(p, 2.0)
            q.grad = sw.distribute_tensor(p.grad, mesh, [sw.Shard(0)])
        with counting() as ledger:
            found = torch.nn.utils.clip_grad_norm_(params, 1.0, foreach=True)
        expected = torch.nn.utils.clip_grad_norm_(plain, 1.0, foreach=True)
        assert ledger.collectives == 1
        torch.testing.assert_close(found.full_tensor().ranks[1], expected)
        for p, q in zip(plain, params, strict=True):
            torch.testing.assert_close(q.grad.full_tensor().ranks[0], p.grad)


def test_clipping_by_default_over_tensors_on_a_mesh_and_on_parts_of_it():
    with sw.simulate(4):
        mesh = sw.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        placed = [((8, 4), mesh, [sw.Shard(0), sw.Shard(1)]), ((6,), mesh["dp"], [sw.Shard(0)])]
        for foreach in (None, True, False):
            grads = [torch.arange(float(torch.Size(shape).numel())).view(shape) for shape, _, _ in placed]
            dense = [torch.zeros_like(g) for g in grads]
            split = [sw.zeros(shape, device_mesh=m, placements=p) for shape, m, p in placed]
            for d, s, g, (_, m, p) in zip(dense, split, grads, placed, strict=True):
                d.grad, s.grad = g.clone(), sw.distribute_tensor(g, m, p)
            want = torch.nn.utils.clip_grad_norm_(dense, 1.0)
            norm = torch.nn.utils.clip_grad_norm_(split, 1.0, foreach=foreach)
            torch.testing.assert_close(norm.full_tensor(), want)
            for d, s in zip(dense, split, strict=True):
                torch.testing.assert_close(s.grad.full_tensor(), d.grad)
