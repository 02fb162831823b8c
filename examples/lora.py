"""Fine-tune a tensor parallel Hugging Face model with LoRA adapters (peft), on 2 processes and on one: the same losses.

`make test` installs transformers and peft (requirements-clients.txt).

python -m examples.lora
torchrun --nproc-per-node 2 -m examples.lora
"""

from __future__ import annotations

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

import shardwise as sw
from examples.losses import compare_losses
from shardwise.parallel import parallelize_module

RANKS = 2
ADAPTERS = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "down_proj"])


def fine_tune(ranks: int, steps: int) -> tuple[list[float], list[str]]:
    """The losses, and a line for each adapter of the first layer."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 127, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=2))
    adapted = get_peft_model(model, ADAPTERS)  # initialised from the full sizes of the layers
    if ranks > 1:
        mesh = sw.init_device_mesh("cpu", (ranks,), mesh_dim_names=("tp",))
        # the plan names the layers; adapters inside them are replicated
        parallelize_module(model, mesh["tp"], model.tp_plan)
    optimizer = torch.optim.AdamW([p for p in adapted.parameters() if p.requires_grad], lr=1e-2)
    tokens = (torch.arange(4 * 24).view(4, 24) * 31) % 127
    losses = []
    for _ in range(steps):
        loss = adapted(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, [
        f"{name.split('.', 5)[-1]:44}{p.sharding if isinstance(p, sw.DTensor) else tuple(p.shape)}"
        for name, p in adapted.named_parameters()
        if "layers.0." in name and "_proj" in name
    ]


def main(steps: int = 10) -> None:
    """Fine-tune on processes and on one, and compare."""
    torch.set_num_threads(1)
    (found, layouts), *_ = sw.launch(fine_tune, RANKS, RANKS, steps)
    alone, _ = fine_tune(1, steps)
    print("\n".join(layouts))
    print(f"{RANKS} ranks " + " ".join(f"{x:.4f}" for x in found[:10]))
    print("one     " + " ".join(f"{x:.4f}" for x in alone[:10]))
    compare_losses(found, alone, 1e-4)


if __name__ == "__main__":
    main()
