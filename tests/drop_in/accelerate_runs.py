"""accelerate's FSDP2 plugin on a tiny model of transformers, compared with one device; run in forks.

accelerate chooses FSDP for accelerators only. `_accelerator` says that the processes have one; everything else is its own code.
"""

from __future__ import annotations

import math
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
from tests.drop_in.transformers_runs import _full, _gradients, _tokens, _worst, load
from torch import nn
from transformers import LlamaConfig

SIZES: dict[str, dict[str, int]] = {
    "fsdp": {"dp_shard_size": -1},
    "hsdp": {"dp_replicate_size": 2, "dp_shard_size": -1},
    "tp": {"tp_size": -1},
    "fsdp x tp": {"dp_shard_size": -1, "tp_size": 2},
}


def _accelerator(mode: str, plugin: Any) -> Accelerator:
    """An `Accelerator` whose mesh is on CPU."""
    sizes = SIZES[mode]
    rest = dist.get_world_size() // max(-math.prod(sizes.values()), 1)
    sizes = {name: rest if size == -1 else size for name, size in sizes.items()}
    PartialState(cpu=True)
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_XPU
    return Accelerator(
        cpu=True,
        fsdp_plugin=plugin,
        parallelism_config=ParallelismConfig(**sizes),
        gradient_accumulation_steps=2,
    )


def _prepared(mode: str, **how: Any) -> tuple[Accelerator, Any, nn.Module, nn.Module]:
    """An accelerator, what it makes of an optimizer and a model, and the model on one device.

    Data parallelism is accelerate's; with tensor parallelism transformers has placed the model, as its `Trainer` has it.
    """
    if "tp" in mode:
        dense, model, _ = load("Llama", mode)
        accelerator = _accelerator(mode, None)
    else:
        dense, model = (build(shrink(LlamaConfig)).double().eval() for _ in range(2))
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
            **how,
        )
        accelerator = _accelerator(mode, plugin)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    return accelerator, optimizer, model, dense


def train(mode: str, steps: int = 2, **how: Any) -> dict[str, Any]:
    """Train on all ranks and on one device, with accumulation and clipping: the greatest difference of each kind."""
    warnings.simplefilter("ignore")
    with Float64():
        accelerator, optimizer, model, dense = _prepared(mode, **how)
        dense_optimizer = torch.optim.AdamW(dense.parameters(), lr=1e-2)
        out: dict[str, Any] = {"split": sum(hasattr(p, "placements") for p in model.parameters())}
        data_parallel = accelerator.parallelism_config.data_parallel_size
        times = []
        for step in range(steps):
            times.append(0.0)
            for i in range(2):
                tokens = _tokens(10 * step + i)
                mine = tokens.chunk(data_parallel)[dist.get_rank() * data_parallel // dist.get_world_size()]
                with accelerator.accumulate(model):
                    begin = time.perf_counter()
                    accelerator.backward(model(input_ids=mine, labels=mine).loss)
                    times[-1] += time.perf_counter() - begin
                    (dense(input_ids=tokens, labels=tokens).loss / 2).backward()
                    if accelerator.sync_gradients:
                        if step == 0:
                            out["gradients"] = _gradients(model, dense)
                        norm = _full(accelerator.clip_grad_norm_(model.parameters(), 0.5))
                        out["norm"] = _worst([norm], [nn.utils.clip_grad_norm_(dense.parameters(), 0.5)])
                        dense_optimizer.step()
                        dense_optimizer.zero_grad()
                    begin = time.perf_counter()
                    optimizer.step()
                    optimizer.zero_grad()
                    times[-1] += time.perf_counter() - begin
        out["ms"] = min(times) * 1e3
        pairs = [[_full(p).detach() for p in m.parameters()] for m in (model, dense)]
        out["parameters"] = _worst(*pairs)
        state = accelerator.get_state_dict(model)
        if state:  # rank 0 alone may have it
            wanted = dense.state_dict()
            out["saved"] = _worst([_full(state[n]) for n in wanted], list(wanted.values()))
    return out
