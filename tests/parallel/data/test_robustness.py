"""Programs that go wrong: errors alike on all ranks, and a model that is ready for the next step."""

import pytest
import torch
from tests.parallel.data.models import build, full
from tests.parallel.data.test_engine import groups, shard_each
from tests.parallel.data.test_meshes import DATA, mean_over_ranks, own_data
from tests.parallel.data.test_programs import check_gradients, mesh_of
from torch import nn

from shardwise import LaunchError, launch, simulate
from shardwise.comm import counting
from shardwise.fsdp import MixedPrecisionPolicy, fully_shard
from shardwise.parallel import check_ranks


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(5, 5)])
        self.head = nn.Linear(5, 5, bias=False)
        self.head.weight = self.layers[0].weight

    def forward(self, x):
        return self.head(self.layers[0](x).tanh())


def tied_outside():
    """The error of a tied weight outside of the group, and the gradients after its fix."""
    rank = torch.distributed.get_rank()
    torch.manual_seed(0)
    model = Tied().double()
    fully_shard(model.layers[0], mesh=mesh_of(4))
    with torch.no_grad():
        model(DATA[rank])  # its values are still the same
    with pytest.raises(RuntimeError) as found:
        model(DATA[rank]).pow(2).sum().backward()
    model.zero_grad()
    fully_shard(model, mesh=mesh_of(4))
    assert model.head.weight is model.layers[0].weight
    model(DATA[rank]).pow(2).sum().backward()
    return str(found.value), [full(p.grad) for p in model.parameters()]


@pytest.mark.processes
def test_a_weight_tied_to_a_module_that_is_not_data_parallel(workers):
    torch.manual_seed(0)
    dense = Tied().double()
    mean_over_ranks(dense, 4)
    for error, grads in workers.run(tied_outside):
        assert "The parameter weight got a gradient" in error
        assert "tied" in error
        assert "fix: " in error
        for g, p in zip(grads, dense.parameters(), strict=True):
            torch.testing.assert_close(g, p.grad)


def test_backward_passes_that_autograd_refuses():
    with simulate(2):
        dense, model = build("mlp"), shard_each(build("mlp"), mesh_of(2), reshard_after_forward=True)
        loss = model(own_data()).pow(2).sum()
        loss.backward()
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            loss.backward()
        with torch.no_grad(), pytest.raises(RuntimeError, match="does not require grad"):
            model(own_data()).ranks[0].sum().backward()
        model.zero_grad()
        model(own_data()).pow(2).sum().backward()
        mean_over_ranks(dense, 2)
        check_gradients(model, dense)
        assert not any(g.gathered.are_wanted for g in groups(model))


def test_a_module_that_some_passes_skip():
    """The plan of a step changes: what was gathered ahead for nothing is dropped, and gathered again when it is needed."""
    with simulate(2):
        dense, model = build("recurrent"), shard_each(build("recurrent"), mesh_of(2))
        fully_shard(extra := nn.Linear(3, 3).double(), mesh=mesh_of(2))
        reference = nn.Linear(3, 3).double()
        with torch.no_grad():
            for p, q in zip(reference.parameters(), extra.parameters(), strict=True):
                p.copy_(full(q))
        model.extra, dense.extra, plain = extra, reference, type(dense).forward
        for step in range(4):
            for net in (dense, model):
                net.zero_grad()
                used = step % 2 == 0

                def forward(x, net=net, used=used):
                    out = plain(net, x)
                    return net.extra(out) if used else out

                net.forward = forward
            dense.calls = model.calls
            model(own_data()).pow(2).sum().backward()
            for rank in range(2):
                dense.calls = model.calls - 1
                dense(DATA[rank]).pow(2).sum().div(2).backward()
            check_gradients(model, dense)
            assert not any(g.gathered.are_wanted for g in groups(model))


def test_dtypes_that_cannot_be_reduced():
    for name in ("param_dtype", "reduce_dtype", "output_dtype"):
        with pytest.raises(ValueError, match=f"(?s){name}=torch.int32.*why: .*fix: "):
            MixedPrecisionPolicy(**{name: torch.int32})


