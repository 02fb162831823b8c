"""Programs around data-parallel modules: several backward passes, checkpointing, optimizers, tensor parallelism."""

import copy
import functools

import pytest
import torch
from tests.parallel.data.models import Mlp, build, full
from tests.parallel.data.test_engine import groups, shard_each
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import shardwise as sw
from shardwise import DTensor, Replicate, Shard, simulate
from shardwise.comm import counting
from shardwise.fsdp import DataParallelMeshDims, fully_shard
from shardwise.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
    replicate,
    zero,
)

DATA = torch.randn(2, 4, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def own_data(copies=1):
    """The data of each rank; `copies` ranks have the same."""
    return sw.per_rank(lambda rank: DATA[rank // copies].clone())


def mesh_of(*shape, names=("dp", "tp")):
    return sw.init_device_mesh("cpu", shape, mesh_dim_names=names[: len(shape)])


def check_gradients(model, dense):
    for (name, p), q in zip(model.named_parameters(), dense.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), name
        if q.grad is not None:
            torch.testing.assert_close(full(p.grad), q.grad, msg=lambda m, name=name: f"{name}: {m}")


def ddp(model, mesh, **options):
    """`replicate` with plain parameters."""
    return replicate(model, device_mesh=mesh)


def mean_over_ranks(loss):
    """Backward of the mean of a loss of each rank's rows, on one device."""
    sum(loss(DATA[rank]) for rank in range(2)).div(2).backward()


@pytest.mark.parametrize("freed", [True, False])
def test_several_graphs_at_once_and_a_graph_used_twice(freed):
    with simulate(2):
        dense = build("mlp")
        model = shard_each(build("mlp"), mesh_of(2), reshard_after_forward=freed)
        first, second = model(own_data()).sum(), model(own_data()).pow(2).sum()
        second.backward(retain_graph=True)
        first.backward()
        second.backward()
        mean_over_ranks(lambda x: dense(x).sum() + 2 * dense(x).pow(2).sum())
        check_gradients(model, dense)


@pytest.mark.parametrize("shard", [shard_each, ddp])
def test_gradients_as_values_and_hooks_of_parameters(shard):
    with simulate(2):
        dense, model = build("mlp"), shard(build("mlp"), mesh_of(2))
        params, seen = list(model.parameters()), []
        grads = torch.autograd.grad(list(model(own_data()).sum().ranks), params)
        mean_over_ranks(lambda x: dense(x).sum())
        for g, q in zip(grads, dense.parameters(), strict=True):
            torch.testing.assert_close(full(g), q.grad)
        assert all(p.grad is None for p in params)
        for p in params:
            p.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad is not None))
        params[0].register_hook(lambda g: g * 2)
        model(own_data()).sum().backward()
        assert seen == [True] * len(params)
        torch.testing.assert_close(full(params[0].grad), 2 * full(grads[0]))


class Checkpointed(nn.Module):
    def __init__(self, reentrant):
        super().__init__()
        self.reentrant = reentrant
        self.layers = nn.ModuleList(
            [nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 5)) for _ in range(2)]
        )
        self.head = nn.Linear(5, 3)

    def forward(self, x):
        for layer in self.layers:
            x = x + checkpoint(layer, x, use_reentrant=self.reentrant)
        return self.head(x)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize(
    "shard", [shard_each, lambda model, mesh: fully_shard(model, mesh=mesh)], ids=["each", "whole"]
)
def test_activation_checkpointing_gathers_no_more_than_without(reentrant, shard):
    with simulate(2):
        dense = Checkpointed(reentrant).double()
        model = shard(copy.deepcopy(dense), mesh_of(2))
        data = sw.per_rank(lambda rank: DATA[rank].clone().requires_grad_())
        with counting() as ledger:
            model(data).sum().backward()
        mean_over_ranks(lambda x: dense(x.clone().requires_grad_()).sum())
        check_gradients(model, dense)
        assert all(isinstance(p, DTensor) for p in model.parameters())
        assert not any(g.gathered.are_wanted for g in groups(model))
        gathers = sum(e.step == "all-gather" for e in ledger.entries)
        if (
            shard is shard_each or not reentrant
        ):  # a reentrant checkpoint is a backward pass of its own, and reduces
            assert gathers == (5 if shard is shard_each else 1)


