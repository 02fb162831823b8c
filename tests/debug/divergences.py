"""Programs in which one rank diverges, and programs that are right; `sanitize` must tell them apart."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn

import shardwise as sw
from shardwise import DTensor, Partial, Replicate, Shard

BAD = 2


def is_bad() -> bool:
    return dist.get_rank() == BAD


def line():
    return sw.init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))


def square():
    return sw.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


def placed(placement, *size):
    return sw.distribute_tensor(
        torch.arange(1.0, 1 + torch.Size(size).numel()).view(size), line(), [placement]
    )


def changed_block():
    w = placed(Replicate(), 4, 4)
    if is_bad():
        w._local_tensor[1, 1] += 1
    return w @ w


def changed_block_of_a_large_tensor():
    w = placed(Replicate(), 300, 70)
    if is_bad():
        w._local_tensor[299, 69] *= 1 + 1e-6
    return w.relu()


def rows_in_another_order():
    w = placed(Replicate(), 64, 512)
    if is_bad():
        w._local_tensor.copy_(w._local_tensor.flip(0))
    return w + 1


def changed_result():
    y = placed(Replicate(), 4, 4) * 2
    if is_bad():
        y.to_local().add_(1e-3)
    return y + 1


def replicated_along_one_axis():
    x = sw.distribute_tensor(torch.ones(8, 4), square(), [Replicate(), Shard(0)])
    if is_bad():
        x._local_tensor[0, 0] = 7.0
    return x.exp()


def branch():
    y = placed(Shard(0), 4, 4) * 2
    if is_bad():
        y = y + 1
    return y * 3


def missing_op():
    y = placed(Shard(0), 4, 4) * 2
    if not is_bad():
        y = y + 1


def number():
    return placed(Shard(0), 4, 4) * (2.0 if is_bad() else 1.0)


def dtype():
    return placed(Shard(0), 4, 4).to(torch.float64 if is_bad() else torch.bfloat16)


def learning_rate():
    p = nn.Parameter(sw.distribute_tensor(torch.ones(8, 4), square(), [Replicate(), Shard(0)]))
    optimizer = torch.optim.AdamW([p], lr=0.2 if is_bad() else 0.1)
    (p * 2).sum().backward()
    optimizer.step()


def drifting_parameter():
    p = nn.Parameter(sw.distribute_tensor(torch.ones(8, 4), square(), [Replicate(), Shard(0)]))
    optimizer = torch.optim.SGD([p], lr=0.1)
    p.grad = sw.distribute_tensor(torch.ones(8, 4), square(), [Replicate(), Shard(0)])
    optimizer.step()
    if is_bad():
        p.detach().to_local().mul_(1.001)
    optimizer.step()


def plain_operand():
    with sw.policy(plain="replicate"):
        return placed(Shard(0), 4, 4) + torch.full((4,), float(is_bad()))


def plain_number():
    return placed(Shard(0), 4, 4) * torch.tensor(float(is_bad()))


def plain_source():
    return sw.distribute_tensor(torch.full((4,), float(is_bad())), line(), [Shard(0)], src_data_rank=None)


def wrong_claim():
    return DTensor.from_local(torch.full((2,), float(is_bad())), line(), [Replicate()], run_check=False)


def gradient_of_to_local():
    w = placed(Replicate(), 4, 4).requires_grad_()
    (w.to_local() * float(dist.get_rank() + 1)).sum().backward()


def gradient_of_local_map():
    from shardwise.experimental import local_map

    w = placed(Replicate(), 4, 4).requires_grad_()
    scale = float(dist.get_rank() + 1)
    mapped = local_map(
        lambda t: t * scale,
        out_placements=[Shard(0)],
        in_grad_placements=([Replicate()],),
        device_mesh=line(),
    )
    mapped(w).sum().backward()


def seed():
    sw.manual_seed(3 + is_bad())
    return sw.rand(4, 4, device_mesh=line(), placements=[Shard(0)])


def position():
    sw.manual_seed(3)
    if is_bad():
        sw.rand(3)
    return nn.functional.dropout(placed(Shard(0), 4, 4))


def drawn_alone():
    sw.manual_seed(3)
    line_ = placed(Shard(0), 4, 4)
    if is_bad():
        sw.rand(3)
    return line_ + 1


def generator():
    from_here = torch.Generator().manual_seed(int(is_bad()))
    return placed(Shard(0), 4, 4).normal_(generator=from_here)


def replaced_block():
    w = placed(Shard(0), 8, 4)
    if is_bad():
        w._local_tensor = torch.ones(3, 4)
    return w + 1


def replaced_blocks():
    w = placed(Shard(0), 8, 4)
    w._local_tensor = w._local_tensor.double()
    return w + 1


DIVERGENCES: dict[Callable[[], object], str] = {
    changed_block: "values",
    changed_block_of_a_large_tensor: "values",
    rows_in_another_order: "values",
    changed_result: "values",
    replicated_along_one_axis: "values",
    branch: "order",
    missing_op: "order",
    number: "order",
    dtype: "order",
    learning_rate: "order",
    drifting_parameter: "values",
    plain_operand: "plain",
    plain_number: "plain",
    plain_source: "plain",
    wrong_claim: "claim",
    gradient_of_to_local: "gradient",
    gradient_of_local_map: "gradient",
    seed: "random",
    position: "random",
    drawn_alone: "random",
    generator: "random",
    replaced_block: "layout",
    replaced_blocks: "layout",
}


def train(mesh_of, placements, steps=3):
    torch.manual_seed(0)
    mesh = mesh_of()
    net = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Dropout(0.1), nn.LayerNorm(16), nn.Linear(16, 4))
    for part in net.modules():
        for name, p in list(part._parameters.items()):
            if p is not None:
                spread = sw.distribute_tensor(
                    p.detach(), mesh, placements if p.dim() > 1 else [Replicate()] * mesh.ndim
                )
                setattr(part, name, nn.Parameter(spread))
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    x = sw.distribute_tensor(torch.ones(8, 8), mesh, [Shard(0)] + [Replicate()] * (mesh.ndim - 1))
    for _ in range(steps):
        loss = net(x).square().mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return loss.full_tensor().item()


def uninitialized():
    x = torch.empty_like(placed(Replicate(), 64, 64))
    return x.copy_(placed(Replicate(), 64, 64)).sum().item() + torch.zeros_like(x).sum().item()


def blocks_of_their_own():
    x = DTensor.from_local(torch.full((3,), float(dist.get_rank())), line(), [Shard(0)])
    y = DTensor.from_local(torch.full((3,), float(dist.get_rank())), line(), [Partial()])
    return (x * 2).sum().item() + (y * 2).full_tensor().sum().item()


def on_a_part_of_the_world():
    half = square()["tp"]
    x = sw.distribute_tensor(torch.full((4,), float(dist.get_rank() // 2)), half, [Replicate()])
    y = x * 2 if dist.get_rank() < 2 else x * 3 + 1
    return y.sum().item() >= 0


def looked_at_by_one_rank():
    loss = (placed(Replicate(), 4) * 2).sum()
    if is_bad():
        assert loss.detach().view(1).to_local().item() == loss.item()
    return (loss + 1).full_tensor().item()


RIGHT = {
    "looked at by one rank": looked_at_by_one_rank,
    "train on a line": lambda: train(line, [Shard(0)]),
    "train on a square": lambda: train(square, [Shard(0), Shard(1)]),
    "train replicas": lambda: train(square, [Replicate(), Shard(0)]),
    "uninitialized": uninitialized,
    "blocks of their own": blocks_of_their_own,
    "on a part of the world": on_a_part_of_the_world,
    "many ops": lambda: [placed(Replicate(), 4) + i for i in range(600)][-1].sum().item(),
}
