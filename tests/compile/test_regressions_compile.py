"""What users of other libraries reported of compilers and captured steps, by the numbers of the list of regressions: 97 to 110."""

import warnings

import pytest
import torch
from tests.compile import regressions
from tests.compile.matrix import S0, S1, R, tensor
from tests.values import same_bits
from torch import nn
from torch._functorch import aot_autograd
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.fx.experimental import proxy_tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import shardwise as sw
from shardwise import checkpoint as checkpoints
from shardwise.comm.launch import Workers
from shardwise.compile import EXACT, NONE, Passes, capture, fake_mesh
from shardwise.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


@pytest.fixture(scope="module")
def pair():
    """Two processes in one gloo group."""
    with Workers(2, timeout=900) as team:
        yield team


def simulated_axis(name="tp", size=2):
    return sw.init_device_mesh("cpu", (size,), mesh_dim_names=(name,))


def whole(x):
    out = x.full_tensor() if isinstance(x, sw.DTensor) else x
    return out.ranks[-1] if isinstance(out, sw.PerRank) else out


@pytest.mark.processes
def test_r97_tangents_of_other_placements_and_kinds(pair):
    for found in pair.run(regressions.compare_tangents):
        assert set(found.values()) == {True}, found


@pytest.mark.processes
def test_r98_results_of_collectives_are_waited_for(pair):
    assert pair.run(regressions.waits) == [(True, [])] * 2


@pytest.mark.processes
def test_r99_additions_with_dynamic_shapes(pair):
    for found in pair.run(regressions.additions):
        assert set(found.values()) == {1}, found


@pytest.mark.processes
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_r100_output_layout_of_a_column_split(pair, backend):
    assert pair.run(regressions.column_output, backend) == [True, True]


@pytest.mark.processes
def test_r101_casts_inside_a_graph(pair):
    for difference, rounding in pair.run(regressions.rotary):
        assert difference <= rounding < 0.1


def lookups(mesh):
    """A function of blocks that looks numbers up, and its arguments."""

    def f(index, table, x):
        index, table, x = (sw.DTensor.from_local(t, mesh, [p]) for t, p in ((index, R), (table, S0), (x, S0)))
        out = functional.embedding(index, table), x[index[:2] % 4].sum(0), x.softmax(0), x[1:3]
        return [t.to_local() for t in (*out, x.gather(0, index[:, None].expand(4, 6) % 4))]

    return f, lambda seed: (
        torch.randint(10, (4,), generator=torch.Generator().manual_seed(seed)),
        torch.arange(30.0).view(5, 6) * seed,
        torch.arange(12.0).view(2, 6) + seed,
    )


@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
def test_r102_traced_graphs_read_nothing_that_was_not_written(mode):
    with fake_mesh((2,), ("tp",)) as mesh:
        f, args = lookups(mesh)
        graph = make_fx(f, tracing_mode=mode)(*args(1))
        for node in graph.graph.nodes:
            assert "meta" not in str(node.kwargs.get("device", ""))
            if "empty" in str(node.target):
                first = next(n for n in graph.graph.nodes if n in node.users)
                assert str(first.target).rpartition(".")[0].endswith("_"), (node, first)  # it is filled
        for seed in (1, 2, 3):
            assert all(map(torch.equal, graph(*args(seed)), f(*args(seed))))


@pytest.mark.processes
@pytest.mark.parametrize("kind", ["tp", "fsdp", "ddp"])
def test_r103_checkpointed_blocks_with_static_and_dynamic_graphs(pair, kind):
    for found in pair.run(regressions.compare_checkpointed, kind):
        assert max(found) == 0


@pytest.mark.parametrize("kind", ["AC(compile)", "compile(AC)", "compile(all)"])
def test_r104_keys_of_checkpoints_do_not_name_wrappers(tmp_path, kind):
    def build(seed):
        torch.manual_seed(seed)
        layers = [nn.Linear(4, 4), nn.Linear(4, 4)]
        model = nn.Sequential(*layers)
        return parallelize_module(model, mesh, {"0": ColwiseParallel(), "1": RowwiseParallel()})

    def wrap(m):
        if kind == "AC(compile)":
            return checkpoint_wrapper(torch.compile(m, backend="eager"))
        return torch.compile(checkpoint_wrapper(m), backend="eager")

    with sw.simulate(2):
        mesh = simulated_axis()
        model, plain = build(0), build(1)
        expected = {k: whole(v).clone() for k, v in model.state_dict().items()}
        wrapped = torch.compile(model) if kind == "compile(all)" else nn.Sequential(*map(wrap, model))
        checkpoints.save({"model": wrapped}, tmp_path / "a")
        checkpoints.load(tmp_path / "a", {"model": plain})
        assert all(torch.equal(whole(v), expected[k]) for k, v in plain.state_dict().items())
        checkpoints.save({"model": plain}, tmp_path / "b")
        with torch.no_grad():
            for p in wrapped.parameters():
                p.zero_()
        checkpoints.load(tmp_path / "b", {"model": wrapped})
        assert all(torch.equal(whole(v), expected[k]) for k, v in model.state_dict().items())


