"""Transforms of `torch.func` around data-parallel modules and inside of them."""

import copy

import pytest
import torch
from torch import nn
from torch._C._dynamo.eval_frame import _debug_get_cache_entry_list
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vjp, vmap

import shardwise as sw
from shardwise import DTensor
from shardwise.comm import counting
from shardwise.fsdp import MixedPrecisionPolicy, fully_shard
from shardwise.parallel import replicate
from shardwise.parallel.data import saved


class Force(nn.Module):
    """The gradient of an energy with respect to positions, and the energy: transforms inside of `forward`."""

    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(4, 6), nn.Linear(6, 1)

    def energy(self, x):
        return self.outer(self.inner(x).tanh()).sum()

    def forward(self, x):
        return grad(self.energy)(x).pow(2).sum() + vmap(grad(self.energy))(x).sum() + self.energy(x)


class Plain(Force):
    def forward(self, x):
        return self.outer(self.inner(x).tanh()).squeeze(-1)


X = torch.randn(3, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
V = torch.randn(3, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)

# each returns a loss, by which parameters have gradients, and values to compare
USES = {
    "vmap": lambda net: (lambda y: (y.pow(2).sum(), y))(vmap(net)(X)),
    "jvp": lambda net: (lambda pair: (pair[0].sum() + pair[1].pow(2).sum(), pair))(jvp(net, (X,), (V,))),
    "grad": lambda net: (net(X).sum(), grad(lambda x: net(x).sum())(X)),
    "vjp": lambda net: (lambda out, back: (out.sum(), back(torch.ones_like(out))))(*vjp(net, X)),
    "vmap of grad": lambda net: (net(X).sum(), vmap(grad(lambda x: net(x).sum()))(X)),
    "jacobians": lambda net: (net(X).sum(), (jacrev(net)(X[0]), jacfwd(net)(X[0]))),
    "hessian": lambda net: (net(X).sum(), hessian(lambda x: net(x).pow(2).sum())(X[0])),
}


def shard(model, how):
    if how == "replicate":
        return replicate(model)
    for module in (model.inner, model.outer, model):
        fully_shard(module, reshard_after_forward=how)
    return model


def check(dense, model, use):
    """Compare values and gradients of a use of both models, which all ranks call with the same data."""
    for _ in range(2):
        losses, values = zip(*(use(net) for net in (dense, model)), strict=True)
        torch.testing.assert_close(values[1], values[0])
        for net, loss in zip((dense, model), losses, strict=True):
            net.zero_grad()
            loss.backward()
        for p, q in zip(model.parameters(), dense.parameters(), strict=True):
            found = p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
            torch.testing.assert_close(found, q.grad)


def run(how):
    torch.manual_seed(0)
    for kind in (Plain, Force):
        dense = kind().double()
        model = shard(copy.deepcopy(dense), how)
        uses = USES.values() if kind is Plain else [lambda net: (lambda y: (y, y))(net(X))]
        for use in uses:
            check(dense, model, use)
    return True


@pytest.mark.processes
@pytest.mark.parametrize("how", [None, True, False, 2, "replicate"])
def test_transforms_are_those_of_one_device(workers, how):
    assert all(workers.run(run, how))


def first_call_inside():
    """Parameters that were never gathered before, and are computed with in another dtype."""
    model = nn.Linear(4, 5).double()
    fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.float32), reshard_after_forward=False)
    out, tangent = jvp(lambda x: model(X), (X,), (V,))
    return out.dtype, bool((tangent == 0).all())


@pytest.mark.processes
def test_the_first_call_may_be_in_a_transform(workers):
    assert workers.run(first_call_inside) == [(torch.float32, True)] * 4


def transform_inside(*_):
    grad(lambda x: x.sum())(torch.ones(2))


def test_parameters_are_freed_as_before_after_a_transform():
    with sw.simulate(2):
        mesh = sw.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)).double()
        model[1].register_forward_hook(transform_inside)
        for module in (model[0], model[2], model):
            fully_shard(module, mesh=mesh)
        loss = model(sw.per_rank(lambda rank: X)).sum()
        with counting() as ledger:
            loss.backward()
        # autograd saved the position of the last layer's weight, which is gathered again
        assert [e.step for e in ledger.entries].count("all-gather") == 1


def test_hooks_of_saved_tensors_are_not_compiled():
    """In a frame that `torch.compile` leaves to Python it would compile what autograd calls there, once for each shape."""
    weight = torch.ones(3, 3)

    class Owner:
        def block_for_backward(self, slot, stamp):
            return weight

    @torch.compile(backend="eager")
    def program(x):
        torch._dynamo.skip_frame()
        return (x @ weight).tanh()

    keys = saved.register_blocks(Owner(), 1, [weight])
    with saved.packing():
        program(torch.ones(2, 3, requires_grad=True)).sum().backward()
    saved.forget_blocks(keys)
    assert not _debug_get_cache_entry_list(saved._pack.__code__)
    assert not _debug_get_cache_entry_list(saved._unpack.__code__)