class Fail(torch.autograd.Function):
    """Raises in the backward pass."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        raise KeyError("backward")


def interrupted_steps():
    """Gradients of a step after one that failed in forward and one that failed in backward."""
    mesh, rank = mesh_of(4), torch.distributed.get_rank()
    model = shard_each(build("mlp"), mesh, reshard_after_forward=True)
    model(DATA[rank]).pow(2).sum().backward()  # the next passes gather ahead
    model.zero_grad()
    for place in ("forward", "backward"):

        def hook(module, args, out, place=place):
            if place == "forward":
                raise KeyError(place)
            return Fail.apply(out)

        handle = model.layers[1].register_forward_hook(hook)
        with pytest.raises(KeyError, match=place):
            model(DATA[rank]).pow(2).sum().backward()
        handle.remove()
    model.zero_grad()
    model(DATA[rank]).pow(2).sum().backward()
    return [full(p.grad) for p in model.parameters()]


@pytest.mark.processes
def test_exceptions_in_the_middle_of_a_step_on_processes(workers):
    dense = build("mlp")
    mean_over_ranks(dense, 4)
    for grads in workers.run(interrupted_steps):
        for g, p in zip(grads, dense.parameters(), strict=True):
            torch.testing.assert_close(g, p.grad)


def skip_a_module():
    """The errors of a program in which one rank skips a layer, in forward and in backward."""
    mesh, rank = mesh_of(4), torch.distributed.get_rank()
    model = nn.Module()
    model.layers = nn.ModuleList([nn.Linear(5, 5).double() for _ in range(3)])
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=True)
    errors = []
    for skipped in (None, 1):
        try:
            with check_ranks(), counting() as ledger:
                x = DATA[rank].clone()
                for i, layer in enumerate(model.layers):
                    x = x if i == skipped and rank == 2 else layer(x)
                x.sum().backward()
                errors.append(ledger.collectives)
        except RuntimeError as error:
            errors.append(str(error))
            for layer in model.layers:
                layer.reset_iter_state()
    model.layers[0](DATA[rank]).sum().backward()  # the model is ready
    return errors, full(model.layers[0].bias.grad)


@pytest.mark.processes
def test_a_rank_that_skips_a_module(workers):
    found = workers.run(skip_a_module)
    (checked, error), _ = found[0]
    assert checked > 0
    assert "about to communicate for different modules" in error
    assert "rank 1: gather Linear (weight, …), group" in error
    assert "why: " in error
    assert "fix: " in error
    assert all(other[0][1] == error for other in found)
    assert all(torch.equal(other[1], found[0][1]) for other in found)


class Branches(nn.Module):
    """Layers of one shape, which a rank may skip or call in another order."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x, names):
        for name in names.split():
            x = getattr(self, name)(x)
        return x


def ranks_that_differ(names, wrap_root):
    """A step in which the second rank calls other layers, whose collectives look like those of the first."""
    rank, mesh = torch.distributed.get_rank(), mesh_of(2)
    model = Branches()
    for layer in (model.first, model.second, model.third):
        fully_shard(layer, mesh=mesh, reshard_after_forward=True)
    if wrap_root:
        fully_shard(model, mesh=mesh)
    model(torch.ones(2, 4), names[rank]).sum().backward()
    return "no error"


@pytest.mark.processes
@pytest.mark.parametrize(
    ("names", "wrap_root", "found"),
    [
        (("first second third", "first third"), True, ("Branches.second (weight, …)", "Branches.third")),
        (("first second", "second first"), False, ("Linear (weight, …), group 0", "group 1")),
        (("first second", "first"), True, ("Branches.second (weight, …)", "Branches.first")),
    ],
    ids=["skips one", "other order", "skips the last"],
)
def test_layers_of_one_shape_are_told_apart(names, wrap_root, found):
    """The faults of ranks are compared before a collective is sent: no rank computes with the blocks of another layer."""
    with pytest.raises(LaunchError) as error:
        launch(ranks_that_differ, 2, names, wrap_root, timeout=60)
    text = str(error.value)
    assert "ranks 0 and 1 of 2 call different collectives" in text.replace("ranks 1 and 0", "ranks 0 and 1")
    assert all(part in text for part in (*found, "why: ", "fix: ", "test_robustness.py"))
