"""Data-parallel training equals training on one device, for models, strategies and meshes that are drawn."""

import copy
import math
import os
import random
import sys

import pytest
import torch
from tests.parallel.data.models import (
    CLASSES,
    MODELS,
    ROWS,
    WIDTH,
    batches,
    build,
    full,
    loss_of,
    optimizer_of,
    train_dense,
)
from torch import nn

import shardwise as sw
from shardwise import DTensor, PerRank, Shard, simulate
from shardwise.comm import counting
from shardwise.fsdp import (
    CPUOffloadPolicy,
    DataParallelMeshDims,
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
    share_comm_ctx,
)
from shardwise.parallel import explain, replicate, zero


def shard_each(model, mesh, **options):
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def shard_lists(model, mesh):
    fully_shard(model.layers, mesh=mesh)
    fully_shard([model.head], mesh=mesh)
    return fully_shard(model, mesh=mesh)


STRATEGIES = {
    "each": shard_each,
    "whole": lambda model, mesh: fully_shard(model, mesh=mesh),
    "lists": shard_lists,
    "kept": lambda model, mesh: shard_each(model, mesh, reshard_after_forward=False),
    "freed": lambda model, mesh: shard_each(model, mesh, reshard_after_forward=True),
    "within": lambda model, mesh: shard_each(
        model, mesh, reshard_after_forward=3 if mesh.size(-1) == 3 else 2
    ),
    "last dim": lambda model, mesh: shard_each(model, mesh, shard_placement_fn=lambda p: Shard(p.dim() - 1)),
    "offload": lambda model, mesh: shard_each(model, mesh, offload_policy=CPUOffloadPolicy()),
    "replicate": lambda model, mesh: replicate(model, mesh=mesh, bucket_cap_mb=0.0003),
    "ddp": lambda model, mesh: replicate(model, None, device_mesh=mesh, static_graph=False),
    "zero 1": lambda model, mesh, optimizer: zero(model, optimizer, stage=1, mesh=mesh),
    "zero 2": lambda model, mesh, optimizer: zero(model, optimizer, stage=2, mesh=mesh),
}
MESHES = [(2,), (3,), (4,), (2, 2)]


def prepare(name, strategy, shape, on_whole_mesh=False):
    """A data-parallel model, its optimizer, its data mesh, and how many ranks have the same data."""
    model = build(name)
    tensor_parallel = name == "tensor parallel"
    names = ("pod", "dp", "tp")[-len(shape) :] if tensor_parallel else ("pod", "dp")[-len(shape) :]
    mesh = sw.init_device_mesh("cpu", shape, mesh_dim_names=names)
    data = mesh
    if tensor_parallel:
        model.split(mesh["tp"])
        data = mesh[names[:-1]] if len(names) > 2 else mesh["dp"]
    optimizer = None
    if strategy.startswith("zero"):
        optimizer = optimizer_of(model.parameters())
        STRATEGIES[strategy](model, data, optimizer)
    else:
        STRATEGIES[strategy](model, data)
        optimizer = optimizer_of(model.parameters())
    return model, optimizer, data, math.prod(shape) // data.size()


def value_of(loss, ranks, copies):
    """The mean of a loss over the ranks; on real processes that of this rank."""
    if isinstance(loss, DTensor):
        return float(full(loss))
    return (
        float(sum(loss.detach().ranks) / ranks / copies)
        if isinstance(loss, PerRank)
        else float(loss.detach())
    )


