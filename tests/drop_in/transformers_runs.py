"""Tiny models of transformers on its own tensor, expert and data parallel paths, compared with one device.

The same code runs on shardwise (`installed_transformers`) and on torch's DTensor (`torch_transformers`), in forks.
"""

from __future__ import annotations

import copy
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from tests.clients.float64 import Float64
from tests.clients.tiny_configs import build, shrink
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

CONFIGS = {
    "Llama": "LlamaConfig",
    "Qwen3": "Qwen3Config",
    "Gemma 3": "Gemma3TextConfig",
    "Phi-3": "Phi3Config",
    "Mixtral": "MixtralConfig",
    "Qwen3-MoE": "Qwen3MoeConfig",
    "DeepSeek-V3": "DeepseekV3Config",
}
MODES: dict[str, Any] = {
    "tp": lambda world: DistributedConfig(tp_size=world, tp_plan="auto"),
    "fsdp": lambda world: DistributedConfig(fsdp_size=world),
    "fsdp x tp": lambda world: DistributedConfig(tp_size=2, fsdp_size=world // 2, tp_plan="auto"),
    "fsdp x ep": lambda world: DistributedConfig(tp_size=2, ep_size=2, fsdp_size=world // 2, tp_plan="auto"),
    "fsdp x ep, dispatched": lambda world: DistributedConfig(
        fsdp_size=world, ep_size=2, ep_plan={"model.layers.*.mlp.experts": "ep_dispatch_experts"}
    ),
    "ep": lambda world: DistributedConfig(tp_size=world, ep_size=world, tp_plan="auto"),
}
VOCABULARY = 64


def _full(t: Tensor) -> Tensor:
    return t.full_tensor() if hasattr(t, "full_tensor") else t  # type: ignore[no-any-return]


def _worst(ours: list[Tensor], theirs: list[Tensor]) -> float:
    """The greatest difference relative to the greatest value of each tensor."""
    pairs = zip(ours, theirs, strict=True)
    return max(((a - b).abs().max() / b.abs().max().clamp(min=1e-9)).item() for a, b in pairs)


def _is_simulated() -> bool:
    if "shardwise" not in sys.modules:
        return False
    from shardwise.comm.simulate import is_simulated

    return is_simulated()


def _shared_folder() -> str:
    names = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(names)
    return names[0]


def _tokens(seed: int, rows: int = 4) -> Tensor:
    return torch.randint(0, VOCABULARY, (rows, 6), generator=torch.Generator().manual_seed(seed))


def load(name: str, mode: str, **changes: Any) -> tuple[nn.Module, nn.Module, Path]:
    """A model on one device, and what `from_pretrained` makes of it on all ranks."""
    warnings.simplefilter("ignore")
    folder = Path(_shared_folder())
    config = shrink(getattr(transformers, CONFIGS[name]), **changes)
    if dist.get_rank() == 0:
        build(config).save_pretrained(folder / "a")
    dist.barrier()
    # grouped_mm has no float64; eager experts are chosen by Python code, which simulated ranks with other data run alike
    experts = "batched_mm" if mode.startswith("fsdp") and _is_simulated() else "eager"
    how = {"dtype": torch.float64, "experts_implementation": experts}
    dense = AutoModelForCausalLM.from_pretrained(folder / "a", **how)
    where = MODES[mode](dist.get_world_size())
    model = AutoModelForCausalLM.from_pretrained(folder / "a", distributed_config=where, **how)
    return dense.eval(), model.eval(), folder


def _part(batch: Tensor, mode: str) -> Tensor:
    """The rows of this rank: data parallel ranks have their own."""
    world = dist.get_world_size()
    parts = 1
    if mode.startswith("fsdp"):
        parts = world // 2 if mode in ("fsdp x tp", "fsdp x ep") else world
    part = batch.chunk(parts)
    if "shardwise" not in sys.modules:
        return part[dist.get_rank() * parts // world]
    from shardwise import per_rank  # on processes and in a simulation

    return per_rank(lambda rank: part[rank * parts // world])


def train(name: str, mode: str, clip: bool = True, **changes: Any) -> dict[str, Any]:
    """Train both for two steps, generate, save and load again: the greatest difference of each.

    Torch's DTensor does not clip parameters of both kinds; `clip=False` shows the rest.
    """
    with Float64():
        dense, model, folder = load(name, mode, **changes)
        out: dict[str, Any] = {"split": sum(hasattr(p, "placements") for p in model.parameters())}
        optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2, foreach=False) for m in (model, dense)]
        losses: list[tuple[Tensor, Tensor]] = []
        for step in range(2):
            for i in range(2):
                tokens = _tokens(10 * step + i)
                mine = _part(tokens, mode)
                loss = model(input_ids=mine, labels=mine).loss
                want = dense(input_ids=tokens, labels=tokens).loss
                loss.backward()
                want.backward()
                if mine.shape == tokens.shape:
                    losses.append((_full(loss).detach(), want.detach()))
            if step == 0:
                out["gradients"] = _gradients(model, dense)
            if clip:
                norms = [_full(nn.utils.clip_grad_norm_(m.parameters(), 1.0)) for m in (model, dense)]
                out["norm"] = _worst([norms[0]], [norms[1]])
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        out["loss"] = _worst(*map(list, zip(*losses, strict=True))) if losses else 0.0
        pairs = [[_full(p).detach() for p in m.parameters()] for m in (model, dense)]
        out["parameters"] = _worst(*pairs)
        how = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        tokens = [m.generate(_tokens(99, 1), **how) for m in (model, dense)]
        out["generates alike"] = torch.equal(*tokens)
        model.save_pretrained(folder / "b")
        dist.barrier()
        loaded = AutoModelForCausalLM.from_pretrained(folder / "b", dtype=torch.float64)
        out["saved"] = _worst(list(loaded.parameters()), list(dense.parameters()))
        dist.barrier()
    return out


def copied(name: str, mode: str) -> dict[str, Any]:
    """Copy both models, train the originals, and compare what the copies compute: greatest differences."""
    with Float64():
        dense, model, _ = load(name, mode)
        copies = copy.deepcopy(model), copy.deepcopy(dense)
        tokens = _tokens(1)
        for m in (model, dense):
            m(input_ids=tokens, labels=tokens).loss.backward()
            torch.optim.SGD(m.parameters(), lr=0.1).step()
        losses = [m(input_ids=tokens, labels=tokens).loss for m in copies]
        for loss in losses:
            loss.backward()
        return {
            "loss": _worst([_full(losses[0]).detach()], [losses[1].detach()]),
            "gradients": _gradients(*copies),
            "gradients of the original": _gradients(model, dense),
        }


def simulate(ranks: int, **how: Any) -> dict[str, Any]:
    """The same training with all ranks in this process."""
    import shardwise

    with shardwise.simulate(ranks):
        return train(**how)


def not_simulated() -> dict[str, str]:
    """What is refused in a simulation, and the first line of each error."""
    import shardwise

    out = {}
    for name in ("ep", "fsdp x ep, dispatched"):
        with shardwise.simulate(2), Float64():
            try:
                _, model, _ = load("Mixtral", name)
                model(input_ids=_tokens(1), labels=_tokens(1)).loss.backward()
            except RuntimeError as error:
                out[name] = str(error).split("\n")[0]
    return out


def _gradients(model: nn.Module, dense: nn.Module) -> dict[str, float]:
    """By parameter, those gradients that differ by more than rounding."""
    out = {}
    for (name, p), q in zip(model.named_parameters(), dense.parameters(), strict=True):
        if q.grad is None or p.grad is None:
            if (q.grad is not None and q.grad.any()) or (p.grad is not None and _full(p.grad).any()):
                out[name] = float("inf")
        elif (worst := _worst([_full(p.grad)], [q.grad])) > 1e-9:
            out[name] = worst
    return out


def step_time(name: str, mode: str, steps: int) -> dict[str, float]:
    """The shortest time of a forward pass, a backward pass and a step, and the collectives of one."""
    from torch.distributed.tensor.debug import CommDebugMode

    _, model, _ = load(name, mode)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    tokens = _tokens(0)
    times = []

    def step() -> None:
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(3):
        step()
    with CommDebugMode() as mode_:
        step()
    for _ in range(steps):
        dist.barrier()
        begin = time.perf_counter()
        step()
        times.append(time.perf_counter() - begin)
    return {"ms": min(times) * 1e3, "collectives": mode_.get_total_counts()}