def decisions(placed):
    """What a policy that keeps every second product decides, for each of three layers, and the gradients."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4)) for _ in range(3)]
    if placed:
        plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        layers = [parallelize_module(layer, simulated_axis(), plan) for layer in layers]
    seen = []

    def contexts():
        seen.append([])
        own = seen[-1]

        def policy(ctx, op, *args, **kwargs):
            if op not in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
                return CheckpointPolicy.PREFER_RECOMPUTE
            own.append(len(own) % 2 == 0)
            return CheckpointPolicy.MUST_SAVE if own[-1] else CheckpointPolicy.PREFER_RECOMPUTE

        return create_selective_checkpoint_contexts(policy)

    x = torch.arange(8.0).view(2, 4)
    for layer in layers:
        x = checkpoint(layer, x, use_reentrant=False, context_fn=contexts)
    x.square().sum().backward()
    return seen, [whole(p.grad) for layer in layers for p in layer.parameters()]


def test_r105_policies_decide_for_each_layer_as_for_plain_tensors():
    seen, grads = decisions(placed=False)
    with sw.simulate(2):
        ours, found = decisions(placed=True)
        assert ours == seen
        assert all(map(torch.allclose, found, grads))


def test_r105_passes_say_what_they_did():
    with fake_mesh((2,), ("dp",)) as mesh:
        model, x, step = step_of(mesh)
        program = capture(step, x, modules=[model])
        assert program.optimize(EXACT).passes.keys() >= {"reuse", "bucket"}


def layers_of(mesh, count=5):
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(6, 6) for _ in range(count)))
    for layer in model:
        for name, p in list(layer.named_parameters()):
            setattr(layer, name, nn.Parameter(sw.distribute_tensor(p.detach(), mesh, [R])))
    return model


def step_of(mesh):
    model = layers_of(mesh)
    x = sw.distribute_tensor(torch.randn(12, 6, generator=torch.Generator().manual_seed(1)), mesh, [S0])

    def step(x):
        model(x).square().mean().backward()

    return model, x, step


def trained(mesh, captured):
    """Parameters and the state of an optimizer whose order is not that of the module, after some steps."""
    model = layers_of(mesh)
    parameters = list(model.parameters())
    groups = [{"params": parameters[::-2]}, {"params": parameters[-2::-2], "lr": 0.05}]
    optimizer = torch.optim.AdamW(groups, lr=0.1)
    x = sw.distribute_tensor(torch.arange(36.0).view(6, 6) / 20, mesh, [S0])
    step = sw.compile.whole_step(model, optimizer, lambda m, x: m(x).square().mean())
    for _ in range(3):
        if captured:
            step(x)
        else:
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    if captured:
        assert step.reason is None
    state = optimizer.state_dict()["state"]
    return [*map(whole, parameters), *(whole(state[i][k]) for i in sorted(state) for k in sorted(state[i]))]


def test_r106_states_of_an_optimizer_in_another_order():
    with sw.simulate(2):
        mesh = simulated_axis("dp")
        eager, captured = trained(mesh, False), trained(mesh, True)
        assert all(map(same_bits, eager, captured))


@pytest.mark.parametrize("at", [S0, S1, R], ids=str)
def test_r107_anomaly_mode(at):
    with sw.simulate(2), torch.autograd.set_detect_anomaly(True):
        mesh = simulated_axis()
        x, y = tensor(mesh, 4, 6, at=at), tensor(mesh, 4, 6, at=R)
        (x.sin() @ x.t()).sum().backward()
        with torch.autograd.set_detect_anomaly(False):
            (y.sin() @ y.t()).sum().backward()
        assert torch.allclose(whole(x.grad), whole(y.grad))
        zero = torch.ones(4, 6)
        zero[0, 0] = 0  # in the block of the first rank
        z = sw.distribute_tensor(zero, mesh, [at]).requires_grad_()
        with pytest.raises(RuntimeError, match="SqrtBackward0' returned nan"):
            (z.sqrt() * (z != 0)).sum().backward()


def test_r108_torch_is_changed_once():
    def functions():
        return {
            (m.__name__, k): v
            for m in (proxy_tensor, aot_autograd)
            for k, v in vars(m).items()
            if callable(v)
        }

    with fake_mesh((2,), ("tp",)) as mesh:
        stages = [layers_of(mesh, 1) for _ in range(3)]
        x = tensor(mesh, 4, 6, at=R)
        torch.compile(stages[0], backend="aot_eager")(x)
        before = functions()
        for stage in stages[1:]:
            torch.compile(stage, backend="aot_eager", dynamic=True)(x).sum().backward()
            stage.compile(backend="aot_eager")
            stage(x)
        assert functions() == before


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("bucket", [1, 200, 1 << 20])
def test_r109_buckets_do_not_change_sums(size, bucket):
    with sw.simulate(size):
        mesh = simulated_axis("dp", size)
        eager, x, step = step_of(mesh)
        step(x)
        found = []
        for passes in (NONE, Passes(bucket=bucket), Passes(bucket=bucket, overlap=0)):
            model, x, step = step_of(mesh)
            capture(step, x, modules=[model]).optimize(passes).run(x)
            found.append([whole(p.grad) for p in model.parameters()])
        for grads in found:
            assert all(map(same_bits, grads, (whole(p.grad) for p in eager.parameters())))


def test_r110_compiled_code_on_tensors_of_all_ranks():
    def f(x, y):
        return (x * y).sin().sum(0) + y.amax()

    compiled = torch.compile(f, backend="aot_eager")
    with sw.simulate(3), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        mesh = simulated_axis("dp", 3)
        x, y = (tensor(mesh, 7, 4, seed=s) for s in (0, 1))
        assert same_bits(whole(compiled(x, y)), whole(f(x, y)))
        a, b = x.to_local(), y.to_local()  # other blocks on each rank
        for got, expected in zip(compiled(a, b).ranks, f(a, b).ranks, strict=True):
            assert same_bits(got, expected)