@pytest.mark.parametrize(
    "saves", [lambda op: True, lambda op: op is torch.ops.aten.addmm.default], ids=["all", "some"]
)
@pytest.mark.parametrize("inside", [True, False])
def test_selective_checkpointing_saves_what_the_model_computes(inside, saves):
    """What is gathered is not part of the checkpointed function, whose ops the recomputation counts."""

    def policy(ctx, op, *args, **kwargs):
        return saves(op)

    contexts = functools.partial(create_selective_checkpoint_contexts, policy)
    with simulate(2):
        torch.manual_seed(0)
        dense = nn.Sequential(
            *(nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 5)) for _ in range(3))
        ).double()
        model = copy.deepcopy(dense)
        if not inside:
            model = nn.Sequential(*(checkpoint_wrapper(layer, context_fn=contexts) for layer in model))
        for layer in model:
            fully_shard(layer, mesh=mesh_of(2))
        fully_shard(model, mesh=mesh_of(2))
        if inside:
            for i, layer in enumerate(model):
                model[i] = checkpoint_wrapper(layer, context_fn=contexts)
        for _ in range(2):  # the second one gathers ahead
            model.zero_grad()
            dense.zero_grad()
            model(own_data()).pow(2).sum().backward()
            mean_over_ranks(lambda x: dense(x).pow(2).sum())
            check_gradients(model, dense)


def test_a_list_of_modules_of_which_some_passes_call_only_some():
    with simulate(2):
        model = nn.ModuleDict({name: nn.Linear(5, 5).double() for name in ("body", "norm", "head")})
        fully_shard([model.norm, model.head], mesh=mesh_of(2), reshard_after_forward=True)

        class Whole(nn.Module):
            def __init__(self):
                super().__init__()
                self.parts = model

            def forward(self, x, names):
                for name in names.split():
                    part = self.parts[name]
                    x = checkpoint(part, x, use_reentrant=False) if name == "norm" else part(x)
                return x

        whole = fully_shard(Whole(), mesh=mesh_of(2), reshard_after_forward=True)
        for names in ("body norm head", "body norm", "body norm head"):
            with counting() as ledger:
                out = whole(own_data(), names)
                assert not any(g.gathered.are_wanted for g in groups(whole)), names
                out.sum().backward()
            assert ledger.collectives == 5  # the backward pass does not need the first layer's weight


@pytest.mark.parametrize("shard", [shard_each, ddp])
def test_frozen_parameters_and_freezing_later(shard):
    with simulate(2):
        dense, model = build("mlp"), build("mlp")
        for net in (dense, model):
            for name, p in net.named_parameters():
                p.requires_grad_("bias" in name)
        shard(model, mesh_of(2), reshard_after_forward=True)
        for _ in range(2):
            for net in (dense, model):
                net.zero_grad()
            model(own_data()).mean().backward()
            mean_over_ranks(lambda x: dense(x).mean())
            check_gradients(model, dense)
            assert not any(g.gathered.are_wanted for g in groups(model))
            for net in (dense, model):
                net.head.weight.requires_grad_(True)


