"""`replicate` in the form of `DistributedDataParallel`: parameters stay plain tensors."""

import copy
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from tests.parallel.data.models import build, full
from tests.parallel.data.test_meshes import DATA, mean_over_ranks, own_data
from tests.parallel.data.test_programs import check_gradients, mesh_of
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from shardwise import DTensor, distribute_tensor, init_device_mesh, simulate
from shardwise.comm import counting
from shardwise.fsdp import MixedPrecisionPolicy, fully_shard
from shardwise.layout import Shard
from shardwise.parallel import explain, replicate


def loss_of(model):
    return model(own_data()).pow(2).sum()


def test_parameters_stay_and_an_optimizer_keeps_them():
    with simulate(2):
        dense, model = build("tied"), build("tied")
        before = list(model.parameters())
        optimizers = [torch.optim.AdamW(net.parameters()) for net in (dense, model)]
        assert replicate(model) is model
        assert all(
            p is q and type(p) is nn.Parameter for p, q in zip(model.parameters(), before, strict=True)
        )
        for _ in range(2):
            mean_over_ranks(dense, 2)
            loss_of(model).backward()
            check_gradients(model, dense)
            assert all(type(p.grad) is torch.Tensor for p in before)
            for net, optimizer in zip((dense, model), optimizers, strict=True):
                nn.utils.clip_grad_norm_(net.parameters(), 0.1)
                optimizer.step()
                optimizer.zero_grad()
        for p, q in zip(model.parameters(), dense.parameters(), strict=True):
            torch.testing.assert_close(p, q)
        assert {k: type(t) for k, t in model.state_dict().items()} == dict.fromkeys(
            dense.state_dict(), torch.Tensor
        )
        assert explain(model).collectives == 1


class Scaled(nn.Linear):
    """A linear layer with a parameter without elements."""

    def __init__(self):
        super().__init__(5, 3)
        self.empty = nn.Parameter(torch.ones(0))

    def forward(self, x):
        return torch.cat([super().forward(x), self.empty * torch.ones(len(x), 0, dtype=x.dtype)], 1)


def test_memory_of_parameters_that_is_replaced():
    """The next pass computes with the new values: of `double()`, `p.data = …`, `load_state_dict(assign=True)`, meta tensors."""
    with simulate(2):
        dense = Scaled()
        with torch.device("meta"):
            model = Scaled()
        replicate(model)
        model.to_empty(device="cpu")
        model.load_state_dict(dense.state_dict())
        for change in (
            lambda net: None,
            lambda net: net.double(),
            lambda net: setattr(net.weight, "data", net.weight.data * 2),
            lambda net: net.load_state_dict({k: t * 2 for k, t in net.state_dict().items()}, assign=True),
        ):
            for net in (model, dense):
                change(net)
                net.zero_grad()
            dtype = dense.weight.dtype
            model(own_data().to(dtype)).pow(2).sum().backward()
            for rank in range(2):
                (dense(DATA[rank].to(dtype)).pow(2).sum() / 2).backward()
            check_gradients(model, dense)
        model.weight.sum().backward()  # outside of the module it is an ordinary parameter
        torch.testing.assert_close(model.weight.grad, dense.weight.grad + 1)
        model.weight = nn.Parameter(torch.ones(2, 2))
        with pytest.raises(RuntimeError, match=r"(?s)The parameter weight .*replaced.*fix: "):
            model(own_data())


def test_a_weight_tied_to_one_that_is_split():
    with simulate(2):
        for first in (fully_shard, replicate):
            dense = build("tied")
            model = copy.deepcopy(dense)
            way = {"mesh": mesh_of(2)} if first is fully_shard else {}
            first(model.layers[0], **way)
            (replicate if first is fully_shard else fully_shard)(
                model, **({} if first is fully_shard else {"mesh": mesh_of(2)})
            )
            assert model.layers[0].weight is model.layers[1].weight
            assert isinstance(model.layers[0].weight, DTensor) is (first is fully_shard)
            for _ in range(2):
                mean_over_ranks(dense, 2)
                loss_of(model).backward()
                check_gradients(model, dense)


def test_beside_parameters_on_other_axes_all_are_dtensors():
    with simulate(4):
        mesh = mesh_of(2, 2)
        model = build("mlp")
        weight = model.head.weight
        model.head.weight = nn.Parameter(distribute_tensor(weight.detach(), mesh["tp"], [Shard(1)]))
        replicate(model, device_mesh=mesh["dp"])
        assert all(isinstance(p, DTensor) for p in model.parameters())
        assert dict(model.named_parameters())["head.weight"].sharding.text().count("tp") == 1


def test_mixed_precision_and_copies():
    policy = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float64)
    with simulate(2):
        dense, model = build("mlp"), replicate(build("mlp"), mp_policy=policy)
        other = copy.deepcopy(model)
        ema = torch.optim.swa_utils.AveragedModel(model)
        ema.update_parameters(model)
        mean_over_ranks(dense, 2)
        for net in (model, other, ema.module):
            net(own_data()).double().pow(2).sum().backward()
            for p, q in zip(net.parameters(), dense.parameters(), strict=True):
                assert p.grad.dtype is torch.float64
                torch.testing.assert_close(p.grad, q.grad, rtol=1e-4, atol=1e-4)
        assert not {id(p) for p in model.parameters()} & {id(p) for p in other.parameters()}


