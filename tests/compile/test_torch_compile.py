"""`torch.compile` of programs on DTensors: the matrix, tangents, export, guards, caches, simulation.

CI compiles a part of the matrix; SHARDWISE_DEEP=1 all of it, with all backends. `compile_matrix.py` prints a table.
"""

import os
import subprocess
import sys
import warnings
from contextlib import ExitStack

import pytest
import torch
from tests.compile.compile_matrix import BACKENDS, check_all
from tests.compile.matrix import PROGRAMS, S0, S1, R, tensor
from torch import nn
from torch._dynamo.eval_frame import _debug_get_cache_entry_list
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters
from torch._functorch.aot_autograd import aot_export_joint_with_descriptors

import shardwise as sw
from shardwise.comm.launch import Workers
from shardwise.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    fully_shard,
    loss_parallel,
    parallelize_module,
)

DEEP = os.environ.get("SHARDWISE_DEEP") == "1"
QUICK = """pointwise split_vocabulary convolution_with_halo dropout random_factories from_local redistribute
redistribute_async distribute_tensor factories local_mapped several_outputs checkpointed_dropout tp_mlp loss_parallelized
fully_sharded adamw item_branch""".split()
pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def pair():
    """Two processes in one gloo group."""
    with Workers(2, timeout=900) as team:
        yield team


def test_size_of_the_matrix():
    assert len(PROGRAMS) >= 60


@pytest.mark.parametrize("backend", BACKENDS if DEEP else ["eager", "aot_eager"])
def test_matrix(pair, backend):
    quick = QUICK if backend == "aot_eager" else ["checkpointed_dropout", "loss_parallelized"]
    for found in pair.run(check_all, list(PROGRAMS) if DEEP else quick, backend):
        assert set(found.values()) == {"ok"}, {k: v for k, v in found.items() if v != "ok"}


def test_inductor(pair):
    for found in pair.run(check_all, ["dropout"], "inductor"):
        assert set(found.values()) == {"ok"}, found


def one_axis():
    return sw.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))


def full(x):
    return x.full_tensor() if isinstance(x, sw.DTensor) else x


def double(x):
    return x * 2


# ---- guards and graphs


def count_graphs():
    """The graphs of repeated steps, of another layout, in another policy, and of 5 sizes."""
    warnings.simplefilter("ignore")
    torch._dynamo.reset()
    mesh, counts = one_axis(), []
    counter = CompileCounterWithBackend("aot_eager")
    step = torch.compile(lambda x: (x * 2).redistribute(tp=R).sum(), backend=counter, fullgraph=True)
    for at in (S0, S0, S0, S1, S1, S0):
        step(tensor(mesh, 4, 6, at=at)).backward()
        counts.append(counter.frame_count)
    with sw.costs(sw.CostModel(latency=1.0, bandwidth=1.0)):
        step(tensor(mesh, 4, 6))
    counts.append(counter.frame_count)
    torch._dynamo.reset()
    sizes = []
    for n in range(3, 8):
        x = tensor(mesh, 4, n)
        sizes.append(torch.allclose(full(step(x)), full((x * 2).sum())))
    return counts, sizes


def test_recompiles(pair):
    for counts, sizes in pair.run(count_graphs):
        assert counts == [1, 1, 1, 2, 2, 2, 3]
        assert all(sizes)


def guards_of(fn, args):
    """The number of leaf guards of the compiled code of a function."""
    torch._dynamo.reset()
    torch.compile(fn, backend="eager", fullgraph=True)(*args)
    text = str(_debug_get_cache_entry_list(fn.__code__)[0].guard_manager)
    return sum("+- " in line and "GuardManager" not in line for line in text.splitlines())


def test_guards():
    # torch's DTensor has 27 and 17 for the same programs, torch 2.13; one of ours is for the policy and the cost model
    with sw.compile.fake_mesh((2,), ("tp",)) as mesh:
        assert guards_of(*PROGRAMS["pointwise"](mesh)) <= 27
        assert guards_of(*PROGRAMS["redistribute"](mesh)) <= 18


