"""Plans, modules and meshes that do not fit: one error for all problems, before anything changes."""

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.comm.launch import Workers
from shardwise.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PlanError,
    PrepareModuleInput,
    PrepareModuleOutput,
    SequenceParallel,
    parallelize_module,
)


@pytest.fixture
def mesh():
    with sw.simulate(4):
        yield sw.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.GELU(), nn.Linear(6, 4))


def tied() -> nn.Module:
    model = nn.ModuleDict({"embed": nn.Embedding(6, 4), "head": nn.Linear(4, 6, bias=False)})
    model["head"].weight = model["embed"].weight
    return model


PLANS = [
    (mlp, {"0": "colwize"}, r"unknown style 'colwize'; did you mean colwise"),
    (
        mlp,
        {"0": "[o:tp, i]"},
        r"'0' is a module and '\[o:tp, i\]' the layout of a parameter; write '0.weight'",
    ),
    (mlp, {"0.weight": "[o:tp]"}, r"It has 1 dims, and the parameter has 2"),
    (mlp, {"0.weight": "[4 h:tp, i]"}, r"does not fit the size 6"),
    (mlp, {"0.weight": "[a:tp b, i]"}, r"more than one letter"),
    (mlp, {"0.weight": "[o:ep, i]"}, r"no axis 'ep'"),
    (mlp, {"0.weight": "[o:tp, i:tp]"}, r"Axis tp is used 2 times"),
    (
        mlp,
        {"0.weight": "[o:tp, i]", "*.weight": "[o, i:tp]"},
        r"0.weight is .* by '0.weight' and .* by '\*.weight'",
    ),
    (mlp, {"0.bias": "packed_rowwise", "2": "packed_rowwise", "1": 3}, r"3 is neither a style"),
    (mlp, {"layers.0": "colwise"}, r"'layers.0' matches no module or parameter; near misses: 0"),
    (mlp, {"0": ColwiseParallel(), "2": "rowwise"}, r"use_local_output=False"),
    (tied, {"embed": "embedding_colwise", "head": "colwise"}, r"one tied parameter"),
    (mlp, {0: "colwise"}, r"the key 0 is no string; write '0'"),
    (lambda: nn.Linear(4, 3), {"": "packed_colwise"}, r"does not hold 2 projections"),
]


@pytest.mark.parametrize(("build", "plan", "text"), PLANS)
def test_a_plan_that_does_not_fit_changes_nothing(mesh, build, plan, text):
    module = build()
    before = dict(module.named_parameters())
    with pytest.raises(PlanError, match=text) as error:
        parallelize_module(module, mesh, plan)
    assert "\n  why: " in str(error.value)
    assert "\n  fix: " in str(error.value)
    assert all(p is before[n] for n, p in module.named_parameters())


STYLES = [
    (ColwiseParallel(), lambda m: m["tp"], {"1"}, r"GELU: it has no parameter with features to split"),
    (ColwiseParallel(), lambda m: m, {"0"}, r"styles for a mesh of 2 axes"),
    (SequenceParallel(), lambda m: m["tp"], {"9"}, r"'9' matches no module"),
    (
        PrepareModuleInput(
            input_kwarg_layouts={"y": sw.Shard(0)}, desired_input_kwarg_layouts={"y": sw.Replicate()}
        ),
        lambda m: m["tp"],
        {"0"},
        r"Linear.forward has no argument 'y'; it has input",
    ),
]


@pytest.mark.parametrize(("style", "pick", "keys", "text"), STYLES)
def test_a_style_that_does_not_fit_changes_nothing(mesh, style, pick, keys, text):
    module = mlp()
    with pytest.raises(PlanError, match=text):
        parallelize_module(module, pick(mesh), dict.fromkeys(keys, style))
    assert not any(isinstance(p, sw.DTensor) for p in module.parameters())
    assert not module[0]._forward_pre_hooks


def test_the_axis_of_a_plan_is_named(mesh):
    other = sw.init_device_mesh("cpu", (2, 2), mesh_dim_names=("x", "y"))
    with pytest.raises(PlanError, match=r"without an axis 'tp': \(x=2, y=2\)"):
        parallelize_module(mlp(), other, {"0": "colwise"})


