"""Factories: the values of the torch function of the same name, in any layout, without creating the full tensor."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from tests.strategies import axes, layouts, shapes
from tests.values import blocks_of, same_bits, take
from torch.utils._python_dispatch import TorchDispatchMode

import shardwise as sw
from shardwise import LayoutError, Partial, Replicate, Shard, init_device_mesh, simulate
from shardwise.comm import counting
from shardwise.layout import Axes, block_shape, largest_block, owned, parse_layout

R = Replicate()
INTEGERS = [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8]
FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
DTYPES = [None, *INTEGERS, *FLOATS, torch.bool, torch.complex64]

CALLS = {
    "zeros": (5, 3),
    "ones": (5, 3),
    "empty": (5, 3),
    "full": ((5, 3), 2.5),
    "eye": (5, 3),
    "arange": (15,),
    "linspace": (0, 1, 15),
    "logspace": (0, 1, 15),
}
"""The positional arguments of a call of each factory."""


def mesh_of(on):
    return sw.DeviceMesh("cpu", torch.arange(on.count).view(on.sizes), mesh_dim_names=on.names)


@pytest.fixture
def square():
    with simulate(4):
        yield init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


def equal(a, b):
    """Whether two tensors are equal, NaN included; zeros may differ in sign."""
    return torch.allclose(a, b, rtol=0, atol=0, equal_nan=True)


def check(x, whole, layout, mesh, same=same_bits):
    """Assert that `x` has the bits of `whole` in this layout, in contiguous blocks."""
    assert x.sharding is layout
    assert x.device_mesh is mesh
    assert (x.dtype, x.shape, x.stride()) == (whole.dtype, whole.shape, whole.stride())
    assert (x.requires_grad, x.is_leaf) == (False, True)
    for coord, block in blocks_of(x, mesh).items():
        assert block.is_contiguous()
        assert same(block, take(whole, owned(layout, coord)))


@given(layouts(partial=False), st.sampled_from(["zeros", "ones", "full"]), st.sampled_from(DTYPES), st.data())
def test_constants_equal_torchs(layout, kind, dtype, data):
    fill = [data.draw(st.sampled_from([0, 1, 7, True, 2.5, math.inf]))] if kind == "full" else []
    assume(not (fill == [math.inf] and dtype in INTEGERS))
    whole = getattr(torch, kind)(layout.shape, *fill, dtype=dtype)
    with simulate(layout.axes.count):
        mesh = mesh_of(layout.axes)
        with counting() as ledger:
            x = getattr(sw, kind)(
                layout.shape, *fill, dtype=dtype, device_mesh=mesh, placements=layout.placements
            )
        assert ledger.collectives == 0
        check(x, whole, layout, mesh)


@given(axes(), st.integers(0, 13), st.none() | st.integers(0, 13), st.sampled_from(DTYPES), st.data())
def test_eye_equals_torchs(on, n, m, dtype, data):
    shape = (n, n if m is None else m)
    layout = data.draw(layouts(on, shape, partial=False))
    with simulate(on.count):
        mesh = mesh_of(on)
        x = sw.eye(n, m, dtype=dtype, device_mesh=mesh, placements=layout.placements)
        check(x, torch.eye(*shape, dtype=dtype), layout, mesh)


integers = st.integers(-50, 50)
numbers = integers | st.floats(-50, 50, allow_nan=False).map(lambda v: round(v, 3))


@given(axes(), st.data())
def test_arange_of_integers_equals_torchs_in_every_dtype(on, data):
    args = data.draw(st.lists(integers, min_size=1, max_size=2))
    step = data.draw(st.integers(1, 7))
    upward = (args[-1] >= 0) if len(args) == 1 else args[1] >= args[0]
    args = [*(args if len(args) == 2 else [0, *args]), step if upward else -step]
    dtype = data.draw(st.sampled_from([None, *INTEGERS, *FLOATS]))
    whole = torch.arange(*args, dtype=dtype)
    layout = data.draw(layouts(on, whole.shape, partial=False))
    with simulate(on.count):
        mesh = mesh_of(on)
        x = sw.arange(*args, dtype=dtype, device_mesh=mesh, placements=layout.placements)
        check(x, whole, layout, mesh)


@given(axes(), numbers, numbers, st.floats(0.1, 9), st.data())
def test_arange_of_floats_equals_torchs_up_to_the_last_bit(on, start, end, step, data):
    step = step if end >= start else -step
    dtype = data.draw(st.sampled_from([torch.float32, torch.float64]))
    whole = torch.arange(start, end, step, dtype=dtype)
    layout = data.draw(layouts(on, whole.shape, partial=False))
    with simulate(on.count):
        x = sw.arange(start, end, step, dtype=dtype, device_mesh=mesh_of(on), placements=layout.placements)
        assert (x.sharding, x.shape, x.dtype) == (layout, whole.shape, dtype)
        # torch's own last bit depends on the vector width of the processor
        ulp = torch.finfo(dtype).eps * max(abs(start), abs(end), 1e-9)
        torch.testing.assert_close(x.full_tensor().ranks[0], whole, rtol=0, atol=2 * ulp)


@given(axes(), numbers, numbers, st.integers(0, 40), st.data())
def test_linspace_is_bit_equal_to_torchs(on, start, end, steps, data):
    dtype = data.draw(st.sampled_from([None, *INTEGERS, *FLOATS]))
    assume(dtype is not torch.uint8 or (start >= 0 and end >= 0))  # torch wraps negative bounds around
    layout = data.draw(layouts(on, (steps,), partial=False))
    whole = torch.linspace(start, end, steps, dtype=dtype)
    with simulate(on.count), counting() as ledger:
        mesh = mesh_of(on)
        x = sw.linspace(start, end, steps, dtype=dtype, device_mesh=mesh, placements=layout.placements)
        check(x, whole, layout, mesh)
    assert ledger.collectives == 0


def test_linspace_of_complex_numbers():
    with simulate(3):
        mesh = init_device_mesh("cpu", (3,))
        x = sw.linspace(1 + 2j, -3j, 10, device_mesh=mesh, placements=[Shard(0)])
        torch.testing.assert_close(x.full_tensor().ranks[0], torch.linspace(1 + 2j, -3j, 10))


exponents = st.floats(-4, 4, allow_nan=False) | st.integers(-4, 4)
bases = st.sampled_from([10.0, 2, 0.5, 7.3, 1, 0.0, -3.0])


@given(axes(), exponents, exponents, st.integers(0, 40), bases, st.data())
def test_logspace_is_bit_equal_to_torchs(on, start, end, steps, base, data):
    dtype = data.draw(st.sampled_from([None, *INTEGERS, *FLOATS, torch.complex64, torch.complex128]))
    if dtype is not None and dtype.is_complex:
        start, end = start + 1j * data.draw(exponents), end - 1j * data.draw(exponents)
    elif dtype in INTEGERS:
        # powers that fit: torch leaves other conversions undefined
        start, end, base = min(abs(start), 2), min(abs(end), 2), max(base, 1)
    layout = data.draw(layouts(on, (steps,), partial=False))
    whole = torch.logspace(start, end, steps, base, dtype=dtype)
    with simulate(on.count), counting() as ledger:
        mesh = mesh_of(on)
        x = sw.logspace(start, end, steps, base, dtype=dtype, device_mesh=mesh, placements=layout.placements)
        check(x, whole, layout, mesh, equal if whole.dtype.is_complex or base < 0 else same_bits)
    assert ledger.collectives == 0


@pytest.mark.parametrize("dtype", [*FLOATS, torch.complex64, torch.complex128], ids=str)
def test_a_long_logspace_is_bit_equal_to_torchs(dtype):
    """Long enough for vectorized kernels, which round differently from those for single elements."""
    with simulate(2):
        mesh = init_device_mesh("cpu", (2,))
        x = sw.logspace(-3.3, 3.7, 5001, 7.3, dtype=dtype, device_mesh=mesh, placements=[Shard(0)])
        assert same_bits(x.full_tensor().ranks[0], torch.logspace(-3.3, 3.7, 5001, 7.3, dtype=dtype))


@pytest.mark.parametrize("kind", ["linspace", "logspace"])
def test_bounds_may_be_tensors_of_one_element(square, kind):
    low = sw.distribute_tensor(torch.tensor(0.25), square, [Partial(), R])
    x = getattr(sw, kind)(low, torch.tensor(2.0), 7, device_mesh=square, placements=[Shard(0), R])
    assert torch.equal(x.full_tensor().ranks[0], getattr(torch, kind)(0.25, 2.0, 7))


@given(layouts(partial=False), st.sampled_from(DTYPES))
def test_empty_has_blocks_of_the_right_shape_and_dtype(layout, dtype):
    with simulate(layout.axes.count):
        mesh = mesh_of(layout.axes)
        x = sw.empty(layout.shape, dtype=dtype, device_mesh=mesh, placements=layout.placements)
        assert (x.sharding, x.shape, x.dtype) == (layout, layout.shape, dtype or torch.get_default_dtype())
        for coord, block in blocks_of(x, mesh).items():
            assert tuple(block.shape) == block_shape(layout, coord)
            assert block.dtype is x.dtype


@pytest.mark.parametrize("kind", CALLS)
def test_the_default_dtype_is_torchs(square, kind):
    before = torch.get_default_dtype()
    try:
        for default in (torch.float32, torch.float64, torch.bfloat16):
            torch.set_default_dtype(default)
            assert (
                getattr(sw, kind)(*CALLS[kind], device_mesh=square).dtype
                is getattr(torch, kind)(*CALLS[kind]).dtype
            )
    finally:
        torch.set_default_dtype(before)


def test_full_takes_its_dtype_from_the_value(square):
    for value in (1, 2.5, True, 1j):
        assert sw.full((2,), value, device_mesh=square).dtype is torch.full((2,), value).dtype


@pytest.mark.parametrize("kind", ["zeros", "ones", "empty"])
def test_the_size_in_every_form(square, kind):
    make = getattr(sw, kind)
    for size in [(4, 2), ((4, 2),), ([4, 2],), (torch.Size([4, 2]),)]:
        assert make(*size, device_mesh=square).shape == torch.Size([4, 2])
    assert make(4, device_mesh=square).shape == torch.Size([4])
    assert make((), device_mesh=square).shape == make(device_mesh=square).shape == torch.Size([])


@pytest.mark.parametrize("kind", CALLS)
def test_requires_grad(square, kind):
    more = {"dtype": torch.float32} if kind == "arange" else {}
    x = getattr(sw, kind)(
        *CALLS[kind], device_mesh=square, placements=[Shard(0), R], requires_grad=True, **more
    )
    assert (x.requires_grad, x.is_leaf, x.grad) == (True, True, None)
    x.full_tensor().sum().backward()
    assert x.grad.placements == (Shard(0), R)
    assert torch.equal(x.grad.full_tensor().ranks[0], torch.ones(x.shape))


@pytest.mark.parametrize("kind", CALLS)
def test_default_mesh_and_placements(square, kind):
    make = getattr(sw, kind)
    with square:
        x, y = make(*CALLS[kind]), make(*CALLS[kind], placements=[Shard(0), R])
    assert x.device_mesh is y.device_mesh is square
    assert (x.placements, y.placements) == ((R, R), (Shard(0), R))


@pytest.mark.parametrize("kind", CALLS)
def test_uneven_empty_and_strided_blocks(kind):
    with simulate(4):
        mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
        count = math.prod(getattr(torch, kind)(*CALLS[kind]).shape)
        options = [[Shard(0)], [Shard(-1)]]
        if kind in ("arange", "linspace", "logspace"):
            options.append([Shard(0, factors=(5, count // 5), factor=1)])
        for placements in options:
            x = getattr(sw, kind)(*CALLS[kind], device_mesh=mesh, placements=placements)
            if kind != "empty":
                assert torch.equal(x.full_tensor().ranks[0], getattr(torch, kind)(*CALLS[kind]))
            assert len({b.shape for b in x.to_local().ranks}) > 1


def test_a_split_inner_factor_gives_each_rank_stripes():
    with simulate(2):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        layout, _ = parse_layout("[3 4:tp]", Axes((2,), ("tp",)))
        x = sw.arange(12, device_mesh=mesh, placements=layout.placements)
        assert [b.tolist() for b in x.to_local().ranks] == [[0, 1, 4, 5, 8, 9], [2, 3, 6, 7, 10, 11]]


def test_on_a_mesh_of_some_ranks():
    with simulate(5):
        mesh = sw.DeviceMesh("cpu", [4, 2])
        x = sw.arange(5, device_mesh=mesh, placements=[Shard(0)])
        assert {r: b.tolist() for r, b in x.to_local()._blocks.items()} == {4: [0, 1, 2], 2: [3, 4]}


class Largest(TorchDispatchMode):
    """Records the size of the largest tensor with data that any op returned."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for t in torch.utils._pytree.tree_leaves(out):
            if isinstance(t, torch.Tensor) and not t.is_meta:
                self.numel = max(self.numel, t.numel())
        return out


