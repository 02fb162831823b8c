"""peft's LoRA on a model that transformers has placed with its own tensor parallelism; run in forks."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from tests.clients.float64 import Float64
from tests.drop_in.transformers_runs import _full, _gradients, _tokens, _worst, load
from torch import nn


def _fill(model: nn.Module) -> None:
    """The same values in the adapters of all ranks and of the dense model, whatever their layouts."""
    with torch.no_grad():
        for i, (name, p) in enumerate(model.named_parameters()):
            if "lora_" in name:
                values = torch.randn(p.shape, generator=torch.Generator().manual_seed(i), dtype=p.dtype) / 4
                p.copy_(_like(values, p))


def _like(values: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    from torch.distributed.tensor import DTensor, distribute_tensor

    return distribute_tensor(values, p.device_mesh, p.placements) if isinstance(p, DTensor) else values


def train(
    targets: list[str],
    mode: str = "tp",
    steps: int = 2,
    clip: bool = True,
    merge: bool = True,
    modules: list[str] | None = None,
) -> dict[str, Any]:
    """Train the adapters, merge them: the greatest difference from one device of each kind."""
    with Float64():
        dense, model, _ = load("Llama", mode)
        config = LoraConfig(r=4, lora_alpha=8, target_modules=targets, init_lora_weights=False)
        config.modules_to_save = modules
        dense, model = get_peft_model(dense, config), get_peft_model(model, config)
        for m in (dense, model):
            _fill(m)
        optimizers = [
            torch.optim.AdamW([p for p in m.parameters() if p.requires_grad], lr=1e-2) for m in (model, dense)
        ]
        out: dict[str, Any] = {
            "split": sum(hasattr(p, "placements") for n, p in model.named_parameters() if "lora_" in n)
        }
        times = []
        for step in range(steps):
            begin = time.perf_counter()
            for i in range(2):
                tokens = _tokens(10 * step + i)
                loss = model(input_ids=tokens, labels=tokens).loss
                loss.backward()
            times.append(time.perf_counter() - begin)
            for i in range(2):
                tokens = _tokens(10 * step + i)
                want = dense(input_ids=tokens, labels=tokens).loss
                want.backward()
            if step == 0:
                out["gradients"] = _gradients(model, dense)
            if clip:
                norms = [_full(nn.utils.clip_grad_norm_(m.parameters(), 1.0)) for m in (model, dense)]
                out["norm"] = _worst(norms[:1], norms[1:])
            out["loss"] = _worst([_full(loss).detach()], [want.detach()])
            begin = time.perf_counter()
            optimizers[0].step()
            times[-1] += time.perf_counter() - begin
            optimizers[1].step()
            for optimizer in optimizers:
                optimizer.zero_grad()
        out["ms"] = min(times) * 1e3
        pairs = [[_full(p).detach() for p in m.parameters()] for m in (model, dense)]
        out["parameters"] = _worst(*pairs)
        if not merge:
            return out
        merged, wanted = (m.merge_and_unload() for m in (model, dense))
        pairs = [[_full(p).detach() for p in m.parameters()] for m in (merged, wanted)]
        out["merged"] = _worst(*pairs)
        with torch.no_grad():
            tokens = _tokens(99)
            out["merged loss"] = _worst(
                *([_full(m(input_ids=tokens, labels=tokens).loss)] for m in (merged, wanted))
            )
        dist.barrier()
    return out
