"""Models of transformers on several meshes: training, generation and adapters equal dense."""

import copy
import os
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tests.clients.families import FAMILIES, Family
from tests.clients.float64 import Float64
from tests.clients.on_processes import greatest_differences, unequal_adapters
from tests.clients.sharding import shard_by_plan
from tests.clients.sweep import sweep_configuration
from tests.clients.training import (
    compare,
    difference,
    distribute_batch,
    on_mesh,
    train,
    train_on_own_rows,
    without_ignored_labels,
)
from transformers import LlamaConfig, LlamaForCausalLM

import shardwise as sw
from shardwise.debug import CommDebugMode
from shardwise.parallel import parallelize_module

# transformers warns of its own code and of tiny sizes
pytestmark = pytest.mark.filterwarnings("ignore")

DEEP = os.environ.get("SHARDWISE_DEEP") == "1"
TOLERANCE = 1e-9
MESHES: list[dict[str, int]] = [{"tp": 2}, {"tp": 3}, {"dp": 2, "tp": 2}]
MOE = ["GPT-OSS", "Mixtral", "Qwen3-MoE", "DeepSeek-V3"]
_CASES = [
    pytest.param(name, mesh, id=f"{name}-{'x'.join(f'{a}{n}' for a, n in mesh.items())}")
    for i, name in enumerate(FAMILIES)
    for j, mesh in enumerate(MESHES)
    if DEEP or j == i % len(MESHES)
]


def _parallelize(family: Family, **more: str) -> Any:
    return lambda model, mesh: parallelize_module(model, mesh, {**family.plan_of(model), **more})


@pytest.mark.parametrize(("name", "mesh"), _CASES)
def test_training_equals_dense(name: str, mesh: Mapping[str, int]):
    family = FAMILIES[name]
    steps = 5 if DEEP else 3
    found = compare(family.model(), family.batches(), _parallelize(family), mesh, steps)
    assert set(found.worst) == {"output", "loss", "gradient", "parameter"}
    assert not found.beyond(TOLERANCE)


@pytest.mark.parametrize("name", FAMILIES if DEEP else ["Llama"])
@pytest.mark.parametrize("mesh", [{"dp": 2}, {"dp": 2, "tp": 2}] if DEEP else [{"dp": 2}])
def test_fully_shard_by_the_plan_of_the_model_equals_dense(name: str, mesh: Mapping[str, int]):
    family = FAMILIES[name]

    def parallelize(model: Any, device_mesh: Any) -> None:
        if "tp" in mesh:
            parallelize_module(model, device_mesh, family.plan_of(model))
        shard_by_plan(model, device_mesh)

    found = compare(family.model(), family.batches(), parallelize, mesh, 5 if DEEP else 2)
    assert not found.beyond(TOLERANCE)


@pytest.mark.parametrize("name", FAMILIES if DEEP else ["Llama", "Mixtral", "BERT"])
@pytest.mark.parametrize("own_rows", [False, True], ids=["dtensors", "own_rows"])
def test_fully_shard_beside_tensor_parallelism_on_a_slice_equals_dense(name: str, own_rows: bool):
    """Parameters and buffers are on mesh["tp"]; the data are plain and each rank's own, or DTensors on the whole mesh."""
    family = FAMILIES[name]
    # a simulation runs one program, so the shapes of ranks must not depend on their rows
    model = family.model(experts="batched_mm" if own_rows else "eager")
    batches = without_ignored_labels(family.batches()) if own_rows else family.batches()
    with Float64(), on_mesh((2, 2), ("dp", "tp")) as mesh:
        dense = train(copy.deepcopy(model), batches, 1)
        parallelize_module(model, mesh["tp"], family.plan_of(model))
        shard_by_plan(model, mesh["dp"])
        if own_rows:
            got = train_on_own_rows(model, batches, mesh)
        else:
            got = train(model, [distribute_batch(b, mesh) for b in batches], 1)
    assert not difference(got, dense).beyond(TOLERANCE)


