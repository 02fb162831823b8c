"""`torch.compile` of programs whose sizes vary: one graph for all sizes after the first, which sends what eager code sends.

CI compiles a part of the programs; SHARDWISE_DEEP=1 all of them, with all backends.
"""

import gc
import os
import warnings
from collections import Counter

import pytest
import torch
import torch.distributed as dist
from tests.compile.compile_matrix import describe, differences, run
from tests.compile.dynamic_programs import SPLIT, UNSPLIT
from tests.compile.matrix import S0, R, tensor
from tests.compile.uneven_programs import UNEVEN
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounterWithBackend

import shardwise as sw
from shardwise.comm.launch import Workers
from shardwise.layout import Spec

DEEP = os.environ.get("SHARDWISE_DEEP") == "1"
PROGRAMS = UNSPLIT | SPLIT
QUICK = """linear block_of_varying_batch split_vocabulary norms_over_split_dim reads_layouts factories linear_rows
redistribute_rows sequence_parallel dropout flattened_with_inner_split groups_of_rows expanded_rows classes""".split()
SIZES = (3, 5, 4, 8, 6)
pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def pair():
    """Two processes in one gloo group."""
    with Workers(2, timeout=900) as team:
        yield team


def one_axis():
    warnings.simplefilter("ignore")
    torch._dynamo.reset()
    return sw.init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))


def check(name, backend, sizes=SIZES, **options):
    """The number of graphs after each size, or what is wrong."""
    mesh = one_axis()
    programs = PROGRAMS if sizes == SIZES else UNEVEN
    fn, arguments = programs[name](mesh)
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(fn, backend=counter, fullgraph=True, **options)
    graphs = []
    for n in sizes:
        expected, after = run(fn, without_gradients(fn, arguments(n)))
        try:
            found, position = run(compiled, without_gradients(fn, arguments(n)))
        except Exception as error:
            return f"{n}: {describe(error)}"
        if wrong := differences(expected, found):
            return f"{n}: {wrong}"
        if not torch.equal(after, position):
            return f"{n}: the stream is elsewhere"
        graphs.append(counter.frame_count)
    return graphs


def without_gradients(fn, args):
    """The arguments, after gradients of earlier calls were removed from them and from parameters."""
    for t in [*args, *(fn.parameters() if isinstance(fn, torch.nn.Module) else ())]:
        t.grad = None
    return args


def check_all(names, backend, sizes=SIZES):
    return {name: check(name, backend, sizes) for name in names}


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"] if DEEP else ["aot_eager"])
def test_one_graph_after_the_first_size(pair, backend):
    for found in pair.run(check_all, list(PROGRAMS) if DEEP else QUICK, backend):
        wrong = {k: v for k, v in found.items() if v != [1, 2, 2, 2, 2]}
        assert not wrong, wrong


# ---- what the graphs send


def collectives(name, sizes, dynamic):
    """By size, the collectives of the forward and the backward pass."""
    mesh = one_axis()
    fn, arguments = PROGRAMS[name](mesh)
    seen = Counter()

    def keep(gm, inputs):
        kinds = [str(n.target) for n in gm.graph.nodes if "c10d" in str(n.target)]

        def call(args):
            seen.update(kinds)
            return gm(*args)

        call._boxed_call = True
        return call

    backend = aot_autograd(fw_compiler=keep, bw_compiler=keep)
    compiled = torch.compile(fn, backend=backend, fullgraph=True, dynamic=dynamic)
    out = {}
    for n in sizes:
        if dynamic is False:
            torch._dynamo.reset()
        seen.clear()
        result = compiled(*arguments(n))
        result.backward(torch.ones_like(result))
        out[n] = dict(seen)
    return out


@pytest.mark.parametrize("name", [*QUICK, "attention"] if DEEP else ["linear_rows", "split_vocabulary"])
def test_a_graph_for_all_sizes_sends_what_a_graph_for_one_size_sends(pair, name):
    for dynamic, static in pair.run(compare_collectives, name, SIZES):
        assert dynamic == static


def compare_collectives(name, sizes):
    return collectives(name, sizes, None), collectives(name, sizes, False)


def crossing(sizes):
    """A product for which it is cheaper to move the smaller operand; the graphs, and what is wrong."""
    mesh = one_axis()
    w = tensor(mesh, 6, 6, seed=1)
    counter = CompileCounterWithBackend("aot_eager")

    def fn(x, w):
        return x @ w

    with sw.costs(sw.CostModel(latency=0.0, bandwidth=1.0)):
        step = torch.compile(fn, backend=counter, fullgraph=True)
        wrong = []
        for n in sizes:
            x = tensor(mesh, 2 * n, 6)
            out, expected = step(x, w), fn(x, w)
            if out.placements != expected.placements or not torch.allclose(
                out.full_tensor(), expected.full_tensor()
            ):
                wrong.append((n, out.placements, expected.placements))
    return counter.frame_count, wrong