def test_a_scope_in_compiled_code_ends_with_it():
    with sw.compile.fake_mesh((2,), ("tp",)) as mesh:
        x, plain = tensor(mesh, 4, 6), torch.ones(4, 6)

        def scoped(x, y):
            with loss_parallel():
                return nn.functional.l1_loss(x, y)

        def failing(x, y):
            with loss_parallel():
                return nn.functional.l1_loss(x, y.view(5, 5))

        torch.compile(scoped, backend="aot_eager", fullgraph=True)(x, plain)
        with pytest.raises(Exception, match="invalid for input"):
            torch.compile(failing, backend="aot_eager", fullgraph=True)(x, plain)
        with pytest.raises(Exception, match="plain tensor"):
            torch.compile(lambda x, y: x + y, backend="aot_eager", fullgraph=True)(x, plain)
        with pytest.raises(sw.PlainTensorError):
            x + plain


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_an_error_while_compiled_code_runs_leaves_the_scope(backend):
    with sw.compile.fake_mesh((2,), ("tp",)) as mesh:
        x, plain = tensor(mesh, 4, 6), torch.ones(4, 6)

        def scoped(x, plain, index):
            with sw.policy(plain="replicate"):
                return nn.functional.embedding(index, plain) + x.sum()

        f = torch.compile(scoped, backend=backend, fullgraph=True)
        assert f(x, plain, torch.tensor(3)).shape == (6,)
        with pytest.raises(IndexError):
            f(x, plain, torch.tensor(4))  # found when the embedding runs, inside the scope
        with pytest.raises(sw.PlainTensorError):
            x + plain


# ---- caches on disk

CACHE_PROGRAM = """
import sys, torch, warnings
warnings.simplefilter("ignore")
import shardwise as sw
from torch._dynamo.utils import counters
with sw.compile.fake_mesh((2,), ("tp",), rank=int(sys.argv[1])) as mesh:
    x = sw.ones(4, 6, device_mesh=mesh, placements=[sw.Shard(0)], requires_grad=True)
    out = torch.compile(lambda x: (x * 2).redistribute(tp=sw.Shard(1)), fullgraph=True)(x)
    out.sum().full_tensor().backward()
    assert out.device_mesh is mesh and x.grad.device_mesh is mesh
    sys.stdout.write(f"{counters['aot_autograd']['autograd_cache_hit']} {counters['inductor']['fxgraph_cache_hit']}")
"""


@pytest.mark.skipif(not DEEP, reason="three processes that import and compile")
def test_caches_hit_in_the_next_process(tmp_path):
    def hits(rank):
        env = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
        command = [sys.executable, "-c", CACHE_PROGRAM, str(rank)]
        return subprocess.run(command, env=env, check=True, capture_output=True, text=True).stdout

    assert hits(0) == "0 0"
    assert hits(0) == "1 2"
    assert hits(1).startswith("0")  # programs of ranks differ, and ranks share the cache


def test_hashes_are_stable_and_differ():
    def hash_of(mesh, at):
        return sw.ones(4, 6, device_mesh=mesh, placements=[at])._stable_hash_for_caching()

    with sw.compile.fake_mesh((2,), ("tp",)) as mesh:
        first = hash_of(mesh, S0)
        assert first == hash_of(mesh, S0) != hash_of(mesh, S1)
        with sw.policy(plain="replicate"):
            assert hash_of(mesh, S0) != first
    with sw.compile.fake_mesh((2,), ("tp",), rank=1) as mesh:
        assert hash_of(mesh, S0) != first


# ---- export, compiled autograd


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x):
        return self.last(self.first(x).relu())


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("at", [R, S0, S1], ids=str)
def test_export_for_all_sizes(at, strict):
    sizes = 2 * torch.export.Dim("half") if at == S0 else torch.export.Dim("size")
    with sw.compile.fake_mesh((2,), ("tp",)) as mesh:
        model = sw.distribute_module(nn.Linear(6, 4), mesh)
        step = torch.export.export(
            model, (tensor(mesh, 4, 6, at=at),), dynamic_shapes={"input": {0: sizes}}, strict=strict
        ).module()
        for n in (4, 6, 10):
            x = tensor(mesh, n, 6, at=at)
            found, expected = step(x), model(x)
            assert found.placements == expected.placements
            assert found.shape == expected.shape
            if at != S1:  # which sends nothing
                assert torch.allclose(found._local_tensor, expected._local_tensor)