@pytest.mark.parametrize("name", MOE if DEEP else MOE[1:3])
@pytest.mark.parametrize("mesh", MESHES if DEEP else MESHES[1:2])
def test_experts_are_split_by_the_expert_parallel_plan(name: str, mesh: Mapping[str, int]):
    family = FAMILIES[name]
    model = family.model()
    found = compare(model, family.batches(), _parallelize(family, **model.ep_plan), mesh, steps=2)
    assert not found.beyond(TOLERANCE)


@pytest.mark.parametrize("implementation", ["eager", "batched_mm"])
def test_tokens_travel_to_experts_and_weights_stay(implementation: str):
    family = FAMILIES["Mixtral"]
    model, batch = family.model(), family.batches()[0]
    model.config._experts_implementation = implementation
    layers, experts = (
        model.config.num_hidden_layers,
        sum(p.nbytes for p in model.parameters() if p.dim() == 3),
    )
    with Float64(), on_mesh((2,), ("tp",)) as mesh:
        parallelize_module(model, mesh, {**family.plan_of(model), **model.ep_plan})
        with CommDebugMode() as comm:
            model(**batch)
    # the embedding, attention and experts of each layer, and the logits
    assert [e.step for e in comm.ledger.entries] == ["all-reduce"] * (1 + 2 * layers) + ["all-gather"]
    assert comm.get_total_bytes() < experts / 4


@pytest.mark.parametrize(
    "name", [n for n, f in FAMILIES.items() if f.generates and (DEEP or n in ("Llama", "T5"))]
)
@pytest.mark.parametrize("mesh", MESHES if DEEP else MESHES[1:2])
def test_generation_with_a_cache_gives_the_same_tokens(name: str, mesh: Mapping[str, int]):
    family = FAMILIES[name]
    model, tokens = family.model(), family.batches()[0]["input_ids"]
    how = {
        "max_new_tokens": 6,
        "do_sample": False,
        "eos_token_id": None,
        "pad_token_id": 0,
        "suppress_tokens": [0],
    }
    with Float64():
        want = copy.deepcopy(model).generate(tokens, **how)
        with on_mesh(tuple(mesh.values()), tuple(mesh)) as device_mesh:
            parallelize_module(model, device_mesh, family.plan_of(model))
            got = model.generate(tokens, **how)
    assert torch.equal(got, want)


def test_sampling_draws_the_tokens_of_one_device():
    family = FAMILIES["Llama"]
    model, tokens = family.model(), family.batches()[0]["input_ids"]
    how = {"max_new_tokens": 5, "do_sample": True, "top_k": 10, "eos_token_id": None, "pad_token_id": 0}
    dense = copy.deepcopy(model)
    with Float64():
        with sw.one_device():
            sw.manual_seed(5)
            want = dense.generate(tokens, **how)
        with on_mesh((3,), ("tp",)) as mesh:
            parallelize_module(model, mesh, family.plan_of(model))
            sw.manual_seed(5)
            got = model.generate(tokens, **how)
    assert torch.equal(got, want)


@pytest.mark.parametrize(("heads", "keys", "ranks"), [(4, 2, 2), (6, 3, 2), (10, 5, 3), (5, 5, 3)])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_llama_takes_the_collectives_of_megatron(heads: int, keys: int, ranks: int, attention: str):
    torch.manual_seed(0)
    sizes = {"hidden_size": 4 * heads, "intermediate_size": 24, "vocab_size": 48, "num_hidden_layers": 2}
    config = LlamaConfig(**sizes, num_attention_heads=heads, num_key_value_heads=keys)
    config._attn_implementation = attention
    model, layers = LlamaForCausalLM(config).double(), config.num_hidden_layers
    tokens = torch.arange(12).view(2, 6)
    batch = {"input_ids": tokens, "labels": tokens}
    with Float64(), on_mesh((ranks,), ("tp",)) as mesh:
        parallelize_module(model, mesh, model.tp_plan)
        with CommDebugMode() as forward:
            loss = model(**batch).loss
        with CommDebugMode() as backward:
            loss.backward()
    # the embedding, attention and feed-forward of each layer, and the logits
    assert [e.step for e in forward.ledger.entries] == ["all-reduce"] * (1 + 2 * layers) + ["all-gather"]
    # the input gradients of the head and of both parts of each layer
    assert [e.step for e in backward.ledger.entries] == ["all-reduce"] * (1 + 2 * layers)


