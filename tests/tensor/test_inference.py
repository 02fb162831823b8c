"""Every way of creating a DTensor in inference mode is noted, so that later views of it are inference tensors."""

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.tensor.inference import inference_tensors

PLAN = {"0": sw.parallel.ColwiseParallel(), "2": sw.parallel.RowwiseParallel()}


def load(x: sw.DTensor) -> Any:
    file = io.BytesIO()
    torch.save(x, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


WAYS: dict[str, Callable[[sw.DTensor], Any]] = {
    "op": lambda x: x + x,
    "from_local": lambda x: sw.DTensor.from_local(x.to_local(), x.device_mesh, x.placements),
    "distribute_tensor": lambda x: sw.distribute_tensor(torch.ones(4, 3), x.device_mesh, x.placements),
    "redistribute": lambda x: x.redistribute(x.device_mesh, [sw.Replicate()]),
    "redistribute, same placements": lambda x: x.redistribute(x.device_mesh, x.placements),
    "redistribute, async": lambda x: x.redistribute(x.device_mesh, [sw.Replicate()], async_op=True),
    "redistribute_many": lambda x: sw.redistribute_many([x, x], [[sw.Replicate()]] * 2)[0],
    "factory": lambda x: sw.zeros(4, 3, device_mesh=x.device_mesh, placements=x.placements),
    "random factory": lambda x: sw.rand(4, 3, device_mesh=x.device_mesh, placements=x.placements),
    "full_like": lambda x: torch.full_like(x, 2.0),
    "foreach": lambda x: torch._foreach_add([x, x], 1)[0],
    "deepcopy": copy.deepcopy,
    "load": load,
    "local_map": lambda x: sw.experimental.local_map(lambda t: t * 2, [sw.Shard(0)], ([sw.Shard(0)],))(x),
    "module": lambda x: sw.parallel.parallelize_module(
        nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 3)), x.device_mesh, PLAN
    )[0](torch.ones(2, 3)),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("in_inference", [True, False])
def test_created(way: str, in_inference: bool) -> None:
    with sw.simulate(2):
        mesh = sw.init_device_mesh("cpu", (2,))
        with torch.inference_mode(in_inference):
            x = sw.distribute_tensor(torch.arange(12.0).view(4, 3), mesh, [sw.Shard(0)])
            inference_tensors.clear()
            y: Tensor = WAYS[way](x)
        assert bool(inference_tensors) is in_inference
        assert y.is_inference() is y[:1].is_inference() is in_inference