def test_where_another_plan_is_cheaper_there_is_another_graph(pair):
    for graphs, wrong in pair.run(crossing, (8, 10, 12, 2, 3, 14)):
        assert not wrong
        assert graphs <= 4  # of the first size, dynamic, and on the other side of the crossing twice at most


# ---- other ways to ask for it


def marked():
    """The graphs with `mark_dynamic`, and with `dynamic=True`."""
    mesh = one_axis()
    counter = CompileCounterWithBackend("aot_eager")
    step = torch.compile(lambda x: (x * 2).redistribute(tp=R).sum(1), backend=counter, fullgraph=True)
    for n in SIZES:
        x = tensor(mesh, 2 * n, 6)
        torch._dynamo.mark_dynamic(x, 0)
        step(x).sum().backward()
    first = counter.frame_count
    return first, check("norm_of_rows", "aot_eager", dynamic=True)


def test_marked_dims_and_dynamic_programs(pair):
    for graphs, counts in pair.run(marked):
        assert graphs == 1
        assert counts == [1, 1, 1, 1, 1]


# ---- uneven blocks


UNEVEN_SIZES = (7, 9, 10, 13, 16)
QUICK_UNEVEN = """linear data_parallel_loss sequence_parallel_mlp norms embedding_and_loss reductions gathered_columns
split_by_it reduced_and_split from_blocks dropout variance argument_in_place slices rolled convolution joined
flattened_with_outer_batch indices_of_largest argument_and_view views_as_arguments""".split()


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"] if DEEP else ["aot_eager"])
def test_one_graph_for_sizes_that_the_axis_divides_and_others(pair, backend):
    for found in pair.run(check_all, list(UNEVEN) if DEEP else QUICK_UNEVEN, backend, UNEVEN_SIZES):
        wrong = {k: v for k, v in found.items() if v != [1, 2, 2, 2, 2]}
        assert not wrong, wrong


def test_one_graph_on_three_ranks():
    names = (
        set(UNEVEN) - {"slices", "joined_with_longer_ones"}
        if DEEP
        else ["linear", "gathered_columns", "reduced_and_split"]
    )
    with Workers(3, timeout=900) as team:
        for found in team.run(check_all, sorted(names), "aot_eager", UNEVEN_SIZES):
            wrong = {k: v for k, v in found.items() if v != [1, 2, 2, 2, 2]}
            assert not wrong, wrong


def test_blocks_of_no_and_one_element():
    """The last of four ranks has blocks of 1, 0, 1, 1 and 4 rows. Torch's own code asks whether there is none."""
    names = list(UNEVEN) if DEEP else ["pointwise", "data_parallel_loss", "gathered_columns", "convolution"]
    with Workers(4, timeout=900) as team:
        *others, last = team.run(check_all, names, "aot_eager", UNEVEN_SIZES)
    for found in others:
        assert all(type(v) is list for v in found.values()), found
        assert DEEP or all(v[-1] <= 3 for v in found.values()), found
    assert all(type(v) is list for v in last.values()), last
    assert DEEP or all(v[-1] <= 4 for v in last.values()), last


def uneven():
    """Whether results are right for sizes that the axis divides and others, in any order."""
    mesh = one_axis()
    counter = CompileCounterWithBackend("aot_eager")

    def fn(x):
        return (x * 2).sin().redistribute(tp=R) + x.sum(0)

    step = torch.compile(fn, backend=counter, fullgraph=True)
    found = []
    for n in (4, 5, 6, 7, 1, 8, 5, 2, 3, 10, 7):
        x, y = tensor(mesh, n, 3), tensor(mesh, n, 3)
        out, expected = step(x), fn(y)
        out.sum().backward()
        expected.sum().backward()
        same = torch.allclose(out.full_tensor(), expected.full_tensor())
        found.append(same and torch.allclose(x.grad.full_tensor(), y.grad.full_tensor()))
    return found


def test_uneven_blocks(pair):
    for found in pair.run(uneven):
        assert all(found)


def test_a_split_dim_that_is_static_is_guarded():
    # blocks of 3 rows are those of 5 and of 6 rows, on the first rank
    with sw.compile.fake_mesh((2,), ("tp",)) as mesh:
        torch._dynamo.reset()
        step = torch.compile(lambda x: x * x.shape[0], backend="eager", fullgraph=True, dynamic=False)
        assert [step(tensor(mesh, n, 4, at=S0))._spec.shape[0] for n in (5, 6)] == [5, 6]


def test_symbols_of_earlier_programs_are_forgotten():
    def alive():
        gc.collect()
        return sum(spec.is_symbolic for spec in list(Spec._interned.values()))

    with sw.compile.fake_mesh((2,), ("tp",)) as mesh:
        counts = []
        for _ in range(5):
            torch._dynamo.reset()
            step = torch.compile(lambda x: (x * 2).redistribute(tp=R) + x.sum(0), backend="aot_eager")
            for n in (4, 6):
                step(tensor(mesh, n, 4, grad=False))
            counts.append(alive())
    assert counts[0] > 2
    # torch keeps the input of each program, in a cycle that passes through C++
    assert counts[-1] <= counts[0] + len(counts) - 1