def train(name, strategy, shape, steps, micro, how="sync"):
    """Losses, the gradients of the first step and the parameters after the last, on a simulation or on processes."""
    model, optimizer, mesh, copies = prepare(name, strategy, shape)
    ranks, losses, grads = mesh.size(), [], {}
    data = iter(batches(ranks, steps * micro))
    for step in range(steps):
        for m in range(micro):
            x, y = next(data)
            last = m == micro - 1
            if how == "no sync":
                model.set_requires_gradient_sync(last)
            elif how == "no all-reduce":
                model.set_requires_all_reduce(last)
            if how == "whole mesh":
                xs, ys = (
                    sw.distribute_tensor(t.flatten(0, 1), mesh, whole_mesh_placements(mesh)) for t in (x, y)
                )
            else:
                xs, ys = (sw.per_rank(lambda rank, t=t: t[rank // copies]) for t in (x, y))
            loss = loss_of(model, xs, ys) / micro
            loss.backward()
            losses.append(value_of(loss, ranks, copies))
        if step == 0:
            grads = {n: None if p.grad is None else full(p.grad) for n, p in model.named_parameters()}
        optimizer.step()
        optimizer.zero_grad()
    return losses, grads, {n: full(p) for n, p in model.named_parameters()}


def whole_mesh_placements(mesh):
    return [Shard(0)] * mesh.ndim


def check(found, expected, losses=True):
    """Compare what two trainings returned."""
    tolerance = {"rtol": 1e-9, "atol": 1e-9}
    if losses:
        torch.testing.assert_close(torch.tensor(found[0]), torch.tensor(expected[0]), **tolerance)
    for mine, theirs in zip(found[1:], expected[1:], strict=True):
        assert mine.keys() == theirs.keys()
        for name, value in theirs.items():
            assert (mine[name] is None) == (value is None), name
            if value is not None:
                torch.testing.assert_close(
                    mine[name], value, **tolerance, msg=lambda m, name=name: f"{name}: {m}"
                )


def programs(count, seed):
    """Drawn combinations of model, strategy, mesh, micro-batches and how they are accumulated."""
    rng, out = random.Random(seed), []
    names = list(MODELS) * count
    for name in names[:count]:
        shape = rng.choice(MESHES) if name != "tensor parallel" else rng.choice([(2, 2), (2, 3), (2, 2, 2)])
        strategy = rng.choice(list(STRATEGIES))
        how = rng.choice(["sync", "no sync", "no all-reduce"])
        if name == "tensor parallel" and strategy == "ddp":
            strategy = "replicate"
        out.append((name, strategy, shape, rng.choice([1, 2, 3]), how))
    return out


DEEP = os.environ.get("SHARDWISE_DEEP") == "1"


@pytest.mark.parametrize(("name", "strategy", "shape", "micro", "how"), programs(400 if DEEP else 36, seed=1))
def test_training_equals_one_device(name, strategy, shape, micro, how):
    steps = 5 if DEEP else 3
    with simulate(math.prod(shape)):
        found = train(name, strategy, shape, steps, micro, how)
        ranks = math.prod(shape) // (shape[-1] if name == "tensor parallel" else 1)
    check(found, train_dense(name, ranks, steps, micro))


@pytest.mark.parametrize("name", ["mlp", "odd", "tied"])
@pytest.mark.parametrize("strategy", ["each", "kept", "replicate", "zero 2"])
def test_programs_whose_data_are_dtensors_on_the_whole_mesh(name, strategy):
    with simulate(3):
        found = train(name, strategy, (3,), 3, 1, "whole mesh")
    check(found, train_dense(name, 3, 3, 1))


@pytest.mark.parametrize("name", ["mlp", "recurrent"])
def test_partial_sums_of_several_buckets(name, monkeypatch):
    monkeypatch.setattr(sys.modules["shardwise.parallel.data.zero"], "_BUCKET_BYTES", 300)
    with simulate(4):
        found = train(name, "zero 2", (2, 2), 2, 3, "no all-reduce")
    check(found, train_dense(name, 4, 2, 3))


def train_on_processes(name, strategy, shape, how):
    return train(name, strategy, shape, 3, 2, how)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("name", "strategy", "shape", "how"),
    [
        ("mlp", "each", (4,), "sync"),
        ("odd", "lists", (2, 2), "no all-reduce"),
        ("tied", "freed", (4,), "no sync"),
        ("attention", "whole", (4,), "sync"),
        ("recurrent", "zero 2", (4,), "sync"),
        ("tensor parallel", "each", (2, 2), "sync"),
        ("mlp", "replicate", (4,), "no sync"),
        ("mlp", "within", (4,), "sync"),
    ],
)
def test_training_on_real_processes(workers, name, strategy, shape, how):
    real = workers.run(train_on_processes, name, strategy, shape, how)
    with simulate(4):
        simulated = train(name, strategy, shape, 3, 2, how)
    for found in real:
        check(found, simulated, losses=False)


# ---- bytes


@pytest.mark.parametrize("shape", [(4,), (3,), (2, 2)])
@pytest.mark.parametrize("strategy", ["each", "freed", "kept", "whole", "replicate", "zero 1", "zero 2"])
def test_bytes_per_step_are_predicted_and_equal_the_lower_bound(strategy, shape):
    ranks = math.prod(shape)
    with simulate(ranks):
        model, optimizer, _, _ = prepare("mlp", strategy, shape)
        predicted = explain(model)
        size = {n: p.numel() * 8 for n, p in model.named_parameters()}
        x, y = batches(ranks, 1)[0]
        # inputs that need gradients: otherwise the first layer is not gathered in the backward pass
        xs, ys = (sw.per_rank(lambda rank, t=t: t[rank].clone().requires_grad_()) for t in (x, y))
        for _ in range(2):  # the second step gathers ahead
            with counting() as ledger:
                loss_of(model, xs, ys).backward()
            assert ledger.bytes == predicted.bytes_per_rank * ranks
            assert ledger.collectives == predicted.collectives
            optimizer.step()
            optimizer.zero_grad()
    total, n = sum(size.values()), shape[-1]
    layers = sum(b for name, b in size.items() if name.startswith("layers"))
    again = {"each": layers, "freed": total}.get(strategy, 0)
    copies = ranks // n  # of a group that gathers
    gathers = 0 if strategy == "replicate" else (total + again) * (n - 1) * copies
    scatter = total * (n - 1) * copies
    across = 2 * total * (copies - 1)  # an all-reduce of the blocks over the axis that replicates
    if strategy == "replicate":
        scatter, across = 2 * total * (ranks - 1), 0
    assert predicted.bytes_per_rank * ranks == pytest.approx(gathers + scatter + across)


def test_a_backward_pass_gathers_only_what_it_needs():
    with simulate(2):
        model, _, _, _ = prepare("mlp", "each", (2,))
        most = explain(model)
        for _ in range(2):
            with counting() as ledger:
                model(inputs()).sum().backward()
            found = explain(model)
            assert ledger.bytes == found.bytes_per_rank * 2
            # without gradients of the inputs, the weight of the first layer is not needed
            first = next(g for g in most.groups if "7:" in str(g))
            assert found.bytes_per_rank * 2 == most.bytes_per_rank * 2 - first.gather.bytes
        assert "1 × reduce" in str(found)


def test_a_deferred_all_reduce_sends_its_bytes_once():
    sent = {}
    with simulate(4):
        for how, micro in [("sync", 1), ("sync", 4), ("no all-reduce", 4)]:
            model, _, _, _ = prepare("mlp", "whole", (2, 2))
            with counting() as ledger:
                for m, (x, y) in enumerate(batches(4, micro)):
                    if how == "no all-reduce":
                        model.set_requires_all_reduce(m == micro - 1)
                    loss_of(model, *(sw.per_rank(lambda rank, t=t: t[rank]) for t in (x, y))).backward()
            sent[how, micro] = sum(e.bytes for e in ledger.entries if e.step == "all-reduce")
    assert sent["sync", 4] == 4 * sent["sync", 1]
    assert sent["no all-reduce", 4] == sent["sync", 1] > 0


# ---- precision


@pytest.mark.parametrize("reduce_dtype", [None, torch.float32])
@pytest.mark.parametrize("how", ["sync", "no sync"])
def test_compute_in_bfloat16_with_master_weights(reduce_dtype, how):
    """The same rounding on one device: parameters cast, gradients of each rank cast and averaged."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype)
    dense = build("recurrent", torch.float32)
    grads = {n: torch.zeros_like(p) for n, p in dense.named_parameters()}
    data = [tuple(t.float() for t in pair) for pair in batches(2, 2)]
    with simulate(2):
        model = build("recurrent", torch.float32)
        mesh = sw.init_device_mesh("cpu", (2,))
        shard_each(model, mesh, mp_policy=policy)
        for m, (x, y) in enumerate(data):  # the second is the first to use `sometimes`
            if how == "no sync":
                model.set_requires_gradient_sync(m == 1)
            loss_of(model, *(sw.per_rank(lambda rank, t=t: t[rank]) for t in (x, y))).backward()
        assert all(p.dtype is torch.float32 for p in model.parameters())
        found = {n: full(p.grad) for n, p in model.named_parameters()}
    for m, (x, y) in enumerate(data):
        for rank in range(2):
            low = build("recurrent", torch.float32).bfloat16()
            low.calls = m
            loss_of(lambda t, low=low: low(t.bfloat16()).float(), x[rank], y[rank]).backward()
            for n, p in low.named_parameters():
                if p.grad is not None:
                    grads[n] += p.grad.float() / 2
    for n, g in grads.items():
        torch.testing.assert_close(
            found[n],
            g,
            rtol=2e-2 if reduce_dtype is None else 1e-6,
            atol=1e-3 if reduce_dtype is None else 1e-6,
        )


# ---- states


def inputs(ranks=2, rows=ROWS):
    return sw.per_rank(lambda rank: torch.full((rows, WIDTH), rank + 1.0, dtype=torch.float64))


def test_modules_have_stored_parameters_outside_of_calls():
    with simulate(2):
        model, _, mesh, _ = prepare("mlp", "each", (2,))
        seen = []
        model.layers[0].register_forward_hook(lambda m, a, out: seen.append(type(m.weight)))
        assert isinstance(model, FSDPModule)
        assert type(model).__name__ == "FSDPMlp"
        out = model(inputs())
        assert seen == [PerRank]
        assert all(isinstance(p, DTensor) for p in model.parameters())
        out.sum().backward()
        assert all(isinstance(p, DTensor) and p.grad is not None for p in model.parameters())
        assert not any(g.gathered.are_wanted for g in groups(model))
        with pytest.raises(RuntimeError, match=r"(?s)called twice for a FSDPMlp.*why.*fix"):
            fully_shard(model, mesh=mesh)


def groups(model):
    return [g for m in model.modules() if (s := fully_shard.state(m)) is not None for g in s.groups]


def test_unshard_and_reshard():
    with simulate(2):
        model, _, _, _ = prepare("mlp", "whole", (2,))
        handle = model.unshard(async_op=True)
        assert isinstance(model.head.weight, DTensor)
        handle.wait()
        assert isinstance(model.head.weight, PerRank)
        with counting() as ledger:
            model(inputs())
        assert ledger.collectives == 0
        model.reshard()
        assert isinstance(model.head.weight, DTensor)
        assert model.unshard() is None
        model.reshard()


@pytest.mark.parametrize("strategy", ["each", "whole", "replicate"])
def test_a_backward_pass_ends_unshard(strategy):
    """`model.unshard()` before each step begins the first gather early; gradients and clipping are those without it."""
    with simulate(2):
        model, _, _, _ = prepare("mlp", strategy, (2,))
        expected, _, _, _ = prepare("mlp", strategy, (2,))
        for _ in range(2):
            for module in model.modules():
                if isinstance(module, FSDPModule):
                    module.unshard()
            for net in (model, expected):
                net(inputs()).pow(2).sum().backward()
                assert all(isinstance(p, DTensor) for p in net.parameters())
            norms = [full(nn.utils.clip_grad_norm_(net.parameters(), 0.1)) for net in (model, expected)]
            assert norms[0] == norms[1] > 0
            for p, q in zip(model.parameters(), expected.parameters(), strict=True):
                assert torch.equal(full(p.grad), full(q.grad))


def test_what_is_done_to_parameters_after_unshard_is_done_to_the_stored_ones():
    with simulate(2):
        dense, (model, _, _, _) = build("mlp"), prepare("mlp", "each", (2,))

        def unshard():
            for module in (*model.layers, model):
                module.unshard()
            assert not any(isinstance(p, DTensor) for p in model.parameters())

        model(inputs()).sum().backward()
        unshard()
        model.zero_grad()
        assert not any(isinstance(p, DTensor) for p in model.parameters())  # still gathered
        copied = copy.deepcopy(model)
        model.float()
        assert {(type(p), p.dtype, p.grad) for p in model.parameters()} == {(DTensor, torch.float32, None)}
        unshard()
        model.requires_grad_(False)
        assert {(type(p), p.requires_grad) for p in model.parameters()} == {(DTensor, False)}
        assert all(isinstance(p, DTensor) and p.requires_grad for p in copied.parameters())
        for net in (dense, copied):
            net.zero_grad()
        copied(inputs()).sum().backward()
        for rank in range(2):
            (dense(inputs().ranks[rank]).sum() / 2).backward()
        for p, q in zip(copied.parameters(), dense.parameters(), strict=True):
            torch.testing.assert_close(full(p.grad), q.grad)


def test_state_dicts_are_those_of_stored_parameters():
    with simulate(2):
        model, _, _, _ = prepare("mlp", "whole", (2,))
        model.unshard()
        state = model.state_dict()
        assert all(isinstance(t, DTensor) for t in state.values())
        before = full(state["head.weight"]).clone()
        model.unshard()
        model.load_state_dict({name: 2 * t for name, t in state.items()})
        assert torch.equal(full(model.head.weight), 2 * before)


def test_a_deep_copy_is_another_model():
    with simulate(2):
        model, optimizer, _, _ = prepare("tied", "each", (2,))
        before = [full(p) for p in model.parameters()]
        average = copy.deepcopy(model)
        loss_of(model, inputs(), torch.zeros(ROWS, CLASSES, dtype=torch.float64)).backward()
        optimizer.step()
        assert all(torch.equal(a, full(b)) for a, b in zip(before, average.parameters(), strict=True))
        assert all(p.grad is None for p in average.parameters())
        assert average.layers[0].weight is average.layers[1].weight
        average(inputs()).sum().backward()
        assert all(p.grad is not None for p in average.parameters())
        ema = torch.optim.swa_utils.AveragedModel(model)
        ema.update_parameters(model)
        assert ema(inputs()).shape == (ROWS, CLASSES)


class Generator(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH)])
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.head(self.layers[0](x))

    def generate(self, x, count):
        for _ in range(count):
            x = self.forward(x)
        return self.head.weight @ x.t()


def test_methods_other_than_forward_and_evaluation():
    with simulate(2):
        dense = Generator().double()
        model = shard_each(copy.deepcopy(dense), sw.init_device_mesh("cpu", (2,)))
        register_fsdp_forward_method(model, "generate")
        register_fsdp_forward_method(dense, "generate")  # not data-parallel: without effect
        x = inputs()
        for mode in (torch.no_grad, torch.inference_mode, torch.enable_grad):
            with mode():
                out = model.generate(x, 2)
                for r, found in enumerate(out.ranks):
                    torch.testing.assert_close(found, dense.generate(x.ranks[r], 2))
        other = copy.deepcopy(model)
        assert torch.equal(other.generate(x, 1).ranks[0], model.generate(x, 1).ranks[0])
        with pytest.raises(ValueError, match=r"(?s)a method walk.*fix"):
            register_fsdp_forward_method(model, "walk")
        share_comm_ctx([model, other])


@pytest.mark.parametrize("dtype", [None, torch.float32])
def test_parameters_that_inference_gathered_are_trained_with(dtype):
    """The outermost module keeps its parameters gathered: evaluation comes first, and the same blocks are used again."""
    with simulate(2):
        model = build("mlp")
        fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=dtype))
        other = copy.deepcopy(model)
        x = inputs()
        with torch.inference_mode():
            model(x)
        for m in (model, other):
            m(x).pow(2).sum().backward()
        for p, q in zip(model.parameters(), other.parameters(), strict=True):
            assert torch.equal(full(p.grad), full(q.grad))


def test_an_exception_in_the_middle_of_a_step_leaves_the_model_ready():
    with simulate(2):
        expected = train("mlp", "freed", (2,), 1, 1)
        model, optimizer, _, _ = prepare("mlp", "freed", (2,))
        fail = {"forward": True, "backward": False}

        def in_forward(module, args):
            if fail["forward"]:
                raise KeyError("forward")

        class Fail(torch.autograd.Function):
            @staticmethod
            def forward(ctx, t):
                return t.view_as(t)

            @staticmethod
            def backward(ctx, g):
                if fail["backward"]:
                    raise KeyError("backward")
                return g

        model.layers[1].register_forward_pre_hook(in_forward)
        model.layers[0].register_forward_hook(
            lambda m, a, out: PerRank({r: Fail.apply(t) for r, t in out._blocks.items()})
        )
        x, y = batches(2, 1)[0]
        xs, ys = (sw.per_rank(lambda rank, t=t: t[rank]) for t in (x, y))
        with pytest.raises(KeyError, match="forward"):
            model(xs)
        assert all(isinstance(p, DTensor) for p in model.parameters())
        fail |= {"forward": False, "backward": True}
        with pytest.raises(KeyError, match="backward"):
            loss_of(model, xs, ys).backward()
        fail["backward"] = False
        model.reset_iter_state()
        optimizer.zero_grad()
        loss_of(model, xs, ys).backward()
        for n, p in model.named_parameters():
            torch.testing.assert_close(full(p.grad), expected[1][n])


def test_a_parameter_that_changes_between_forward_and_backward_is_an_error():
    with simulate(2):
        model, optimizer, _, _ = prepare("mlp", "freed", (2,))
        loss_of(model, inputs(), torch.zeros(ROWS, CLASSES, dtype=torch.float64)).backward()
        loss = loss_of(model, inputs(), torch.zeros(ROWS, CLASSES, dtype=torch.float64))
        optimizer.step()
        with pytest.raises(RuntimeError, match=r"(?s)modified by an inplace operation.*fix"):
            loss.backward()


def test_gradients_of_inputs_and_second_derivatives_of_them():
    with simulate(2):
        dense = build("mlp")
        model, _, _, _ = prepare("mlp", "freed", (2,))
        x = torch.randn(ROWS, WIDTH, dtype=torch.float64)

        def penalty(net, x):
            (g,) = torch.autograd.grad(net(x).sum(), [x], create_graph=True)
            return g.pow(2).sum()

        penalty(dense, x.clone().requires_grad_()).backward()
        xs = sw.per_rank(lambda rank: x.clone().requires_grad_())
        penalty(model, xs).backward()
        for (n, p), q in zip(model.named_parameters(), dense.parameters(), strict=True):
            assert (p.grad is None) == (q.grad is None), n
            if q.grad is not None:
                torch.testing.assert_close(full(p.grad), q.grad)


def test_an_internal_result_may_be_used_outside_of_the_module():
    """The backward pass reaches the module by another way than its output: parameters are gathered when they are needed."""
    with simulate(2):
        dense = build("mlp")
        model, _, _, _ = prepare("mlp", "freed", (2,))
        losses = {}
        for key, net in [("dense", dense), ("sharded", model)]:
            net.layers[1].register_forward_hook(
                lambda m, a, out, key=key: losses.__setitem__(key, out.pow(2).mean())
            )
        x = torch.randn(ROWS, WIDTH, dtype=torch.float64)
        dense(x)
        model(sw.per_rank(lambda rank: x))
        losses["dense"].backward()
        losses["sharded"].backward()
        for p, q in zip(model.layers[:2].parameters(), dense.layers[:2].parameters(), strict=True):
            torch.testing.assert_close(full(p.grad), q.grad)


# ---- options and errors


def test_data_axes_by_name_and_tensor_parallel_on_the_same_axis():
    expected = train_dense("tensor parallel", 2, 1, 1)
    with simulate(4):
        mesh = sw.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        model = build("tensor parallel")
        model.split(mesh["tp"])
        fully_shard(model, mesh=mesh, dp_mesh_dims=DataParallelMeshDims(shard="dp"))
        assert str(model.layers[0].weight.sharding) == "[7:tp,dp, 5]"
        assert str(model.head.weight.sharding) == "[3:dp, 6]"
        x, y = batches(2, 1)[0]
        loss_of(model, *(sw.per_rank(lambda rank, t=t: t[rank // 2]) for t in (x, y))).backward()
        for n, p in model.named_parameters():
            torch.testing.assert_close(full(p.grad), expected[1][n])
    with simulate(2):  # every rank has the same data: the parameters that tp splits stay as they are
        mesh = sw.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        model = build("tensor parallel")
        model.split(mesh)
        shard_each(model, mesh)
        assert str(model.layers[0].weight.sharding) == "[7:tp, 5]"
        rows = [t.flatten(0, 1) for t in (x, y)]
        loss_of(model, *(sw.per_rank(lambda rank, t=t: t) for t in rows)).backward()
        for n, p in model.named_parameters():
            torch.testing.assert_close(full(p.grad), expected[1][n])


def test_gradient_divide_factor_ignored_and_unused_parameters():
    with simulate(2):
        mesh = sw.init_device_mesh("cpu", (2,))
        model = build("odd")
        model.row.requires_grad_(False)
        model.row.tag = "kept"
        fully_shard(model, mesh=mesh, ignored_params={model.row})
        assert type(model.row) is nn.Parameter
        grads = []
        for factor in (2.0, 1.0):
            model.set_gradient_divide_factor(factor)
            model(inputs()).sum().backward()
            grads.append(full(model.head.weight.grad))
            assert model.unused.grad is None
            model.zero_grad()
        torch.testing.assert_close(2 * grads[0], grads[1])
        model.set_reduce_scatter_unused_params(True)
        model(inputs()).sum().backward()
        assert full(model.unused.grad).tolist() == [0.0] * 3
        assert model.frozen.grad is None


def test_accepted_options():
    with simulate(2):
        model, _, _, _ = prepare("mlp", "each", (2,))
        model.set_modules_to_forward_prefetch([model.layers[0]])
        model.layers[1].set_modules_to_backward_prefetch([model.layers[0]])
        model.set_reshard_after_forward(False)
        model.set_reshard_after_backward(False)
        model.set_is_last_backward(True)
        model.set_unshard_in_backward(True)
        model.set_reduce_scatter_divide_factor(2.0)
        model.set_force_sum_reduction_for_comms(True)
        model.set_separate_reduce_scatter_group()
        model.set_reduce_scatter_max_input_buffers(1)
        model(inputs()).sum().backward()
        assert all(g.gathered.are_here for g in groups(model))


def test_bad_input():
    with simulate(4):
        mesh = sw.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        other = sw.init_device_mesh("cpu", (4,), mesh_dim_names=("x",))
        three = sw.init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("a", "b", "c"))
        for call, error, text in [
            (lambda: fully_shard([], mesh=mesh), ValueError, "empty list"),
            (
                lambda: fully_shard(build("mlp"), mesh=other, mp_policy=torch.half),
                TypeError,
                "mp_policy=torch",
            ),
            (lambda: MixedPrecisionPolicy(param_dtype="bf16"), ValueError, "param_dtype='bf16'"),
            (
                lambda: fully_shard(build("mlp"), mesh=other).set_gradient_divide_factor(0),
                ValueError,
                "got 0",
            ),
            (lambda: fully_shard([twice := build("mlp"), twice], mesh=mesh), RuntimeError, "called twice"),
            (lambda: fully_shard(build("mlp"), mesh=mesh, reshard_after_forward="no"), ValueError, "'no'"),
            (
                lambda: fully_shard(build("mlp"), mesh=other).set_modules_to_forward_prefetch([nn.ReLU()]),
                ValueError,
                "Expects FSDPModule",
            ),
            (lambda: fully_shard(torch.ones(2), mesh=mesh), ValueError, "got a Tensor"),
            (lambda: fully_shard(build("mlp"), mesh="cpu"), TypeError, "got str for a mesh"),
            (lambda: fully_shard(build("mlp"), mesh=three), ValueError, "of 3 axes"),
            (
                lambda: fully_shard(build("mlp"), mesh=other, shard_placement_fn=lambda p: Shard(2)),
                ValueError,
                "Shard dim 2 is invalid for 2D tensor: torch.Size",
            ),
            (
                lambda: fully_shard(build("mlp"), mesh=mesh, dp_mesh_dims=DataParallelMeshDims("dp", "dp")),
                ValueError,
                "shard='dp', replicate='dp'",
            ),
            (lambda: DataParallelMeshDims(), ValueError, "At least one of shard or replicate"),
            (lambda: replicate(build("mlp"), mesh=other, bucket=3), TypeError, "replicate got bucket"),
            (lambda: zero(build("mlp"), torch.optim.SGD([torch.ones(1)]), 3), ValueError, "stage=3"),
            (lambda: explain(build("mlp")), ValueError, "without data-parallel modules"),
            (lambda: share_comm_ctx([build("mlp")]), ValueError, "Expects FSDPModule but got"),
        ]:
            with pytest.raises(error, match=f"(?s){text}.*why: .*fix: "):
                call()
        model = build("tensor parallel")
        model.split(other)
        with pytest.raises(ValueError, match=r"(?s)slices of one mesh.*fix: "):
            fully_shard(model, mesh=mesh)
        model = fully_shard(build("mlp"), mesh=other)
        model.head.weight = nn.Parameter(torch.ones(3, 6, dtype=torch.float64))
        with pytest.raises(RuntimeError, match=r"(?s)The parameter head.weight.*replaced.*fix: "):
            model(inputs(4))
    with pytest.raises(ValueError, match=r"(?s)there is no mesh.*fix: "):
        fully_shard(build("mlp"))
