"""An optimizer on whole parameters that are stored split equals it on one device, bit for bit."""

import copy

import pytest
import torch
from tests.parallel.data.models import full
from torch import nn

import shardwise as sw
from shardwise import Replicate, Shard, distribute_tensor, simulate
from shardwise.comm import counting
from shardwise.parallel import OwnerOptimizer

SHAPES = [(8, 4), (8, 4), (4, 4), (8, 4), (5, 7), (4, 4)]


def matrices(seed):
    rng = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=rng) for shape in SHAPES]


def layouts(shape):
    """The placements of each parameter on a mesh of this shape."""
    if len(shape) == 1:
        return [[Shard(i % 2)] for i in range(len(SHAPES))]
    return [[Replicate(), Shard(0)], [Shard(0), Shard(1)], [Replicate(), Replicate()]] * 2


def set_gradients(params, grads, placed=None):
    for i, (p, g) in enumerate(zip(params, grads, strict=True)):
        if i == 3:
            continue  # one has none
        p.grad = (
            g.clone()
            if placed is None
            else distribute_tensor(g, p.device_mesh, placed[i], src_data_rank=None)
        )


@pytest.mark.parametrize("shape", [(2,), (3,), (4,), (2, 2), (2, 3)])
@pytest.mark.parametrize(
    ("optimizer_class", "options"),
    [(torch.optim.Muon, {"lr": 0.02}), (torch.optim.AdamW, {"lr": 0.1, "amsgrad": True})],
)
def test_bits_of_one_device(shape, optimizer_class, options):
    with simulate(torch.Size(shape).numel()):
        mesh = sw.init_device_mesh("cpu", shape, mesh_dim_names=("pod", "dp")[-len(shape) :])
        dense, placed = [nn.Parameter(m) for m in matrices(0)], layouts(shape)
        params = [
            nn.Parameter(distribute_tensor(m.clone(), mesh, where, src_data_rank=None))
            for m, where in zip(matrices(0), placed, strict=True)
        ]
        theirs = optimizer_class([{"params": dense[:2]}, {"params": dense[2:], "lr": 0.05}], **options)
        ours = OwnerOptimizer(
            [{"params": params[:2]}, {"params": params[2:], "lr": 0.05}], optimizer_class, **options
        )
        schedules = [torch.optim.lr_scheduler.StepLR(o, 1, 0.5) for o in (ours, theirs)]
        for step in range(4):
            set_gradients(dense, matrices(step + 1))
            set_gradients(params, matrices(step + 1), placed)
            for o in (ours, theirs, *schedules):
                o.step()
            for p, q in zip(params, dense, strict=True):
                assert torch.equal(full(p), q)
            if step == 1:  # written to by the program
                with torch.no_grad():
                    for p in (*params, *dense):
                        p.mul_(0.5)
            if step == 2:  # another optimizer goes on
                saved, ours = ours.state_dict(), None
                ours = OwnerOptimizer(
                    [{"params": params[:2]}, {"params": params[2:]}], optimizer_class, **options
                )
                ours.load_state_dict(copy.deepcopy(saved))
                schedules[0].optimizer = ours


def test_bytes_are_two_parts_in_n_of_gathering_everywhere():
    n, count = 4, 8
    with simulate(n):
        mesh = sw.init_device_mesh("cpu", (n,), mesh_dim_names=("dp",))
        params = [nn.Parameter(distribute_tensor(torch.randn(8, 4), mesh, [Shard(0)])) for _ in range(count)]
        optimizer = OwnerOptimizer(params, torch.optim.Muon)
        for step in range(2):
            for p in params:
                p.grad = p.detach() * 0.1
            with counting() as ledger:
                optimizer.step()
            gathered = count * 8 * 4 * 4 * (n - 1)  # bytes of all ranks
            # the first step also sends the parameters to their owners
            assert ledger.bytes == (3 if step == 0 else 2) * gathered / n
            assert ledger.collectives == 2
        shapes = [
            tuple(b.shape) for b in optimizer.state_dict()["state"][0]["momentum_buffer"].to_local().ranks
        ]
        assert shapes == [(2, 8, 4)] * n


def test_errors():
    with pytest.raises(
        TypeError, match=r"(?s)OwnerOptimizer got a Parameter of shape \(2, 2\).*why: .*fix: "
    ):
        OwnerOptimizer([nn.Parameter(torch.ones(2, 2))], torch.optim.Muon)
