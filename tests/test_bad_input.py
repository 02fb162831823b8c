"""Bad input is an error that states what happened, why, and the fix, before anything is sent."""

from __future__ import annotations

import re

import pytest
import torch
import torch.distributed as dist

import shardwise as sw
from shardwise import (
    DTensor,
    LayoutError,
    MeshError,
    Partial,
    PerRank,
    Replicate,
    Shard,
    distribute_tensor,
    init_device_mesh,
    per_rank,
    simulate,
)
from shardwise.comm import counting
from shardwise.layout import Axes, Factor, Layout, parse_layout

R = Replicate()
WHOLE = torch.arange(24.0).view(6, 4)


class World:
    """Meshes and tensors for the calls below, in a simulation of 4 ranks."""

    def __init__(self):
        self.square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        self.line = init_device_mesh("cpu", (4,), mesh_dim_names=("all",))
        self.x = distribute_tensor(WHOLE, self.square, [Shard(0), R])
        self.other_mesh = distribute_tensor(WHOLE, self.line, [Shard(0)])
        self.numbers = distribute_tensor(torch.arange(6), self.square, [Shard(0), R])
        self.pending = DTensor.from_local(WHOLE, self.square, [Partial(), R])

    def local(self, block=WHOLE, placements=None, **more):
        return DTensor.from_local(block, self.square, placements or [Shard(0), R], **more)


@pytest.fixture
def world():
    with simulate(4):
        yield World()


def torch_package():
    """The package of torch's placements, which look like ours."""
    from torch.distributed import tensor as theirs

    return theirs


