"""Shard a Hugging Face model over data and tensor parallel ranks together, on 4 processes, and train it as on one.

`make test` installs transformers (requirements-clients.txt).

python -m examples.fsdp_transformers
torchrun --nproc-per-node 4 -m examples.fsdp_transformers
"""

from __future__ import annotations

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import shardwise as sw
from examples.losses import compare_losses
from shardwise.parallel import fully_shard, parallelize_module

SHAPE = (2, 2)


def train(shape: tuple[int, ...], steps: int) -> tuple[list[float], list[str]]:
    """The losses, and a line for each weight of the first layer."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 127, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=2))
    data, tp = (shape[0], shape[1]) if shape else (1, 1)
    mesh = None
    if shape:
        mesh = sw.init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
        parallelize_module(model, mesh["tp"], model.tp_plan)
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh["dp"])
        fully_shard(model, mesh=mesh["dp"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    tokens = (torch.arange(4 * 24).view(4, 24) * 31) % 127
    rows = tokens
    if mesh is not None:  # ranks of one tensor parallel group have the same rows
        rows = sw.per_rank(lambda rank: tokens.chunk(data)[rank // tp])
        rows = sw.DTensor.from_local(rows, mesh["tp"], [sw.Replicate()])
    losses = []
    for _ in range(steps):
        loss = model(input_ids=rows, labels=rows).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(mean(loss, mesh))
    return losses, [
        f"{name.removeprefix('model.layers.0.'):34}{p.sharding if isinstance(p, sw.DTensor) else tuple(p.shape)}"
        for name, p in model.named_parameters()
        if "layers.0." in name
    ]


def mean(loss: torch.Tensor, mesh: sw.DeviceMesh | None) -> float:
    """The mean of a loss over the ranks that have rows of their own."""
    if mesh is None:
        return loss.item()
    own = loss.full_tensor() if isinstance(loss, sw.DTensor) else loss
    return sw.DTensor.from_local(own.detach(), mesh["dp"], [sw.Partial("avg")]).full_tensor().item()


def main(steps: int = 8) -> None:
    """Train on processes and on one, and compare."""
    torch.set_num_threads(1)
    (found, layouts), *_ = sw.launch(train, 4, SHAPE, steps)
    alone, _ = train((), steps)
    print("\n".join(layouts))
    print("2x2 ranks " + " ".join(f"{x:.4f}" for x in found[:8]))
    print("one       " + " ".join(f"{x:.4f}" for x in alone[:8]))
    compare_losses(found, alone, 1e-3)


if __name__ == "__main__":
    main()