@pytest.mark.parametrize("kind", CALLS)
def test_nothing_larger_than_a_block_is_created(kind):
    spaced = (0, 1, 120_000)
    large = {"arange": (120_000,), "linspace": spaced, "logspace": spaced, "full": ((400, 300), 1.5)}
    times = 2 if kind == "logspace" else 1  # a strided buffer of exponents
    with simulate(8):
        mesh = init_device_mesh("cpu", (4, 2))
        for placements in ([Shard(0), Shard(0)], [Shard(0), Shard(-1)], [Shard(-1), R]):
            with Largest() as seen:
                x = getattr(sw, kind)(*large.get(kind, (400, 300)), device_mesh=mesh, placements=placements)
            assert 0 < seen.numel <= times * largest_block(x.sharding) < 120_000


@pytest.mark.parametrize("kind", CALLS)
def test_a_full_tensor_larger_than_any_memory(kind):
    n = 2**40
    large = {"eye": (2**20,), "linspace": (0, 1, n), "logspace": (0, 1, n), "full": ((n,), 1.5)}
    with simulate(1024):
        mesh = init_device_mesh("meta", (1024,))
        x = getattr(sw, kind)(*large.get(kind, (n,)), device_mesh=mesh, placements=[Shard(0)])
        assert x.is_meta
        assert x.numel() == n
        assert {b.numel() for b in x.to_local().ranks} == {2**30}


