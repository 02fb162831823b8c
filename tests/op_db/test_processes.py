"""A sample of torch's own op_db on real processes: the same answers as in a simulation, and nobody waits in vain."""

import os
import random
import warnings

import pytest
import torch
from tests.op_db.drawn import flat, swap
from tests.op_db.excluded import excluded
from tests.op_db.judge import OPS
from torch import Tensor

import shardwise as sw

pytestmark = pytest.mark.processes
EVERY = 1 if os.environ.get("SHARDWISE_DEEP") == "1" else 5  # of the ops, one in so many


def _names():
    every = [n for n, op in OPS.items() if torch.float64 in op.supported_dtypes("cpu") and not excluded(op)]
    # those whose results are not unique
    return [n for n in every if "lowrank" not in n]


def _laid(t, mesh, draw):
    if t.layout is not torch.strided:
        return sw.distribute_tensor(t.detach().clone(), mesh).requires_grad_(t.requires_grad)
    options = [sw.Replicate(), *(sw.Shard(d) for d in range(t.dim())), *(sw.Shard(d) for d in range(t.dim()))]
    placements = [draw.choice(options) for _ in range(mesh.ndim)]
    x = sw.distribute_tensor(t.detach().clone(), mesh, placements, src_data_rank=None)
    return x.requires_grad_(t.requires_grad)


def _run(op, call, leaves):
    i, a, k = call
    sw.manual_seed(5)
    with sw.one_device():
        result = op(i, *a, **k)
    outs = [r for r in flat(result) if isinstance(r, Tensor) and r.requires_grad and not r.dtype.is_complex]
    if outs and op.supports_autograd:
        sum((r.to_dense() if r.is_sparse or r.is_sparse_csr else r).cos().sum() for r in outs).backward()
    return [*flat(result), *(t.grad for t in leaves)]


def _whole(x):
    return x.full_tensor() if isinstance(x, sw.DTensor) else x


def _same(got, want):
    got = _whole(got)
    if not isinstance(want, Tensor):
        return got == want or (isinstance(want, float) and abs(got - want) < 1e-9) or got is want
    if got is None:
        return not want.any()
    if (got.dtype, got.layout) != (want.dtype, want.layout):
        return False
    return torch.allclose(got.to_dense(), want.to_dense(), rtol=1e-7, atol=1e-7, equal_nan=True)


def op_by_op(names, mesh_shape):
    """What is wrong, op by op; an error counts too, and all ranks go on to the next op."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    mesh = sw.init_device_mesh("cpu", mesh_shape, mesh_dim_names=("dp", "tp")[: len(mesh_shape)])
    wrong = []
    for name in names:
        op, draw = OPS[name], random.Random(name)
        torch.manual_seed(0)
        samples = list(op.sample_inputs("cpu", torch.float64, requires_grad=op.supports_autograd))
        sample = draw.choice(samples)
        call = (sample.input, sample.args, sample.kwargs)
        dense, spread = [], []

        def leaf(t, dense=dense):
            dense.append(t.detach().clone().requires_grad_(t.requires_grad))
            return dense[-1]

        def put(t, spread=spread, draw=draw):
            spread.append(_laid(t, mesh, draw))
            return spread[-1]

        try:
            want = _run(op, swap(call, leaf), dense)
        except Exception:
            continue  # not a sample for the op itself
        try:
            got = _run(op, swap(call, put), spread)
            pairs = list(zip(got, want, strict=True))
            wrong += [(name, i) for i, (g, w) in enumerate(pairs) if not _same(g, w)]
        except Exception as error:
            wrong.append((name, f"{type(error).__name__}: {error}"[:300]))
    return wrong


@pytest.mark.parametrize("mesh_shape", [(4,), (2, 2)])
def test_a_sample_of_ops_on_real_processes(workers, mesh_shape):
    names = _names()[len(mesh_shape) :: EVERY]
    assert len(names) > 100
    for rank in workers.run(op_by_op, names, mesh_shape):
        assert rank == []