_LORA = LoraConfig(
    r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "o_proj", "down_proj"], init_lora_weights=False
)


@pytest.mark.parametrize("mesh", MESHES if DEEP else MESHES[2:])
@pytest.mark.parametrize("adapt_first", [True, False])
def test_lora_adapters_train_on_a_parallelized_model_and_are_merged(
    mesh: Mapping[str, int], adapt_first: bool
):
    family = FAMILIES["Llama"]
    plan = family.plan_of(family.model())

    def adapted(model: Any) -> Any:
        torch.manual_seed(3)
        return get_peft_model(model, _LORA).double().eval()

    with Float64():
        dense = adapted(family.model())
        want = train(dense, family.batches(), steps=3)
        want_merged = dense.merge_and_unload().state_dict()
        with on_mesh(tuple(mesh.values()), tuple(mesh)) as device_mesh:
            model = family.model()
            if adapt_first:
                wrapped = adapted(model)
                parallelize_module(model, device_mesh, plan)
            else:
                parallelize_module(model, device_mesh, plan)
                wrapped = adapted(model)
            assert model.model.layers[0].self_attn.q_proj.base_layer.weight.sharding.sharded
            got = train(wrapped, [distribute_batch(b, device_mesh) for b in family.batches()], steps=3)
            # a second adapter is plain in either order
            wrapped.add_adapter("second", _LORA)
            wrapped.set_adapter("second")
            wrapped.merge_adapter()
            wrapped.unmerge_adapter()
            wrapped.set_adapter("default")
            merged = copy.deepcopy(wrapped).merge_and_unload().state_dict()
            found = {n: t.full_tensor() for n, t in merged.items()}
            assert merged["model.layers.0.mlp.down_proj.weight"].sharding.sharded
    assert not difference(got, want).beyond(TOLERANCE)
    torch.testing.assert_close(found, want_merged, rtol=0, atol=TOLERANCE)


# one of each kind: packed heads, scaled embeddings, a hybrid with linear attention, an encoder, several residual streams
_OTHERS = [
    "cohere.CohereConfig",
    "gemma2.Gemma2Config",
    "qwen3_next.Qwen3NextConfig",
    "eurobert.EuroBertConfig",
]


@pytest.mark.parametrize("name", _OTHERS if DEEP else _OTHERS[:2])
def test_configurations_of_the_sweep(name: str):
    cases = sweep_configuration(name, steps=1, meshes=("tp 3",))
    assert [c.status for c in cases] == ["right"], cases


def _on_processes(names: list[str], steps: int) -> tuple[dict[str, float], list[str]]:
    return greatest_differences(names, steps), unequal_adapters()


@pytest.mark.processes
def test_five_families_on_processes_and_adapters_that_differ_between_ranks():
    names = ["Llama", "Gemma 3", "Qwen3-MoE", "GPT-2", "Whisper"]
    # one launch, since the processes take long to import transformers
    results = sw.launch(_on_processes, 4 if DEEP else 2, names, 5 if DEEP else 1, timeout=600)
    for found, errors in results:
        assert set(found) == set(names)
        assert max(found.values()) < TOLERANCE, found
        assert len(errors) == 2
        assert all(
            "lora_A.default.weight of a parallelized module differs between ranks" in e for e in errors
        )