@pytest.mark.parametrize("shard", [shard_each, ddp])
def test_state_dicts_and_parameters_that_are_initialized_late(shard):
    with simulate(2):
        model = shard(build("tied"), mesh_of(2))
        saved = model.state_dict()
        for assign in (False, True):
            other = shard(build("tied"), mesh_of(2))
            with torch.no_grad():
                for p in other.parameters():
                    p.zero_()
            other.load_state_dict(copy.deepcopy(saved), assign=assign)
            assert torch.equal(other(own_data()).ranks[1], model(own_data()).ranks[1])
        with torch.device("meta"):
            late = Mlp()
        shard(late, mesh_of(2))
        late.to_empty(device="cpu")
        for module in late.modules():
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()
        late.double()
        late(own_data()).sum().backward()
        assert all(full(p.grad).isfinite().all() for p in late.parameters())


@pytest.mark.parametrize("shard", [shard_each, ddp])
def test_clipping_equals_one_device(shard):
    with simulate(2):
        dense, model = build("odd"), shard(build("odd"), mesh_of(2))
        model(own_data()).mean().backward()
        mean_over_ranks(lambda x: dense(x).mean())
        norms = [nn.utils.clip_grad_norm_(net.parameters(), 0.01) for net in (model, dense)]
        torch.testing.assert_close(full(norms[0]), norms[1])
        check_gradients(model, dense)


def test_zero_replaces_the_parameters_of_the_optimizer():
    with simulate(2):
        model = build("tied")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        zero(model, optimizer, stage=2, mesh=mesh_of(2))
        for _ in range(2):
            with counting() as ledger:
                model(own_data()).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            assert [e.step for e in ledger.entries] == ["all-gather", "reduce-scatter"]
        assert all(s["momentum_buffer"].sharding.sharded for s in optimizer.state.values())
        with pytest.raises(RuntimeError, match=r"(?s)has made a step.*fix: "):
            zero(build("mlp"), optimizer, mesh=mesh_of(2))


def test_zero_replaces_the_parameters_that_an_optimizer_refers_to_by_their_list():
    with simulate(2):
        model, dense = build("mlp"), build("mlp")
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
        zero(model, optimizer, mesh=mesh_of(2))

        def closure():
            optimizer.zero_grad()
            loss = model(own_data()).pow(2).mean()
            loss.backward()
            return sum(loss.detach().ranks) / 2

        reference = torch.optim.LBFGS(dense.parameters(), lr=0.1, max_iter=3)

        def on_one_device():
            reference.zero_grad()
            loss = sum(dense(DATA[rank]).pow(2).mean() for rank in range(2)) / 2
            loss.backward()
            return loss

        optimizer.step(closure)
        reference.step(on_one_device)
        for p, q in zip(model.parameters(), dense.parameters(), strict=True):
            torch.testing.assert_close(full(p), q.detach())


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("shape", [(2, 2), (2, 3)])
def test_tensor_and_sequence_parallel_styles_beside_sharded_data(sequence, shape):
    with simulate(shape[0] * shape[1]):
        mesh, copies = mesh_of(*shape), shape[1]
        torch.manual_seed(0)
        dense = nn.Sequential(nn.LayerNorm(5), nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 5)).double()
        model, tp = copy.deepcopy(dense), mesh["tp"]
        plan = {"1": ColwiseParallel(), "3": RowwiseParallel()}
        if sequence:
            plan = {
                "0": SequenceParallel(sequence_dim=0),
                "1": ColwiseParallel(input_layouts=Shard(0)),
                "3": RowwiseParallel(output_layouts=Shard(0), use_local_output=False),
            }
        parallelize_module(model, tp, plan)
        fully_shard(model[1], mesh=mesh["dp"])
        fully_shard(model, mesh=mesh["dp"])
        x = own_data(copies)
        if sequence:
            x = DTensor.from_local(x, tp, [Replicate()]).redistribute(placements=[Shard(0)])
        out = model(x)
        if sequence:
            out = out.redistribute(placements=[Replicate()]).to_local()
        out.pow(2).mean().backward()
        mean_over_ranks(lambda x: dense(x).pow(2).mean())
        check_gradients(model, dense)