def train(ddp):
    """Losses, gradients and parameters of steps with accumulation, different first weights and an unused parameter."""
    rank = torch.distributed.get_rank()
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).double()
    model.register_parameter("unused", nn.Parameter(torch.ones(3)))
    options = {"find_unused_parameters": True, "bucket_cap_mb": 1e-4}
    net = DistributedDataParallel(model, **options) if ddp else replicate(model, **options)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    out = []
    for _ in range(2):
        if ddp:
            with net.no_sync():
                net(DATA[rank]).pow(2).mean().backward()
        else:
            net.set_requires_gradient_sync(False)
            net(DATA[rank]).pow(2).mean().backward()
            net.set_requires_gradient_sync(True)
        loss = net(2 * DATA[rank]).pow(2).mean()
        loss.backward()
        out += [loss.detach(), nn.utils.clip_grad_norm_(net.parameters(), 1.0)]
        out += [torch.zeros(3) if p.grad is None else p.grad.clone() for p in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
    return [full(t) for t in (*out, *model.parameters())]


def train_both():
    with counting() as ledger:
        found = train(ddp=False)
    return found, train(ddp=True), [e.step for e in ledger.entries].count("broadcast")


@pytest.mark.processes
def test_training_equals_ddp(workers):
    for found, expected, broadcasts in workers.run(train_both):
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b)
        assert broadcasts == 3  # one for each dtype


def groups_lists_and_options():
    """On one of four ranks: gradients of a model whose data differ along one axis, with the options of DDP."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    data = torch.randn(3, 5, generator=torch.Generator().manual_seed(dist.get_rank()), dtype=torch.float64)
    found = []
    for options in ({"process_group": mesh["dp"].get_group()}, {"device_mesh": mesh["dp"]}, {}):
        dense, model = build("mlp"), build("mlp")
        replicate(model, device_id=torch.device("cpu"), **options)
        for net in (dense, model):
            net(data).pow(2).sum().backward()
        group, ranks = (mesh["dp"].get_group(), 2) if options else (None, 4)
        for p, q in zip(model.parameters(), dense.parameters(), strict=True):
            dist.all_reduce(q.grad, group=group)
            found.append(bool(torch.allclose(p.grad, q.grad / ranks)))
    return all(found)


@pytest.mark.processes
def test_the_group_of_ranks_is_the_one_that_is_given(workers):
    assert all(workers.run(groups_lists_and_options))


def test_lists_of_modules_are_one_group():
    with simulate(2):
        dense, model = build("mlp"), build("mlp")
        parts = [model.layers[0], model.layers[1]]
        assert replicate(parts, mesh=mesh_of(2)) is parts
        replicate(model, mesh=mesh_of(2))
        assert parts[0]._get_fsdp_state() is replicate.state(parts[1])
        mean_over_ranks(dense, 2)
        loss_of(model).backward()
        check_gradients(model, dense)


def test_precision_as_ddp_takes_it():
    with simulate(2):
        model = replicate(
            nn.Linear(5, 3), mixed_precision=SimpleNamespace(param_dtype=torch.bfloat16, reduce_dtype=None)
        )
        out = model(own_data().float())
        assert out.dtype is torch.bfloat16
        out.sum().backward()
        assert model.weight.grad.dtype is torch.float32


def test_options_that_do_not_fit():
    with simulate(2):
        with pytest.raises(
            RuntimeError, match=r"(?s)Expected device_id to be int or torch.device.*why: .*fix: "
        ):
            replicate(nn.Linear(2, 2), device_id=["cpu"])
        model = fully_shard(nn.Linear(2, 2), mesh=mesh_of(2))
        with pytest.raises(
            RuntimeError,
            match=r"(?s)Cannot apply `replicate\(\)` on a Module already managed by `fully_shard`",
        ):
            replicate(model)


class ReadsWeights(nn.Module):
    """Computes with the weight of a module that it has called."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(5, 3)

    def forward(self, x):
        return self.layer(x) + self.layer.weight.sum(1)


@pytest.mark.parametrize(
    "shard", [replicate, lambda m, **o: fully_shard(m, reshard_after_forward=False, **o)]
)
def test_gathered_weights_can_be_read_until_the_pass_ends(shard):
    with simulate(2):
        dense, model = ReadsWeights().double(), ReadsWeights().double()
        model.load_state_dict(dense.state_dict())
        for module in (model.layer, model):
            shard(module, mesh=mesh_of(2))
        for _ in range(2):
            for net in (dense, model):
                net.zero_grad()
            mean_over_ranks(dense, 2)
            loss_of(model).backward()
            check_gradients(model, dense)
            assert isinstance(model.layer.weight, DTensor)


def half_precision(way, options):
    """Gradients in float16 whose mean is finite and whose sum is not."""
    model = nn.Linear(3, 4, bias=False)
    way(
        model,
        mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("pod", "dp")),
        mp_policy=MixedPrecisionPolicy(torch.float16),
    )
    if options:
        model.set_gradient_divide_factor(options)
    (model(torch.ones(1, 3)) * 40000).sum().backward()
    return model.weight.grad.full_tensor()


@pytest.mark.processes
@pytest.mark.parametrize(("way", "factor"), [(fully_shard, None), (replicate, None), (fully_shard, 5.0)])
def test_means_of_half_precision_do_not_overflow(workers, way, factor):
    for grad in workers.run(half_precision, way, factor):
        torch.testing.assert_close(grad, torch.full((4, 3), 40000.0 * 4 / (factor or 4)), rtol=1e-3, atol=0)
