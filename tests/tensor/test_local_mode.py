"""DTensors inside torch's LocalTensorMode: all ranks in one process, and each tensor of the program a LocalTensor."""

import copy
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._local_tensor import LocalTensor, LocalTensorMode, rank_map
from torch.distributed.device_mesh import DeviceMesh

import shardwise as sw
from shardwise import DTensor, Partial, Replicate, Shard, distribute_tensor, init_device_mesh
from shardwise.fsdp import fully_shard
from shardwise.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """A mesh of three ranks, which a LocalTensorMode may be entered for."""
    dist.init_process_group("fake", rank=0, world_size=3)
    try:
        yield init_device_mesh("cpu", (3,), mesh_dim_names=("tp",))
    finally:
        dist.destroy_process_group()


def blocks(x: Tensor) -> list[Tensor]:
    assert isinstance(x, LocalTensor)
    return [x._local_tensors[r] for r in sorted(x._local_tensors)]


@pytest.mark.parametrize("size", [6, 7, 2])
def test_blocks_are_those_of_a_simulation(mesh: DeviceMesh, size: int) -> None:
    full = torch.arange(size * 2.0).view(size, 2)
    with LocalTensorMode(3):
        x = distribute_tensor(full, mesh, [Shard(0)])
        got, whole = blocks(x.to_local()), x.full_tensor()
    parts = [*full.chunk(3), *[full[:0]] * 3][:3]
    assert all(map(torch.equal, got, parts))
    assert all(torch.equal(b, full) for b in blocks(whole))


def test_gradients_reach_local_tensors_through_ops_that_communicate(mesh: DeviceMesh) -> None:
    with LocalTensorMode(3):
        terms = rank_map(lambda rank: torch.full((2, 3), rank + 1.0))
        terms.requires_grad_()
        weight = distribute_tensor(torch.eye(3), mesh, [Shard(1)]).requires_grad_()
        x = DTensor.from_local(terms, mesh, [Partial()])
        y = (x @ weight).redistribute(placements=[Replicate()]).to_local()
        (y * y).sum().backward()
        assert weight.grad is not None
        assert terms.grad is not None
        grads, weight_grad = blocks(terms.grad), weight.grad.full_tensor()
    # y is the sum of the terms, 6 everywhere, so its gradient is 12
    assert all(torch.equal(g, torch.full((2, 3), 12.0)) for g in grads)
    assert all(torch.equal(b, torch.full((3, 3), 144.0)) for b in blocks(weight_grad))


def test_second_derivatives_pass_through_blocks(mesh: DeviceMesh) -> None:
    with LocalTensorMode(3):
        block = rank_map(lambda rank: torch.tensor([rank + 1.0])).requires_grad_()
        y = (DTensor.from_local(block, mesh, [Shard(0)]) ** 3).to_local()
        (first,) = torch.autograd.grad(y.sum(), block, create_graph=True)
        (second,) = torch.autograd.grad(first.sum(), block)
    assert [b.item() for b in blocks(second)] == [6.0, 12.0, 18.0]


def test_local_tensors_beside_dtensors_are_plain_ones(mesh: DeviceMesh) -> None:
    with LocalTensorMode(3):
        x = distribute_tensor(torch.arange(6.0), mesh, [Shard(0)])
        scaled = torch.tensor(2.0) * x
        assert scaled.placements == (Shard(0),)
        with pytest.raises(sw.PlainTensorError):
            x + torch.ones(6)
        with sw.policy(plain="replicate"):
            total = x + torch.ones(6)
        got = scaled.full_tensor() + total.full_tensor()
    assert all(torch.equal(b, torch.arange(6.0) * 3 + 1) for b in blocks(got))


def test_the_block_is_one_object_and_refuses_writes_that_autograd_would_miss(mesh: DeviceMesh) -> None:
    with LocalTensorMode(3):
        x = distribute_tensor(torch.ones(3), mesh, [Shard(0)])
        with torch.no_grad():
            assert x.to_local() is x._local_tensor
            x.to_local().add_(rank_map(lambda rank: torch.tensor([float(rank)])))
        assert all(torch.equal(b, torch.tensor([1.0, 2.0, 3.0])) for b in blocks(x.full_tensor()))
        y = x.requires_grad_() * 2
        with pytest.raises(RuntimeError, match="modified inplace"):
            y.to_local().add_(1)