def test_tensor_parallel_programs_on_the_whole_mesh():
    with simulate(4):
        mesh = mesh_of(2, 2)
        dense = nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 5)).double()
        model = copy.deepcopy(dense)
        for module, weight, bias in ((model[0], Shard(0), Shard(0)), (model[2], Shard(1), Replicate())):
            for name, split in (("weight", weight), ("bias", bias)):
                value = getattr(module, name).detach()
                placed = sw.distribute_tensor(value, mesh, [Replicate(), split], src_data_rank=None)
                setattr(module, name, nn.Parameter(placed))
        fully_shard(model, mesh=mesh, dp_mesh_dims=DataParallelMeshDims(shard="dp"))
        x = sw.distribute_tensor(DATA.flatten(0, 1), mesh, [Shard(0), Replicate()])
        model(x).pow(2).mean().backward()
        dense(DATA.flatten(0, 1)).pow(2).mean().backward()
        check_gradients(model, dense)


@pytest.mark.parametrize("shape", [(1,), (1, 2), (2, 1)])
def test_axes_of_one_rank(shape):
    ranks = max(shape)
    with simulate(ranks):
        dense, model = build("mlp"), shard_each(build("mlp"), mesh_of(*shape))
        model(own_data()).sum().backward()
        sum(dense(DATA[rank]).sum() for rank in range(ranks)).div(ranks).backward()
        check_gradients(model, dense)


def test_autocast():
    with simulate(2):
        model = shard_each(build("mlp", torch.float32), mesh_of(2))
        with torch.autocast("cpu", torch.bfloat16):
            out = model(sw.per_rank(lambda rank: DATA[rank].float()))
        assert out.dtype is torch.bfloat16
        out.float().sum().backward()
        assert all(p.grad.dtype is torch.float32 for p in model.parameters())


class Branches(nn.Module):
    """Each rank uses one of two layers."""

    def __init__(self):
        super().__init__()
        self.branches = nn.ModuleList([nn.Linear(5, 3), nn.Linear(5, 3)])
        self.never = nn.Linear(5, 3)

    def forward(self, x, branch):
        return self.branches[branch](x)


def train_branches(freed):
    """The gradients of a model of which the ranks use different parameters."""
    rank = torch.distributed.get_rank()
    torch.manual_seed(0)
    model = fully_shard(Branches().double(), mesh=mesh_of(4), reshard_after_forward=freed)
    model.set_reduce_scatter_unused_params(True)
    for _ in range(2):
        model(DATA[rank % 2].clone(), rank % 2).sum().backward()
    return [full(p.grad) for p in model.parameters()]


@pytest.mark.processes
@pytest.mark.parametrize("freed", [False, True])
def test_ranks_that_use_different_parameters(workers, freed):
    torch.manual_seed(0)
    dense = Branches().double()
    for rank in range(4):
        dense(DATA[rank % 2], rank % 2).sum().div(4).mul(2).backward()
    for grads in workers.run(train_branches, freed):
        for g, p in zip(grads, dense.parameters(), strict=True):
            torch.testing.assert_close(g, torch.zeros_like(p) if p.grad is None else p.grad)


class _Spectral(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gain, self.filter = nn.Parameter(torch.ones(3)), nn.Parameter(torch.arange(30.0).view(5, 3, 2))

    def forward(self, x: Tensor) -> Tensor:
        squares = (
            torch.view_as_complex(self.filter).abs().square() + self.filter.view(torch.complex64)[..., 0].real
        )
        return x * (squares * self.gain).sum()


def test_gathered_parameters_can_be_viewed_as_complex_numbers() -> None:
    dense, x = _Spectral(), torch.ones(2)
    dense(x).sum().backward()
    with sw.simulate(3):
        model = fully_shard(_Spectral(), mesh=sw.init_device_mesh("cpu", (3,)))
        model(x).sum().backward()
        for p, want in zip(model.parameters(), dense.parameters(), strict=True):
            torch.testing.assert_close(p.grad.full_tensor().ranks[0], want.grad)