@pytest.mark.parametrize("strict", [False, True])
def test_export(strict):
    with sw.compile.fake_mesh((2,), ("tp",)) as mesh:
        program = torch.export.export(
            sw.distribute_module(Model(), mesh), (tensor(mesh, 4, 6),), strict=strict
        )
        targets = [str(n.target) for n in program.graph.nodes if n.op == "call_function"]
        assert targets == ["aten.linear.default", "aten.relu.default", "aten.linear.default"]


def test_joint_graph():
    with sw.compile.fake_mesh((2,), ("tp",)) as mesh, ExitStack() as stack:
        model = sw.distribute_module(Model(), mesh)
        joint = aot_export_joint_with_descriptors(stack, model, (tensor(mesh, 4, 6),))
        kinds = {str(n.target) for n in joint.graph_module.graph.nodes if n.op == "call_function"}
        assert "aten.threshold_backward.default" in kinds
        assert not any("shardwise" in k for k in kinds)


def compiled_backward():
    mesh, found = one_axis(), []
    for compiled in (False, True):
        torch.manual_seed(0)
        model, x = sw.distribute_module(Model(), mesh), tensor(mesh, 4, 6)
        loss = model(x).square().sum()
        if compiled:
            compiler = torch.compile(backend="aot_eager", fullgraph=True)
            with torch._dynamo.compiled_autograd._enable(compiler):
                loss.backward()
        else:
            loss.backward()
        found.append([full(x.grad), *(full(p.grad) for p in model.parameters())])
    return all(map(torch.allclose, *found))


def test_compiled_autograd(pair):
    assert pair.run(compiled_backward) == [True, True]


# ---- simulation


def test_simulate_runs_compiled_functions_eagerly_and_warns_once():
    f = torch.compile(double, backend="aot_eager", fullgraph=True)
    with sw.simulate(2):
        x = tensor(one_axis(), 4, 6)
        with pytest.warns(UserWarning, match="runs functions eagerly inside simulate"):
            assert torch.equal(f(x).full_tensor().ranks[1], double(x).full_tensor().ranks[1])
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            f(x)
    counters.clear()
    assert torch.equal(f(torch.ones(2)), torch.full((2,), 2.0))
    assert counters["stats"]["unique_graphs"] == 1  # outside it compiles again


# ---- data parallelism: settings that a graph cannot have


def test_gradient_accumulation_breaks_the_graph():
    with sw.compile.fake_mesh((2,), ("dp",)) as mesh:
        model = fully_shard(nn.Sequential(nn.Linear(6, 6)), mesh=mesh)
        model.set_requires_gradient_sync(False)
        with pytest.raises(torch._dynamo.exc.Unsupported):
            torch.compile(model, backend="aot_eager", fullgraph=True)(torch.ones(2, 6))


def test_no_tensor_class_and_no_call_is_left_in_the_graph():
    seen = []

    def keep(gm, inputs):
        seen.append(gm)
        return gm

    backend = torch._dynamo.backends.common.aot_autograd(fw_compiler=keep)
    with sw.compile.fake_mesh((2,), ("tp",)) as mesh:
        model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 6))
        parallelize_module(model, mesh, {"0": ColwiseParallel(), "1": RowwiseParallel()})
        torch.compile(model, backend=backend, fullgraph=True)(torch.ones(4, 6))
    kinds = [str(n.target) for n in seen[0].graph.nodes if n.op == "call_function"]
    assert [k for k in kinds if "c10d" in k] == [
        "_c10d_functional.all_reduce.default",
        "_c10d_functional.wait_tensor.default",
    ]
    assert not any("shardwise" in k or "run_in_graph" in k for k in kinds)
