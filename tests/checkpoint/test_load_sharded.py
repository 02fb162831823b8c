"""Loading full weights into distributed modules."""

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from tests.parallel.models import Gpt
from tests.strategies import layouts
from torch import nn

import shardwise as sw
from shardwise.checkpoint.safetensors_file import open_safetensors
from shardwise.layout import Axes
from shardwise.parallel import parallelize_module


@pytest.mark.parametrize("on_meta", [False, True])
@pytest.mark.parametrize("kind", ["state dict", "file", "files", "directory", "index"])
def test_every_source_gives_the_same_weights(tmp_path, kind, on_meta):
    dense = Gpt()
    weights = dense.state_dict()
    weights.pop("head.weight")  # tied: stored once
    names = sorted(weights)
    parts = [{n: weights[n].clone() for n in half} for half in (names[::2], names[1::2])]
    for i, part in enumerate(parts):
        save_file(part, tmp_path / f"part{i}.safetensors")
    files = {n: f"part{i}.safetensors" for i, part in enumerate(parts) for n in part}
    (tmp_path / "index.json").write_text(json.dumps({"weight_map": files}))
    save_file({n: w.clone() for n, w in weights.items()}, tmp_path / "all.st")
    source = {
        "state dict": weights,
        "file": tmp_path / "all.st",
        "files": [str(tmp_path / "part0.safetensors"), tmp_path / "part1.safetensors"],
        "directory": tmp_path,
        "index": tmp_path / "index.json",
    }[kind]
    with sw.simulate(4):
        mesh = sw.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        with torch.device("meta" if on_meta else "cpu"):
            model = Gpt()
        plan = {"blocks.*.attn.qkv.weight": "[3 h:tp, i]", "head": "colwise", "blocks.*.mlp.down": "rowwise"}
        parallelize_module(model, mesh, plan)
        before = dict(model.named_parameters())
        sw.load_sharded(model, source)
        assert model.head.weight is model.wte.weight
        for name, p in model.named_parameters():
            assert p is before[name]
            assert torch.equal(p.full_tensor().ranks[3], weights[name]), name


@settings(max_examples=30)
@given(layouts(Axes((2, 2), ("dp", "tp")), (5, 6), partial=False))
def test_any_layout_reads_its_blocks(layout):
    full = torch.arange(30.0).view(5, 6)
    with sw.simulate(4):
        mesh = sw.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        module = nn.Linear(6, 5, bias=False)
        module.weight = nn.Parameter(sw.distribute_tensor(torch.zeros(5, 6), mesh, layout.placements))
        assert module.weight.sharding is layout
        sw.load_sharded(module, {"weight": full})
        assert torch.equal(module.weight.full_tensor().ranks[0], full)


def test_weights_that_do_not_fit_are_reported_together_and_change_nothing():
    module = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2, bias=False))
    before = module[0].bias.clone()
    weights = {"0.weight": torch.zeros(2, 3), "0.bias": torch.zeros(3), "1.w": torch.zeros(1)}
    with pytest.raises(sw.LayoutError) as error:
        sw.load_sharded(module, weights)
    for text in ("0.weight has shape (2, 3), not (3, 2)", "1.weight is missing", "1.w is unknown"):
        assert text in str(error.value)
    assert torch.equal(module[0].bias, before)


@settings(max_examples=60)
@given(st.binary(max_size=64), st.integers(0, 200))
def test_a_damaged_file_is_an_error(tmp_path_factory, noise, position):
    path = tmp_path_factory.mktemp("files") / "x.safetensors"
    save_file({"a": torch.arange(6.0).view(2, 3), "b": torch.ones(3, dtype=torch.bfloat16)}, path)
    data = bytearray(path.read_bytes())
    data[position : position + len(noise)] = noise
    path.write_bytes(data)
    try:
        tensors = open_safetensors(path)
    except sw.LayoutError as error:
        assert "not a safetensors file" in str(error)  # noqa: PT017
    else:
        assert all(isinstance(t.sum().item(), float | int | bool) for t in tensors.values())