def test_a_module_is_distributed_once(mesh):
    module = sw.distribute_module(mlp(), mesh)
    with pytest.raises(sw.LayoutError, match="only be called once"):
        sw.distribute_module(module, mesh)
    with pytest.raises(PlanError, match=r"0.weight is already distributed, as \[6, 4\]"):
        parallelize_module(module, mesh, {"0": "colwise"})
    styled = parallelize_module(mlp(), mesh["tp"], {"0": ColwiseParallel()})
    with pytest.raises(PlanError, match="already distributed, by a style"):
        parallelize_module(styled, mesh["tp"], {"0": ColwiseParallel()})
    whole = sw.distribute_module(mlp(), mesh["tp"])
    with pytest.raises(PlanError, match=r"weight is already distributed, as \[6, 4\], and needs \[6:tp, 4\]"):
        parallelize_module(whole, mesh["tp"], {"0": ColwiseParallel()})


def test_parameters_on_another_device_and_things_that_are_no_modules(mesh):
    other = sw.init_device_mesh("cuda", (2, 2), mesh_dim_names=("dp", "tp"))
    text = r"0.weight on cpu.* and the mesh has cuda devices; module.to\('cuda'\) first"
    for plan in ({"0": "colwise"}, {"2.weight": "[o, i:tp]"}):
        with pytest.raises(PlanError, match=text):
            parallelize_module(mlp(), other, plan)
    for style in (ColwiseParallel(), SequenceParallel()):
        with pytest.raises(PlanError, match=r"weight on cpu.*module.to\('cuda'\) first"):
            parallelize_module(mlp(), other["tp"], {"2": style})
    with pytest.raises(sw.LayoutError, match=text):
        sw.distribute_module(mlp(), other)
    for call in (sw.distribute_module, lambda x, m: parallelize_module(x, m, {"": "colwise"})):
        with pytest.raises(TypeError, match="Tensor for a module"):
            call(torch.ones(3), mesh)


def test_layouts_of_values_that_are_not_there():
    with pytest.raises(sw.LayoutError, match="should have same length"):
        PrepareModuleOutput(output_layouts=(sw.Shard(0), None), desired_output_layouts=(sw.Shard(1),))
    with pytest.raises(sw.LayoutError, match="should not be None"):
        PrepareModuleInput(input_layouts=sw.Shard(0))
    with pytest.raises(TypeError, match="parallelize_plan"), sw.simulate(2):
        parallelize_module(mlp(), sw.init_device_mesh("cpu", (2,)), ["colwise"])


def test_no_plan_is_a_warning(mesh):
    with pytest.warns(UserWarning, match="No parallelize_plan"):
        parallelize_module(mlp(), mesh)


class _Own(ParallelStyle):
    """A style without a text of its own."""

    def _apply(self, module: nn.Module, device_mesh: sw.DeviceMesh) -> nn.Module:
        return sw.distribute_module(module, device_mesh)


def _different_structures() -> list[str]:
    """The errors on this rank: rank 2 has another size, another module, or a parameter on another mesh."""
    mesh = sw.init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
    odd = mesh.get_rank() == 2
    parallelize_module(nn.Linear(4, 4), mesh, _Own())
    distributed = sw.distribute_module(mlp(), mesh)
    calls = [
        lambda: parallelize_module(nn.Sequential(nn.Linear(4, 6 + odd)), mesh, {"0": "colwise"}),
        lambda: parallelize_module(
            mlp() if odd else mlp()[:2], mesh, {"0": "colwise", "2.weight": "[o, i:tp]"}
        ),
        lambda: parallelize_module(mlp(), mesh, {"0": "colwise" if odd else "colwize"}),
        lambda: parallelize_module(mlp(), mesh, {"0": "colwize"}),
        lambda: sw.distribute_module(distributed if odd else mlp(), mesh),
    ]
    errors = []
    for call in calls:
        try:
            call()
        except sw.LayoutError as error:
            errors.append(str(error))
    return errors


@pytest.mark.processes
def test_ranks_with_different_modules_raise_alike(workers: Workers):
    messages = workers.run(_different_structures)
    assert messages == [messages[0]] * 4
    sizes, missing, styles, unknown, twice = messages[0]
    assert "different structure: rank 0 has ['0.bias: (6,) torch.float32'" in sizes
    assert "rank 2 has ['0.bias: (7,)" in sizes
    assert "'2.weight' matches no module" in missing
    assert "unknown style 'colwize'" in styles
    assert unknown.startswith("parallelize_module got a plan with 1 problem")
    assert "the problem: distribute_module should only be called once" in twice