# By name: the call, the exception that a program may catch, and words of the message.
CASES = {
    # placements
    "too few placements": (lambda w: distribute_tensor(WHOLE, w.square, [R]), ValueError, "1 for 2 axes"),
    "too many placements": (lambda w: w.local(placements=[R, R, R]), ValueError, "3 for 2 axes"),
    "no placements": (lambda w: distribute_tensor(WHOLE, w.square, []), ValueError, "0 for 2 axes"),
    "too few for redistribute": (lambda w: w.x.redistribute(placements=[R]), ValueError, "dp=2, tp=2"),
    "too many for a gradient": (lambda w: w.x.to_local(grad_placements=[R, R, R]), ValueError, "3 for 2"),
    "too few for a gradient": (lambda w: w.local(grad_placements=[R]), ValueError, "1 for 2"),
    "too few for a factory": (
        lambda w: sw.zeros(4, device_mesh=w.square, placements=[R]),
        ValueError,
        "1 for 2",
    ),
    "one placement, not a list": (
        lambda w: distribute_tensor(WHOLE, w.line, Shard(0)),
        TypeError,
        "[Shard(dim=0)]",
    ),
    "one placement for redistribute": (
        lambda w: w.x.redistribute(placements=Shard(0)),
        TypeError,
        "one placement for each",
    ),
    "a class, not a placement": (
        lambda w: distribute_tensor(WHOLE, w.line, [Replicate]),
        TypeError,
        "Replicate(…)",
    ),
    "a number for a placement": (lambda w: w.x.redistribute(tp=0), TypeError, "Axis tp"),
    "a string for a placement": (lambda w: w.x.redistribute(placements=["S(0)", "R"]), TypeError, "Axis dp"),
    "None for a placement": (lambda w: w.x.redistribute(placements=[None, R]), TypeError, "Axis dp has None"),
    "torch's placements": (
        lambda w: distribute_tensor(WHOLE, w.square, [torch_package().Shard(0), torch_package().Replicate()]),
        TypeError,
        "torch.distributed.tensor",
    ),
    "torch's placements for blocks": (
        lambda w: w.local(placements=[torch_package().Partial(), R]),
        TypeError,
        "from shardwise",
    ),
    "torch's placements for redistribute": (
        lambda w: w.x.redistribute(tp=torch_package().Shard(0)),
        TypeError,
        "from shardwise",
    ),
    "torch's placements for a factory": (
        lambda w: sw.zeros(4, device_mesh=w.line, placements=[torch_package().Shard(0)]),
        TypeError,
        "from shardwise",
    ),
    "an unknown reduction": (lambda w: Partial("mean"), ValueError, "sum, avg, max, min, product"),
    "different reductions": (
        lambda w: w.local(placements=[Partial("sum"), Partial("max")]),
        ValueError,
        "Mixed Partial reduce types",
    ),
    "different reductions for redistribute": (
        lambda w: w.pending.redistribute(tp=Partial("min")),
        ValueError,
        "Mixed Partial reduce types",
    ),
    # dims
    "a dim too large": (lambda w: distribute_tensor(WHOLE, w.square, [Shard(2), R]), ValueError, "-2..1"),
    "a dim too small": (lambda w: distribute_tensor(WHOLE, w.square, [R, Shard(-3)]), ValueError, "axis tp"),
    "a dim of a scalar": (
        lambda w: distribute_tensor(torch.tensor(1.0), w.square, [Shard(0), R]),
        ValueError,
        "0 dims",
    ),
    "a dim for redistribute": (lambda w: w.x.redistribute(tp=Shard(2)), ValueError, "Shard(2) on axis tp"),
    "a dim of a block": (lambda w: w.local(placements=[Shard(2), R]), ValueError, "Shard(2)"),
    "a dim of a gradient": (lambda w: w.x.to_local(grad_placements=[Shard(2), R]), ValueError, "Shard(2)"),
    "a dim of a new tensor": (
        lambda w: sw.ones(4, device_mesh=w.line, placements=[Shard(1)]),
        ValueError,
        "-1..0",
    ),
    "factors of another size": (
        lambda w: distribute_tensor(WHOLE, w.square, [Shard(0, factors=(2, 2), factor=1), R]),
        ValueError,
        "do not multiply to 6",
    ),
    "a factor out of range": (lambda w: Shard(0, factors=(2, 3), factor=2), ValueError, "0..1"),
    # axes
    "an unknown axis": (lambda w: w.x.redistribute(pp=Shard(0)), ValueError, "'pp'"),
    "an unknown axis among known ones": (lambda w: w.x.redistribute(dp=R, model=R), ValueError, "dp, tp"),
    "an axis twice on a layout": (
        lambda w: Layout(Axes((2,), ("dp",)), [[Factor(4, (0,))], [Factor(6, (0,))]]),
        ValueError,
        "Axis dp is used 2 times",
    ),
    "an axis twice in a text": (
        lambda w: parse_layout("[8:dp, 6:dp]", Axes((2,), ("dp",))),
        ValueError,
        "dp",
    ),
    "an axis that splits and is pending": (
        lambda w: Layout(Axes((2,), ("dp",)), [[Factor(4, (0,))]], {0: "sum"}),
        ValueError,
        "used 2 times",
    ),
    "placements and an axis": (
        lambda w: w.x.redistribute(placements=[R, R], tp=R),
        ValueError,
        "placements and also tp",
    ),
    "neither placements nor an axis": (
        lambda w: w.x.redistribute(),
        RuntimeError,
        "placements is needed for redistribute!",
    ),
    # meshes
    "no mesh": (lambda w: distribute_tensor(WHOLE), RuntimeError, "No device mesh is currently active!"),
    "no mesh for blocks": (
        lambda w: DTensor.from_local(WHOLE),
        RuntimeError,
        "No device mesh is currently active!",
    ),
    "no mesh for a factory": (lambda w: sw.arange(4), RuntimeError, "No device mesh is currently active!"),
    "something else for a mesh": (
        lambda w: distribute_tensor(WHOLE, "cpu", [R]),
        TypeError,
        "init_device_mesh",
    ),
    "placements for a mesh": (
        lambda w: w.x.redistribute([Shard(0), R]),
        RuntimeError,
        "redistribute(placements=[...])",
    ),
    "to another mesh": (lambda w: w.x.redistribute(w.line, [Shard(0)]), NotImplementedError, "dp=2, tp=2"),
    "a DTensor to another mesh": (lambda w: distribute_tensor(w.x, w.line, [Shard(0)]), ValueError, "all=4"),
    "tensors on two meshes": (
        lambda w: w.x + w.other_mesh,
        NotImplementedError,
        "An op runs on one mesh",
    ),
    "a copy between meshes": (
        lambda w: w.x.copy_(w.other_mesh),
        NotImplementedError,
        "An op runs on one mesh",
    ),
    # tensors
    "a non-leaf": (
        lambda w: distribute_tensor(WHOLE.clone().requires_grad_() * 2, w.line, [R]),
        RuntimeError,
        "leaf tensors",
    ),
    "a DTensor in another layout": (
        lambda w: distribute_tensor(w.x, w.square, [R, R]),
        ValueError,
        "`redistribute`",
    ),
    "a list for a tensor": (lambda w: distribute_tensor([1.0, 2.0], w.line, [R]), TypeError, "as_tensor"),
    "a list for a block": (lambda w: w.local([1.0, 2.0]), RuntimeError, "only accepts torch.Tensor"),
    "a DTensor for a block": (lambda w: w.local(w.x), RuntimeError, "x.to_local()"),
    "a sparse tensor": (
        lambda w: distribute_tensor(torch.eye(4).to_sparse(), w.line, [Shard(0)]),
        ValueError,
        "to_dense",
    ),
    "a sparse block": (lambda w: w.local(torch.eye(4).to_sparse()), ValueError, "to_dense"),
    "a plain tensor beside a DTensor": (lambda w: w.x + WHOLE, RuntimeError, "f32[6:dp, 4]"),
    "a DTensor beside a plain tensor": (lambda w: torch.mul(WHOLE, w.x), RuntimeError, "shape (6, 4)"),
    "a plain tensor written to a DTensor": (
        lambda w: w.x.copy_(WHOLE),
        RuntimeError,
        "distribute_tensor(t, mesh",
    ),
    "a plain tensor among DTensors": (
        lambda w: torch.cat([w.x, WHOLE]),
        RuntimeError,
        "mixed torch.Tensor and DTensor",
    ),
    "a plain weight": (lambda w: torch.nn.functional.linear(w.x, WHOLE), RuntimeError, "from_local"),
    "a source off the mesh": (
        lambda w: distribute_tensor(WHOLE, w.square, [R, R], src_data_rank=2),
        ValueError,
        "0..1",
    ),
    "a source below zero": (
        lambda w: distribute_tensor(WHOLE, w.line, [R], src_data_rank=-1),
        ValueError,
        "0..3",
    ),
    # reductions that a dtype does not support
    "a mean of integers": (
        lambda w: distribute_tensor(torch.arange(4), w.line, [Partial("avg")]),
        ValueError,
        "avg",
    ),
    "a mean of blocks of integers": (
        lambda w: w.local(WHOLE.int(), [Partial("avg"), R]),
        ValueError,
        "torch.int32",
    ),
    "a mean of bools": (lambda w: w.local(WHOLE > 3, [Partial("avg"), R]), ValueError, "torch.bool"),
    "a mean of integers for redistribute": (
        lambda w: w.numbers.redistribute(tp=Partial("avg")),
        ValueError,
        "torch.int64",
    ),
    "a mean in an integer dtype": (
        lambda w: w.x.redistribute(tp=Partial("avg"), forward_dtype=torch.int32),
        ValueError,
        "torch.int32",
    ),
    "a max of complex numbers": (
        lambda w: w.local(WHOLE + 0j, [Partial("max"), R]),
        ValueError,
        "Complex numbers have no order",
    ),
    # blocks
    "blocks of another shape": (lambda w: w.local(shape=(12, 5)), ValueError, "block of shape (6, 4)"),
    "blocks with another number of dims": (lambda w: w.local(shape=(12,)), ValueError, "(6,)"),
    "uneven blocks without a shape": (
        lambda w: w.local(per_rank(lambda r: torch.ones(3 - r // 2, 4))),
        ValueError,
        "Pass the global shape=",
    ),
    "blocks that are not chunks": (
        lambda w: w.local(per_rank(lambda r: torch.ones(1 + r // 2, 4)), run_check=True),
        ValueError,
        "(dp=0, tp=0) has (1, 4), not (2, 4)",
    ),
    "replicated blocks that differ": (
        lambda w: w.local(per_rank(lambda r: WHOLE + r), [R, Shard(0)], run_check=True),
        ValueError,
        "Use Partial() or Shard(dim) on dp",
    ),
    "blocks of some ranks": (lambda w: w.local(PerRank({0: WHOLE})), ValueError, "but not of 1, 2, 3"),
    "a stride without a shape": (
        lambda w: w.local(stride=(4, 1)),
        RuntimeError,
        "pass both shape and stride",
    ),
    "a stride of other dims": (lambda w: w.local(shape=(12, 4), stride=(1,)), ValueError, "(1,)"),
    "dims of a shape for placements": (lambda w: w.local(shape=(12, 4, 1)), ValueError, "(6, 4, 1)"),
    # factories
    "a pending factory": (
        lambda w: sw.ones(4, device_mesh=w.line, placements=[Partial()]),
        ValueError,
        "ones",
    ),
    "a negative size": (lambda w: sw.ones(4, -1, device_mesh=w.line), RuntimeError, "(4, -1)"),
    "a sparse factory": (
        lambda w: sw.empty(4, layout=torch.sparse_coo, device_mesh=w.line),
        ValueError,
        "empty",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_bad_input_is_a_clear_error_before_anything_is_sent(world, name):
    call, kind, words = CASES[name]
    with counting() as ledger, pytest.raises(kind) as caught:
        call(world)
    message = str(caught.value)
    what, why, fix = re.fullmatch(r"(?s)(.+?)\n  why: (.+?)\n  fix: (.+)", message).groups()
    assert words in message
    assert all(len(part.strip()) > 3 for part in (what, why, fix))
    assert what.endswith((".", "!"))
    assert len(max(message.splitlines(), key=len)) < 250
    assert ledger.collectives == 0


def test_an_error_leaves_tensors_unchanged(world):
    before = world.x.full_tensor().ranks[0].clone()
    for name in ("a plain tensor written to a DTensor", "a copy between meshes", "tensors on two meshes"):
        call, kind, _ = CASES[name]
        with pytest.raises(kind):
            call(world)
    assert torch.equal(world.x.full_tensor().ranks[0], before)
    assert world.x.placements == (Shard(0), R)


def test_errors_are_layout_errors_or_type_errors(world):
    for call, _, _ in CASES.values():
        with pytest.raises((LayoutError, TypeError)):
            call(world)
    assert issubclass(LayoutError, ValueError)
    assert issubclass(LayoutError, RuntimeError)
    assert issubclass(MeshError, LayoutError)


@pytest.mark.parametrize("shape", [(8,), (5,), (3, 2)])
def test_a_mesh_larger_than_the_world_is_an_error(shape):
    with simulate(4), pytest.raises((RuntimeError, ValueError), match=r"bigger than default world size 4"):
        init_device_mesh("cpu", shape)


def test_a_tensor_on_another_device_than_the_mesh_is_an_error():
    dist.init_process_group("fake", rank=0, world_size=4)
    try:
        mesh = init_device_mesh("cuda", (4,))
        for make in (distribute_tensor, DTensor.from_local):
            with counting() as ledger, pytest.raises(LayoutError) as caught:
                make(WHOLE, mesh, [Shard(0)])
            assert re.search(r"(?s)cpu.*cuda.*\n  why: .*\n  fix: .*x\.to\('cuda'\)", str(caught.value))
            assert ledger.collectives == 0
    finally:
        dist.destroy_process_group()


def test_a_meta_tensor_can_be_on_any_mesh():
    with simulate(4):
        x = distribute_tensor(WHOLE.to("meta"), init_device_mesh("cpu", (4,)), [Shard(0)])
        assert x.is_meta


def test_numbers_can_be_combined_with_a_dtensor(world):
    for number in (2, 2.0, torch.tensor(2.0), True):
        assert torch.equal((world.x + number).full_tensor().ranks[1], WHOLE + number)


def test_keyword_only_arguments_are_those_of_torch(world):
    for call in (
        lambda: world.x.to_local([R, R]),
        lambda: world.x.full_tensor([R, R]),
        lambda: world.x.redistribute(world.square, [R, R], True),
        lambda: DTensor.from_local(WHOLE, world.line, [R], True),
        lambda: distribute_tensor(WHOLE, world.line, [R], 0),
        lambda: sw.full((2,), 1.0, torch.float32),
    ):
        with pytest.raises(TypeError, match="positional"):
            call()
