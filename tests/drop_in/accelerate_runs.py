"""accelerate's FSDP2 plugin on a tiny model of transformers, compared with one device; run in forks.

accelerate chooses FSDP for accelerators only. `_accelerator` says that the processes have one; everything else is its own code.
"""

from __future__ import annotations

import time
import warnings
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator, FullyShardedDataParallelPlugin, PartialState
from accelerate.parallelism_config import ParallelismConfig
from accelerate.utils import DistributedType
from tests.clients.float64 import Float64
from tests.clients.tiny_configs import build, shrink
from tests.drop_in.transformers_runs import _full, _gradients, _shared_folder, _tokens, _worst
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig

SIZES: dict[str, dict[str, int]] = {
    "fsdp": {"dp_shard_size": -1},
    "hsdp": {"dp_replicate_size": 2, "dp_shard_size": -1},
    "fsdp x tp": {"dp_shard_size": -1, "tp_size": 2},
    "tp": {"tp_size": -1},
}


def _accelerator(mode: str, **how: Any) -> Accelerator:
    """An `Accelerator` that shards with `fully_shard` on CPU."""
    world = dist.get_world_size()
    sizes = dict(SIZES[mode])
    others = world
    for size in sizes.values():
        others //= max(size, 1)
    sizes = {name: others if size == -1 else size for name, size in sizes.items()}
    PartialState(cpu=True)
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_XPU
    plugin = None
    if mode != "tp":
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
            **how,
        )
    return Accelerator(
        cpu=True,
        fsdp_plugin=plugin,
        parallelism_config=ParallelismConfig(**sizes),
        gradient_accumulation_steps=2,
    )


def train(mode: str, **how: Any) -> dict[str, Any]:
    """Train on all ranks and on one device, with accumulation and clipping: the greatest difference of each kind."""
    warnings.simplefilter("ignore")
    with Float64():
        accelerator = _accelerator(mode, **how)
        config = shrink(LlamaConfig)
        dense = build(config).double().eval()
        model = build(config).double().eval()
        optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (model, dense)]
        model, optimizer = accelerator.prepare(model, optimizers[0])
        out: dict[str, Any] = {"split": sum(hasattr(p, "placements") for p in model.parameters())}
        mesh = accelerator.torch_device_mesh
        parts = dist.get_world_size() // (mesh["tp"].size() if "tp" in mesh.mesh_dim_names else 1)
        part = dist.get_rank() * parts // dist.get_world_size()
        for step in range(2):
            for i in range(2):
                tokens = _tokens(10 * step + i)
                mine = tokens.chunk(parts)[part]
                with accelerator.accumulate(model):
                    accelerator.backward(model(input_ids=mine, labels=mine).loss)
                    (dense(input_ids=tokens, labels=tokens).loss / 2).backward()
                    if accelerator.sync_gradients:
                        if step == 0:
                            out["gradients"] = _gradients(model, dense)
                        norms = [
                            _full(accelerator.clip_grad_norm_(model.parameters(), 0.5)),
                            nn.utils.clip_grad_norm_(dense.parameters(), 0.5),
                        ]
                        out["norm"] = _worst(norms[:1], norms[1:])
                        optimizers[1].step()
                        optimizers[1].zero_grad()
                    optimizer.step()
                    optimizer.zero_grad()
        pairs = [[_full(p).detach() for p in m.parameters()] for m in (model, dense)]
        out["parameters"] = _worst(*pairs)
        state = accelerator.get_state_dict(model)
        out["saved"] = 0.0
        if dist.get_rank() == 0:
            wanted = dense.state_dict()
            out["saved"] = _worst([state[n] for n in wanted], list(wanted.values()))
    return out
