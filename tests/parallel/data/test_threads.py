"""Threads as ranks, as torch's own tests run them: each has a world of its own in one process."""

import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.common_distributed import MultiThreadedTestCase
from torch.utils.checkpoint import checkpoint

from shardwise import init_device_mesh
from shardwise.debug import CommDebugMode
from shardwise.fsdp import fully_shard
from shardwise.parallel import replicate


class Blocks(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 6)) for _ in range(3)
        )

    def forward(self, x):
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=False)
        return x


class ThreadsTest(MultiThreadedTestCase):
    @property
    def world_size(self):
        return 4

    def setUp(self):
        super().setUp()
        self._spawn_threads()

    def models(self):
        """A model of one device and a copy, the same on all ranks."""
        dense = Blocks()
        for p in dense.parameters():
            dist.broadcast(p.detach(), src=0)
        return dense, copy.deepcopy(dense)

    def train(self, dense, model):
        """Steps of two micro-batches, of which the last reduces; the models have the same parameters after each."""
        optimizers = [torch.optim.Adam(net.parameters()) for net in (dense, model)]
        for step in range(6):
            x = torch.randn(2, 6, generator=torch.Generator().manual_seed(10 * step + self.rank))
            last = step % 2 == 1
            model.set_requires_gradient_sync(last)
            for net in (dense, model):
                net(x).pow(2).sum().backward()
            if not last:
                continue
            for p in dense.parameters():
                dist.all_reduce(p.grad)
                p.grad /= self.world_size
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            for p, q in zip(model.parameters(), dense.parameters(), strict=True):
                torch.testing.assert_close(p.full_tensor() if hasattr(p, "full_tensor") else p, q)

    def test_fully_shard(self):
        for shape in ((4,), (2, 2)):
            mesh = init_device_mesh("cpu", shape, mesh_dim_names=("pod", "dp")[-len(shape) :])
            dense, model = self.models()
            for block in model.blocks:
                fully_shard(block, mesh=mesh)
            self.train(dense, fully_shard(model, mesh=mesh))

    def test_replicate(self):
        dense, model = self.models()
        self.train(dense, replicate(model))

    def test_each_rank_counts_its_own_collectives(self):
        _, model = self.models()
        for block in model.blocks:
            fully_shard(block)
        with CommDebugMode() as comm:
            fully_shard(model)(torch.ones(2, 6))
        assert comm.get_total_counts() == 3
