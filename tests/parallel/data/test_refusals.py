"""Calls that are refused: the words of the error, and that the module stays as it was."""

import pytest
import torch
from tests.parallel.data.models import build, full
from tests.parallel.data.test_engine import shard_each
from tests.parallel.data.test_programs import check_gradients, mean_over_ranks, mesh_of, own_data
from torch import nn

import shardwise as sw
from shardwise import Replicate, Shard, simulate
from shardwise.fsdp import DataParallelMeshDims, fully_shard
from shardwise.parallel import ColwiseParallel, parallelize_module, replicate, zero


def layers():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3)).double()


def inside_a_sharded_module():
    model = fully_shard(layers(), mesh=mesh_of(2))
    fully_shard(model[0], mesh=mesh_of(2))


def over_all_axes_beside_tensor_parallelism():
    mesh = mesh_of(2, 2)
    fully_shard(parallelize_module(layers(), mesh["tp"], {"2": ColwiseParallel()}), mesh=mesh)


def a_mesh_of_another_device():
    mesh, other = mesh_of(2, 2), sw.init_device_mesh("meta", (2, 2), mesh_dim_names=("dp", "tp"))
    fully_shard(parallelize_module(layers(), mesh["tp"], {"0": ColwiseParallel()}), mesh=other["dp"])


def axes_by_name_of_a_mesh_without_names():
    fully_shard(
        layers(), mesh=sw.init_device_mesh("cpu", (4,)), dp_mesh_dims=DataParallelMeshDims(shard="dp")
    )


def replicas_that_are_split():
    replicate(layers(), mesh=mesh_of(2), dp_mesh_dims=DataParallelMeshDims(shard="dp"))


def an_optimizer_of_another_model():
    zero(layers(), torch.optim.SGD(layers().parameters()), mesh=mesh_of(2))


def no_optimizer():
    zero(layers(), None, mesh=mesh_of(2))


def a_deleted_parameter():
    model = fully_shard(layers(), mesh=mesh_of(2))
    del model[0].bias
    model(own_data(copies=2))


@pytest.mark.parametrize(
    ("program", "error", "words"),
    [
        (inside_a_sharded_module, AssertionError, "weight is in the group of Sequential already"),
        (over_all_axes_beside_tensor_parallelism, ValueError, "whose axis tp already splits a parameter"),
        (a_mesh_of_another_device, ValueError, "got cpu for DTensor and meta for FSDP"),
        (axes_by_name_of_a_mesh_without_names, ValueError, "must have mesh_dim_names when dp_mesh_dims"),
        (replicas_that_are_split, ValueError, "requires replicate-only dims"),
        (an_optimizer_of_another_model, ValueError, "has no parameter of the Sequential"),
        (no_optimizer, TypeError, "got a NoneType for the optimizer"),
        (a_deleted_parameter, RuntimeError, "parameter 0.bias of a data-parallel module is missing"),
        (lambda: DataParallelMeshDims(), ValueError, "At least one of shard or replicate must be set"),
    ],
)
def test_errors_say_what_and_why(program, error, words):
    with simulate(4), pytest.raises(error, match=f"(?s){words}.*why: .*fix: "):
        program()


@pytest.mark.parametrize(
    "options",
    [
        {"shard_placement_fn": lambda p: Shard(1)},  # which the bias does not have
        {"shard_placement_fn": lambda p: Replicate() if p.dim() == 1 else Shard(1)},
        {"reshard_after_forward": 3},
    ],
)
def test_a_refused_call_leaves_the_module_as_it_was(options):
    """The corrected call has its own layouts, not those that the refused one began with."""
    with simulate(2):
        dense, model = build("mlp"), build("mlp")
        before = dict(model.named_parameters())
        with pytest.raises(ValueError, match="fix: "):
            fully_shard(model, mesh=mesh_of(2), **options)
        assert all(p is before[name] for name, p in model.named_parameters())
        mean_over_ranks(lambda x: dense(x).sum())
        sum(model(x).sum() for x in own_data().ranks).div(2).backward()
        check_gradients(model, dense)  # the original parameters may be computed with
        model.zero_grad()
        shard_each(model, mesh_of(2))
        model(own_data()).sum().backward()
        check_gradients(model, dense)
        assert str(model.head.weight.sharding) == "[3:dp, 6]"


@pytest.mark.parametrize("make", [torch.optim.Adagrad, torch.optim.SGD])
def test_zero_splits_the_state_that_an_optimizer_begins_with(make):
    with simulate(2):
        dense, model = build("mlp"), build("mlp")
        optimizer, reference = make(model.parameters(), lr=0.1), make(dense.parameters(), lr=0.1)
        zero(model, optimizer, mesh=mesh_of(2))
        for _ in range(2):
            model(own_data()).sum().backward()
            mean_over_ranks(lambda x: dense(x).sum())
            optimizer.step()
            reference.step()
        for p, q in zip(model.parameters(), dense.parameters(), strict=True):
            torch.testing.assert_close(full(p), q.detach())