@pytest.mark.parametrize("kind", sorted(CALLS.keys() - {"empty", "zeros"}))
@pytest.mark.parametrize(
    "placements", [[Partial(), R], [Shard(0), Partial("max")], [Partial("avg"), Partial("sum")]]
)
def test_partial_is_an_error(square, kind, placements):
    with pytest.raises(LayoutError, match=rf"(?s)^{kind} .*P\(.*\n  why: .*nothing to reduce\.\n  fix: "):
        getattr(sw, kind)(*CALLS[kind], device_mesh=square, placements=placements)


def test_uninitialized_values_may_be_pending(square):
    x = sw.empty(4, 3, device_mesh=square, placements=[Shard(0), Partial("max")])
    assert x.placements == (Shard(0), Partial("max"))
    assert {tuple(b.shape) for b in x.to_local().ranks} == {(2, 3)}


@pytest.mark.parametrize("op", ["sum", "avg", "max", "min", "product"])
def test_zeros_may_be_pending(square, op):
    x = sw.zeros(4, 3, device_mesh=square, placements=[Shard(0), Partial(op)])
    assert x.placements == (Shard(0), Partial(op))
    assert torch.equal(x.full_tensor().ranks[0], torch.zeros(4, 3))


@pytest.mark.parametrize("kind", sorted(CALLS.keys() - {"empty", "zeros"}))
def test_partial_is_an_error_on_an_axis_of_one_rank_too(kind):
    with simulate(1), pytest.raises(LayoutError, match=rf"(?s)^{kind} .*P\(sum\).*\n  why: .*\n  fix: "):
        getattr(sw, kind)(*CALLS[kind], device_mesh=init_device_mesh("cpu", (1,)), placements=[Partial()])


