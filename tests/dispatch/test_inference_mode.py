"""Views that composite ops create in inference mode belong to autograd as on one device."""

import pytest
import torch

import shardwise as sw

VIEWS = {
    "movedim": lambda y: y.movedim(0, 1),
    "reshape": lambda y: y.reshape(3, 4),
    "view_as": lambda y: y.view_as(y),
    "expand_as": lambda y: y.expand_as(y),
    "chunk": lambda y: y.chunk(2)[1],
    "flatten": lambda y: y.flatten(),
    "swapaxes": lambda y: y.swapaxes(0, 1),
    "permute": lambda y: y.permute(1, 0),
}


@pytest.mark.parametrize("name", VIEWS)
def test_views_in_inference_mode(name):
    def look(x):
        y = x.requires_grad_() * 2
        with torch.inference_mode():
            v = VIEWS[name](y)
        return v.requires_grad, v.is_leaf, v.is_inference(), v._is_view()

    want = look(torch.ones(4, 3))
    with sw.simulate(2):
        mesh = sw.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        assert look(sw.distribute_tensor(torch.ones(4, 3), mesh, [sw.Shard(0)])) == want
