"""A sample of torch's op_db on real processes: the dense results and gradients, and no rank hangs."""

import os
import random
import warnings

import pytest
import torch
from tests.op_db.excluded import excluded
from tests.op_db.random_layouts import flat, map_tensors
from tests.op_db.sweep import DTYPES_OF, OPS
from torch import Tensor

import shardwise as sw

pytestmark = pytest.mark.processes
STEP = 1 if os.environ.get("SHARDWISE_DEEP") == "1" else 15  # run every fifteenth op


def _names():
    names = [n for n, dtypes in DTYPES_OF.items() if "float64" in dtypes and not excluded(OPS[n])]
    return [n for n in names if "lowrank" not in n]  # whose results are not unique


def _distribute(t, mesh, draw):
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


def _same(got, want):
    got = got.full_tensor() if isinstance(got, sw.DTensor) else got
    if not isinstance(want, Tensor):
        return got == want or (isinstance(want, float) and abs(got - want) < 1e-9) or got is want
    if got is None:
        return not want.any()
    if (got.dtype, got.layout) != (want.dtype, want.layout):
        return False
    return torch.allclose(got.to_dense(), want.to_dense(), rtol=1e-7, atol=1e-7, equal_nan=True)


def _dense(op, draw):
    """A random sample that runs on one device, with its results and gradients there."""
    torch.manual_seed(0)
    samples = list(op.sample_inputs("cpu", torch.float64, requires_grad=op.supports_autograd))
    for sample in draw.sample(samples, len(samples)):
        call, leaves = (sample.input, sample.args, sample.kwargs), []

        def leaf(t, leaves=leaves):
            leaves.append(t.detach().clone().requires_grad_(t.requires_grad))
            return leaves[-1]

        try:
            return call, _run(op, map_tensors(call, leaf), leaves)
        except Exception:
            continue  # some samples are not meant to run
    raise AssertionError("no sample runs on one device")


def differences(names, mesh_shape):
    """The results that differ and the errors, by op; after an error all ranks go on to the next op."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    mesh = sw.init_device_mesh("cpu", mesh_shape, mesh_dim_names=("dp", "tp")[: len(mesh_shape)])
    wrong = []
    for name in names:
        op, draw, leaves = OPS[name], random.Random(name), []

        def leaf(t, leaves=leaves, draw=draw):
            leaves.append(_distribute(t, mesh, draw))
            return leaves[-1]

        try:
            call, want = _dense(op, draw)
            got = _run(op, map_tensors(call, leaf), leaves)
            pairs = list(zip(got, want, strict=True))
            wrong += [(name, i) for i, (g, w) in enumerate(pairs) if not _same(g, w)]
        except Exception as error:
            wrong.append((name, f"{type(error).__name__}: {error}"[:300]))
    return wrong


@pytest.mark.parametrize("mesh_shape", [(4,), (2, 2)])
def test_results_and_gradients_equal_the_dense_ones(workers, mesh_shape):
    names = _names()[len(mesh_shape) :: STEP]
    assert len(names) >= 600 // STEP
    assert workers.run(differences, names, mesh_shape) == [[]] * 4