@pytest.mark.parametrize("kind", CALLS)
def test_other_bad_input_names_the_factory(square, kind):
    make = getattr(sw, kind)
    with pytest.raises(LayoutError, match=rf"(?s)^{kind} .*\n  why: .*\n  fix: "):
        make(*CALLS[kind])  # no mesh
    with pytest.raises(LayoutError, match=rf"(?s)^{kind} .*sparse.*\n  why: .*\n  fix: "):
        make(*CALLS[kind], device_mesh=square, layout=torch.sparse_coo)
    with pytest.raises(LayoutError, match=r"(?s)same length.*\n  why: .*\n  fix: "):
        make(*CALLS[kind], device_mesh=square, placements=[R])
    with pytest.raises(LayoutError, match=r"(?s)Shard\(2\) .*\n  why: .*\n  fix: "):
        make(*CALLS[kind], device_mesh=square, placements=[Shard(2), R])
    with pytest.raises(TypeError, match=r"(?s)\n  why: .*\n  fix: "):
        make(*CALLS[kind], device_mesh="cpu", placements=[R, R])
    with pytest.raises(TypeError, match=rf"^{kind}\(\) got an unexpected keyword argument 'mesh'"):
        make(*CALLS[kind], mesh=square)


@pytest.mark.parametrize("size", [(2.5,), (3, 1.5), ("ab",), (None,), ((2, 1.0),)])
def test_sizes_are_integers(square, size):
    for kind in ("zeros", "ones", "empty"):
        with pytest.raises(TypeError, match="cannot be interpreted as an integer"):
            getattr(sw, kind)(*size, device_mesh=square)


