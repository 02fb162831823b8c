"""Groups of fewer ranks after the forward pass, meshes of single parameters, and hooks of reductions."""

import copy

import pytest
import torch
import torch.distributed as dist
from tests.parallel.data.models import build, full
from tests.parallel.data.test_engine import groups, shard_each
from tests.parallel.data.test_programs import check_gradients, mesh_of
from torch import nn

import shardwise as sw
from shardwise import DTensor, Replicate, Shard, simulate
from shardwise.comm import counting
from shardwise.fsdp import (
    DataParallelMeshDims,
    GradientReductionHandle,
    MixedPrecisionPolicy,
    ShardPlacementResult,
    fully_shard,
)
from shardwise.parallel import explain, parallelize_module
from shardwise.tensor.errors import PlainTensorError

DATA = torch.randn(8, 4, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def own_data(copies=1):
    return sw.per_rank(lambda rank: DATA[rank // copies].clone().requires_grad_())


def mean_over_ranks(dense, ranks):
    sum(dense(DATA[rank]).pow(2).sum() for rank in range(ranks)).div(ranks).backward()


# ---- groups of fewer ranks


@pytest.mark.parametrize(
    ("shape", "size", "names"),
    [
        ((4,), 2, {}),
        ((6,), 3, {}),
        ((6,), 2, {}),
        ((2, 4), 2, {}),
        ((2, 2), 2, {"dp_mesh_dims": DataParallelMeshDims(shard=("dp", "tp"))}),
        ((2, 4), 2, {"dp_mesh_dims": DataParallelMeshDims(shard=("dp", "tp"))}),
        ((2, 3), 6, {"dp_mesh_dims": DataParallelMeshDims(shard=("dp", "tp"))}),
    ],
)
def test_backward_gathers_within_smaller_groups(shape, size, names):
    ranks = torch.Size(shape).numel()
    with simulate(ranks):
        dense, model = build("mlp"), build("mlp")
        shard_each(model, mesh_of(*shape), reshard_after_forward=size, **names)
        every = explain(model).groups
        for _ in range(2):
            for net in (dense, model):
                net.zero_grad()
            with counting() as ledger:
                model(own_data()).pow(2).sum().backward()
            mean_over_ranks(dense, ranks)
            check_gradients(model, dense)
            assert ledger.bytes == sum(g.bytes for g in every)
            assert not any(g.gathered.are_wanted for g in groups(model))
        total = sum(p.numel() * 8 for p in model.parameters())
        # each of the groups of `size` ranks gathers its parameters once
        assert sum(g.again.bytes for g in every) == total * (size - 1) * (ranks // size)


def test_smaller_groups_of_tensor_parallel_parameters_and_evaluation():
    with simulate(8):
        mesh = mesh_of(4, 2)
        model = build("tensor parallel")
        dense = copy.deepcopy(model)
        model.split(mesh["tp"])
        fully_shard(model, mesh=mesh["dp"], reshard_after_forward=2)
        with torch.no_grad():
            model(own_data(2))
        assert not any(g.gathered._kept for g in groups(model))
        model(own_data(2)).pow(2).sum().backward()
        mean_over_ranks(dense, 4)
        check_gradients(model, dense)
        model.set_reshard_after_forward(1)
        model(own_data(2))
        assert all(g.gathered.are_here for g in groups(model))
        model.set_reshard_after_forward(True)
        model(own_data(2))
        assert not any(g.gathered.are_here or g.gathered._kept for g in groups(model))


def test_sizes_of_smaller_groups_that_do_not_fit():
    with simulate(4):
        for size in (3, 8, 0):
            with pytest.raises(
                ValueError, match=f"(?s)reshard_after_forward={size}.*why: .*fix: Pass a divisor of 4"
            ):
                fully_shard(build("mlp"), mesh=mesh_of(4), reshard_after_forward=size)


# ---- meshes of single parameters


class Experts(nn.Module):
    """A dense layer and a stack of experts, all of which see all rows."""

    def __init__(self):
        super().__init__()
        self.dense = nn.Linear(5, 6)
        self.experts = nn.Parameter(torch.randn(4, 6, 3))
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x):
        return torch.einsum("bi,eio->bo", self.dense(x).tanh(), self.experts) * self.scale


class Info:
    """What torch's users return: an object that names the axes of a mesh."""

    def __init__(self, mesh, shard, replicate):
        self.mesh, self.shard_mesh_dim, self.replicate_mesh_dim = mesh, shard, replicate


@pytest.mark.parametrize("kind", ["mesh", "two axes", "info", "replicated"])
def test_parameters_on_meshes_of_their_own(kind):
    with simulate(4):
        torch.manual_seed(0)
        dense = Experts().double()
        model, mesh = copy.deepcopy(dense), mesh_of(4)
        pairs = sw.init_device_mesh("cpu", (2, 2), mesh_dim_names=("ep", "edp"))
        info = {
            "mesh": sw.init_device_mesh("cpu", (4,), mesh_dim_names=("flat",)),
            "two axes": pairs,
            "info": Info(pairs, 1, 0),
            "replicated": Info(pairs["edp"], None, 0),
        }[kind]

        def place(param):
            return ShardPlacementResult(Shard(1), info) if param.dim() == 3 else None

        fully_shard(model, mesh=mesh, shard_placement_fn=place)
        expected = {"mesh": "[4, 6:flat, 3]", "replicated": "[4, 6, 3]"}.get(kind, "[4, 6:edp, 3]")
        assert str(model.experts.sharding) == expected
        assert len(groups(model)) == 2
        data = own_data()
        with counting() as ledger:
            model(data).pow(2).sum().backward()
        assert ledger.bytes == explain(model).bytes_per_rank * 4
        if kind == "replicated":  # averaged over the axis of its mesh only
            assert model.experts.grad.sharding is model.experts.sharding
            return
        mean_over_ranks(dense, 4)
        check_gradients(model, dense)


def test_experts_split_over_an_axis_of_the_root_mesh_beside_flattened_data():
    """Expert parallelism: data are split over both axes, and experts over the first, whose ranks have their own."""
    with simulate(4):
        torch.manual_seed(0)
        dense = Experts().double()
        model = copy.deepcopy(dense)
        mesh = sw.init_device_mesh("cpu", (2, 2), mesh_dim_names=("ep", "edp"))
        flat = mesh._flatten("dp")
        model.experts = nn.Parameter(
            sw.distribute_tensor(model.experts.detach(), mesh["ep"], [Shard(0)], src_data_rank=None)
        )

        def forward(x):
            hidden = model.dense(x).tanh()
            # every rank of ep computes its experts for the rows of all of them
            rows = DTensor.from_local(hidden, mesh["ep"], [Shard(0)])
            out = torch.einsum("bi,eio->bo", rows, model.experts)
            return out.redistribute(placements=[Shard(0)]).to_local() * model.scale

        model.forward = forward
        fully_shard(
            model,
            mesh=flat,
            shard_placement_fn=lambda p: (
                ShardPlacementResult(Shard(1), mesh["edp"]) if p.dim() == 3 else None
            ),
        )
        assert str(model.experts.sharding) == "[4:ep, 6:edp, 3]"
        assert len(groups(model)) == 2
        next(g for g in groups(model) if len(g.slots) == 1).reduction.divisor = 4.0
        model(own_data()).pow(2).sum().backward()
        mean_over_ranks(dense, 4)
        check_gradients(model, dense)


# ---- hooks, dtypes of single parameters, and accumulated gradients


@pytest.mark.parametrize("factor", [None, 4.0])
def test_a_hook_of_reduced_gradients(factor):
    with simulate(2):
        dense, model = build("mlp"), shard_each(build("mlp"), mesh_of(2))
        seen = []

        def double(flat):
            seen.append(flat.dim())
            flat.mul_(2)

        for module in (*model.layers, model):
            module.set_all_reduce_hook(double)
            if factor is not None:
                module.set_gradient_divide_factor(factor)
        model(own_data()).pow(2).sum().backward()
        assert seen == [1] * 4
        mean_over_ranks(dense, 2)
        for p in dense.parameters():
            p.grad *= 2 if factor is None else 1
        check_gradients(model, dense)


def all_reduce_by_hook():
    """HSDP by hand: one axis splits parameters, a hook averages over the other."""
    mesh = mesh_of(2, 2)
    model = shard_each(build("odd"), mesh["tp"])
    group = mesh.get_group("dp")

    def average(flat):
        torch.distributed.all_reduce(flat, group=group)
        flat.div_(2)

    for module in (*model.layers, model):
        module.set_all_reduce_hook(average)
    for _ in range(2):
        model(DATA[torch.distributed.get_rank()]).pow(2).sum().backward()
    return [None if p.grad is None else full(p.grad) for p in model.parameters()]


@pytest.mark.processes
def test_a_hook_that_communicates(workers):
    dense = build("odd")
    for _ in range(2):
        mean_over_ranks(dense, 4)
    for grads in workers.run(all_reduce_by_hook):
        for g, p in zip(grads, dense.parameters(), strict=True):
            assert (g is None) == (p.grad is None)
            if g is not None:
                torch.testing.assert_close(g, p.grad)


def test_parameters_that_keep_their_dtype():
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16, param_dtype_override_fn=lambda p: p.dtype if p.dim() == 1 else None
    )
    with simulate(2):
        model = fully_shard(nn.Linear(5, 6), mesh=mesh_of(2), mp_policy=policy)
        dtypes = []
        model.forward = lambda x: (
            dtypes.append((model.weight.dtype, model.bias.dtype))
            or ((x @ model.weight.t()).float() + model.bias)
        )
        model(sw.per_rank(lambda rank: torch.ones(2, 5))).sum().backward()
        assert dtypes == [(torch.bfloat16, torch.float32)]
        assert {p.grad.dtype for p in model.parameters()} == {torch.float32}
        wrong = MixedPrecisionPolicy(param_dtype_override_fn=lambda p: torch.float16)
        with pytest.raises(ValueError, match=r"(?s)returned torch.float16.*why: .*fix: "):
            fully_shard(nn.Linear(5, 6), mesh=mesh_of(2), mp_policy=wrong)


def test_gradients_are_reduced_when_a_backward_pass_is_finalized():
    with simulate(2):
        dense, model = build("mlp"), shard_each(build("mlp"), mesh_of(2))
        model.set_manual_backward_finalization(True)
        model.set_requires_gradient_sync(False)
        for _ in range(2):
            model(own_data()).pow(2).sum().backward()
            mean_over_ranks(dense, 2)
        assert all(p.grad is None for p in model.parameters())
        model.set_requires_gradient_sync(True)
        handle = model.finalize_backward(async_op=True)
        assert isinstance(handle, GradientReductionHandle)
        handle.wait()
        check_gradients(model, dense)
        assert model.finalize_backward() is None
        model.set_keep_unsharded_storage(True)
        model.set_reduce_scatter_max_input_buffers(3)
        with pytest.raises(
            ValueError, match=r"(?s)max_input_buffers must be a positive int, got 0.*why: .*fix: "
        ):
            model.set_reduce_scatter_max_input_buffers(0)


class _Scaled(nn.Module):
    """Linear layers, a buffer between them, and a second argument."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 9), nn.Linear(9, 6)
        self.register_buffer("scale", torch.arange(1.0, 10.0) / 5)

    def forward(self, x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return self.down((self.up(x) + bias).tanh() * self.scale)


@pytest.mark.parametrize("own_rows", [False, True])
def test_buffers_and_differentiable_inputs_beside_tensor_parallelism_on_a_slice(own_rows):
    torch.manual_seed(0)
    dense, x = _Scaled().double(), torch.randn(4, 6, dtype=torch.float64)
    bias = torch.randn(9, dtype=torch.float64)
    model, plain = copy.deepcopy(dense), bias.clone().requires_grad_()
    dense(x, plain).square().mean().backward()
    with simulate(6):
        mesh = sw.init_device_mesh("cpu", (2, 3), mesh_dim_names=("dp", "tp"))
        parallelize_module(model, mesh["tp"], {"up": "colwise", "down": "rowwise"})
        fully_shard(model, mesh=mesh["dp"])
        given = bias.clone().requires_grad_()
        if own_rows:
            data = sw.per_rank(lambda rank: x.chunk(2)[rank // 3])
            wrong = sw.per_rank(lambda rank: x.chunk(2)[rank % 2])
            with pytest.raises(PlainTensorError, match="differs between ranks"):
                model(wrong, bias)
        else:
            data = sw.distribute_tensor(x, mesh, [Shard(0), Replicate()])
        model(data, bias if own_rows else given).square().mean().backward()
        for p, q in zip(model.parameters(), dense.parameters(), strict=True):
            torch.testing.assert_close(p.grad.full_tensor().ranks[0], q.grad, rtol=1e-9, atol=1e-12)
        if not own_rows:
            torch.testing.assert_close(given.grad, plain.grad, rtol=1e-9, atol=1e-12)


# ---- data axes that the program names


def train_on_named_axes(sizes, names, dims, split):
    """On one of four ranks: whether parameters after steps on data of each rank are those of averaged gradients.

    The mesh is made of the axis of another one; parameters and data are DTensors on all of it, and data that differ are
    declared to be replicated, as programs for torch have it.
    """
    world = sw.init_device_mesh("cpu", (4,), mesh_dim_names=("world",))
    mesh = world._unflatten(0, sizes, names)
    torch.manual_seed(0)
    dense = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    model = copy.deepcopy(dense)

    def partition(name, module, mesh):
        for n, p in list(module.named_parameters(recurse=False)):
            placements = [Replicate()] * mesh.ndim
            if split and n == "weight":
                placements[-1] = Shard(0 if name == "0" else 1)
            module.register_parameter(n, nn.Parameter(sw.distribute_tensor(p, mesh, placements)))

    sw.distribute_module(model, mesh, partition)
    fully_shard(model, mesh=mesh, dp_mesh_dims=dims)
    mine = dist.get_rank() // (2 if split else 1)
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in (dense, model)]
    for _ in range(2):
        for optimizer in optimizers:
            optimizer.zero_grad()
        mean_over_ranks(dense, 2 if split else 4)
        data = DTensor.from_local(DATA[mine], mesh, [Replicate()] * mesh.ndim, run_check=False)
        model(data).pow(2).sum().backward()
        for optimizer in optimizers:
            optimizer.step()
    pairs = zip(model.parameters(), dense.parameters(), strict=True)
    return all(torch.allclose(p.full_tensor(), q) for p, q in pairs)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("sizes", "names", "dims", "split"),
    [
        ((4,), ("dp",), DataParallelMeshDims(shard="dp"), False),
        ((4,), ("dp",), DataParallelMeshDims(replicate="dp"), False),
        ((2, 2), ("pod", "dp"), DataParallelMeshDims(shard="dp", replicate="pod"), False),
        ((2, 2), ("dp", "tp"), DataParallelMeshDims(shard="dp"), True),
    ],
)
def test_data_differ_along_the_axes_that_are_named(workers, sizes, names, dims, split):
    assert all(workers.run(train_on_named_axes, sizes, names, dims, split))


def test_named_axes_that_the_mesh_does_not_have():
    with (
        simulate(2),
        pytest.raises(ValueError, match=r"(?s)cp not found in mesh.mesh_dim_names.*why: .*fix: "),
    ):
        fully_shard(nn.Linear(2, 2), mesh=mesh_of(2), dp_mesh_dims=DataParallelMeshDims(shard=("dp", "cp")))
