"""The first call with a key infers its outputs once, and later calls with that key not at all."""

import pytest
import torch
from torch.nn.functional import gelu

import shardwise as sw
from shardwise.call import op_call
from shardwise.call.meta import infer_outputs

CALLS = {
    "mm": lambda x, w: x @ w,
    "add": lambda x, w: x + x,
    "sum": lambda x, w: x.sum(0),
    "transpose": lambda x, w: x.t(),
    "softmax": lambda x, w: torch.softmax(x, 0),
    "sort": lambda x, w: x.sort(0)[0],
    "gelu": lambda x, w: gelu(x),
    "in-place": lambda x, w: x.mul_(2),
    "cat": lambda x, w: torch.cat([x, x]),
}


@pytest.mark.parametrize("name", CALLS)
def test_each_op_is_inferred_once(name, monkeypatch):
    inferred = []

    def counting(func, *args, **kwargs):
        inferred.append(func)
        return infer_outputs(func, *args, **kwargs)

    monkeypatch.setattr(op_call, "infer_outputs", counting)
    with sw.simulate(2), torch.no_grad():
        mesh = sw.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        x = sw.distribute_tensor(torch.randn(6, 4), mesh, [sw.Shard(0)])
        w = sw.distribute_tensor(torch.randn(4, 6), mesh, [sw.Shard(0)])
        CALLS[name](x, w)
        assert inferred
        assert len(inferred) == len(set(inferred)), inferred
        inferred.clear()
        CALLS[name](x, w)
        assert not inferred
