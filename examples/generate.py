"""Generate with a Hugging Face model by its own tensor parallel plan, on 2 processes and on one: the same tokens.

`make test` installs transformers and peft (requirements-clients.txt).

python -m examples.generate                                     a small Llama with random weights
python -m examples.generate --model PATH_OR_NAME --ranks 4      your own
torchrun --nproc-per-node 4 -m examples.generate --ranks 4
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import shardwise as sw
from shardwise.comm import counting
from shardwise.parallel import parallelize_module

PROMPT = torch.tensor([[5, 17, 3, 101]])


def build(name: str) -> Any:
    """The model of this name, or a small Llama with random weights: 6 heads that share 2 keys."""
    if name:
        return AutoModelForCausalLM.from_pretrained(name).eval()
    torch.manual_seed(0)
    heads = {"num_attention_heads": 6, "num_key_value_heads": 2}
    return LlamaForCausalLM(
        LlamaConfig(vocab_size=212, hidden_size=96, intermediate_size=200, num_hidden_layers=3, **heads)
    ).eval()


def generate(name: str, ranks: int, new: int) -> tuple[list[int], int, int, int]:
    """The tokens, the bytes of parameters on this rank, and the collectives and bytes sent."""
    model = build(name)
    if ranks > 1:
        mesh = sw.init_device_mesh("cpu", (ranks,), mesh_dim_names=("tp",))
        parallelize_module(model, mesh["tp"], model.tp_plan)
    with counting() as ledger:
        tokens = model.generate(PROMPT, max_new_tokens=new, do_sample=False, pad_token_id=0)
    blocks = (p.to_local() if isinstance(p, sw.DTensor) else p for p in model.parameters())
    return tokens[0].tolist(), sum(b.nbytes for b in blocks), ledger.collectives, int(ledger.bytes)


def main(arguments: list[str] | None = None) -> None:
    """Generate on processes and on one, and compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="", help="a model of transformers that carries a plan")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=12)
    options = parser.parse_args(arguments)
    found = sw.launch(generate, options.ranks, options.model, options.ranks, options.tokens)
    alone = generate(options.model, 1, options.tokens)
    print(f"{options.ranks} ranks  {' '.join(map(str, found[0][0]))}")
    print(f"one      {' '.join(map(str, alone[0]))}")
    for rank, (_, held, collectives, sent) in enumerate(found):
        print(
            f"rank {rank}: {held:,} of {alone[1]:,} bytes of parameters; {collectives} collectives, {sent:,} bytes"
        )
    if any(tokens != alone[0] for tokens, *_ in found):
        raise SystemExit("The tokens differ.")
    print("The same tokens on every rank. Next: python -m examples.lora")


if __name__ == "__main__":
    main()