def test_sizes_are_not_negative(square):
    for kind in ("zeros", "ones", "empty"):
        with pytest.raises(LayoutError, match=rf"(?s)^{kind} .*\(3, -1\).*\n  why: .*\n  fix: "):
            getattr(sw, kind)(3, -1, device_mesh=square)


@pytest.mark.parametrize(
    ("kind", "args", "dtype"),
    [
        ("linspace", (0, 300, 4), torch.int8),
        ("linspace", (0, 1, 4), torch.bool),
        ("linspace", (0, 1, -4), None),
        ("logspace", (0, 300, 4), torch.int8),
        ("logspace", (0, 1, 4), torch.bool),
        ("logspace", (0, 1, -4), None),
        ("arange", (5,), torch.bool),
        ("arange", (5,), torch.complex64),
        ("arange", (0, 5, 0), None),
        ("arange", (0, 5, -1), None),
        ("full", ((2,), 1e5), torch.int8),
        ("full", ((2,), 1j), torch.float32),
        ("eye", (-2,), None),
    ],
)
def test_arguments_that_torch_refuses_are_refused(square, kind, args, dtype):
    with pytest.raises(Exception) as theirs:  # noqa: PT011 - whatever torch raises
        getattr(torch, kind)(*args, dtype=dtype)
    with pytest.raises(theirs.type):  # a message of torch's or of ours
        getattr(sw, kind)(*args, dtype=dtype, device_mesh=square)


@pytest.mark.parametrize("args", [(0, 5, 0.5), (5, 0, -0.5), (0.5, 5, 1), (0, 2.5, 1), (0.7, 5.2, 1.4)])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8])
def test_fractions_in_an_arange_of_integers_mean_what_they_mean_in_torch(square, args, dtype):
    try:
        whole = torch.arange(*args, dtype=dtype, device="meta")
    except (ValueError, RuntimeError) as refused:  # torch 2.13 rounds the step first
        with pytest.raises(type(refused)):
            sw.arange(*args, dtype=dtype, device_mesh=square)
    else:
        x = sw.arange(*args, dtype=dtype, device_mesh=square, placements=[Shard(0), R])
        assert x.shape == whole.shape
        assert torch.equal(x.full_tensor().ranks[0], torch.arange(*args, dtype=dtype))


def test_integers_cannot_require_grad(square):
    with pytest.raises(RuntimeError, match="can require gradients"):
        sw.arange(5, device_mesh=square, requires_grad=True)


@given(shapes(max_dims=2, max_size=5), st.data())
def test_the_value_does_not_depend_on_the_layout(shape, data):
    on = Axes((2, 2), ("dp", "tp"))
    a, b = (data.draw(layouts(on, shape, partial=False)) for _ in range(2))
    with simulate(4):
        mesh = mesh_of(on)
        x, y = (sw.full(shape, 3, device_mesh=mesh, placements=layout.placements) for layout in (a, b))
        assert torch.equal(x, y)
        for one, other in itertools.pairwise(x.full_tensor().ranks):
            assert torch.equal(one, other)