def test_random_numbers_are_those_of_any_number_of_devices(mesh: DeviceMesh) -> None:
    torch.manual_seed(11)
    first, second = sw.rand(5), sw.rand(5)
    with LocalTensorMode(3):
        torch.manual_seed(11)
        x = sw.rand(5, device_mesh=mesh, placements=[Shard(0)]).full_tensor()
        torch.rand(4)  # the mode sets torch's generator for each rank, to a state of before
        y = sw.rand(5, device_mesh=mesh, placements=[Replicate()]).full_tensor()
        torch.manual_seed(mesh.get_rank() + 11)  # rank 0 has the same seed as above, the others have others
        z = sw.rand(5, device_mesh=mesh, placements=[Shard(0)]).full_tensor()
    for got, want in ((x, first), (y, second), (z, first)):
        assert all(torch.equal(b, want) for b in blocks(got))


def test_a_parallelized_module_trains_as_on_one_device(mesh: DeviceMesh) -> None:
    torch.manual_seed(0)
    dense = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 4))
    given = torch.randn(5, 4)
    with LocalTensorMode(3):
        model = parallelize_module(
            copy.deepcopy(dense), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()}
        )
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        model(given).square().sum().backward()
        optimizer.step()
        after = [p.full_tensor() for p in model.parameters()]  # type: ignore[attr-defined]
    optimizer = torch.optim.AdamW(dense.parameters(), lr=0.1)
    dense(given).square().sum().backward()
    optimizer.step()
    for p, got in zip(dense.parameters(), after, strict=True):
        for block in blocks(got):
            torch.testing.assert_close(block, p.detach())


@pytest.mark.parametrize("accumulated", [False, True])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam])
def test_steps_with_pending_gradients(mesh: DeviceMesh, kind: type, accumulated: bool) -> None:
    dense = nn.Parameter(torch.ones(4))
    steps = kind([dense], lr=0.25)
    with LocalTensorMode(3):
        p = nn.Parameter(distribute_tensor(torch.ones(4), mesh, [Replicate()]))
        optimizer = kind([p], lr=0.25)
    for i in range(3):
        grad = torch.tensor([1.0, -2.0, 3.0, 0.5]) * (i + 1)
        dense.grad = grad.clone()
        steps.step()
        with LocalTensorMode(3):
            pending = DTensor.from_local(grad / 3, mesh, [Partial()])
            p.grad = pending / 2 + pending / 2 if accumulated else pending
            torch.nn.utils.clip_grad_norm_([p], 1e6)
            optimizer.step()
            got = p.full_tensor()  # type: ignore[attr-defined]
        for block in blocks(got):
            torch.testing.assert_close(block, dense.detach())


def test_blocks_of_views_with_memory_of_their_own(mesh: DeviceMesh) -> None:
    with LocalTensorMode(3):
        view = distribute_tensor(torch.arange(6.0), mesh, [Shard(0)])[1:5]
        assert isinstance(view._local_tensor, LocalTensor)  # type: ignore[attr-defined]
        assert isinstance(view.add_(1)._local_tensor, LocalTensor)  # type: ignore[attr-defined]


def test_shapes_and_offsets_differ_between_ranks(mesh: DeviceMesh) -> None:
    with LocalTensorMode(3):
        shape, offset = sw.compute_local_shape_and_global_offset((7, 2), mesh, [Shard(0)])
        assert shape[1] == 2
        assert offset[1] == 0
        sizes, starts = shape[0].node._local_ints, offset[0].node._local_ints  # type: ignore[attr-defined]
    assert sizes == {0: 3, 1: 3, 2: 1}
    assert starts == {0: 0, 1: 3, 2: 6}


def test_chunks_of_a_checkpoint_are_those_of_a_process(mesh: DeviceMesh) -> None:
    with LocalTensorMode(3):
        x = distribute_tensor(torch.ones(3), mesh, [Shard(0)])
        with pytest.raises(ValueError, match="cannot be saved"):
            x.__create_chunk_list__()  # type: ignore[attr-defined]


def test_without_a_mode_nothing_of_it_remains(mesh: DeviceMesh) -> None:
    with LocalTensorMode(3):
        distribute_tensor(torch.ones(3), mesh, [Shard(0)])
    assert not sw.comm.is_simulated()
    x = DTensor.from_local(torch.ones(2), mesh, [Shard(0)])
    assert type(x._local_tensor) is Tensor
    assert x.shape == (6,)


def test_data_parallelism_says_what_to_use(mesh: DeviceMesh) -> None:
    with LocalTensorMode(3), pytest.raises(NotImplementedError, match="simulate"):
        fully_shard(nn.Linear(2, 2), mesh=mesh)
