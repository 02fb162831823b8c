"""Functions under the private names of torch's modules: what they return, and the words of their errors."""

from __future__ import annotations

import copy
import importlib
import itertools
import math
import threading

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import _set_thread_isolation_mode
from torch.testing._internal.distributed.multi_threaded_pg import _install_threaded_pg, _uninstall_threaded_pg

import shardwise as sw
from shardwise import DTensor, LayoutError, Partial, Replicate, Shard, _utils
from shardwise._collective_utils import fill_empty_tensor_to_shards, redistribute_cost
from shardwise._dtensor_spec import DTensorSpec, ShardOrderEntry, TensorMeta
from shardwise._ops import _view_ops as views
from shardwise._redistribute import redistribute_local_tensor
from shardwise._sharding_prop import ShardingPropagator


@pytest.fixture
def line():
    with sw.simulate(4):
        yield sw.init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))


def test_shapes_and_strides_of_full_tensors_and_of_blocks(line):
    block = torch.empty(3, 4)
    assert _utils.compute_global_tensor_info(block, line, [Shard(0)]) == ([12, 4], [4, 1])
    assert _utils.compute_global_tensor_info(block, line, [Shard(1)]) == ([3, 16], [16, 1])
    assert _utils.compute_global_tensor_info(block.t(), line, [Shard(0)]) == ([16, 3], [1, 16])
    assert _utils.compute_global_tensor_info(block, line, [Partial()]) == ([3, 4], [4, 1])


def shapes_on_processes():
    line, square = sw.init_device_mesh("cpu", (4,)), sw.init_device_mesh("cpu", (2, 2))
    rank = line.get_local_rank()
    infer = _utils.compute_global_tensor_shape
    found = [infer(torch.Size([5, rank]), line, [Shard(1)]), infer(torch.Size([5, 5]), line, [Replicate()])]
    found.append(_utils.compute_local_tensor_info(torch.empty(8, 4), line, [Shard(1)]))
    words = []
    for shape, mesh, placements in (
        ((5 + rank % 2, 1), line, [Shard(1)]),
        ((2, 2), square, [Shard(0)] * 2),
        ((2, 2), square, [Shard(0)]),
    ):
        try:
            infer(torch.Size(shape), mesh, placements)
        except (LayoutError, NotImplementedError) as error:
            words.append(str(error))
    return found, words


def test_the_full_shape_of_blocks_of_any_length(workers):
    for found, words in workers.run(shapes_on_processes):
        assert found == [torch.Size([5, 6]), torch.Size([5, 5]), ([8, 1], [1, 1])]
        parts = (
            "Non-sharded dimensions should have identical size",
            "only supports 1 placement",
            "one placement per mesh dim",
        )
        assert all(part in text for part, text in zip(parts, words, strict=True))


def test_blocks_of_split_factors_that_no_layout_has():
    where = _utils._compute_local_shape_and_global_offset
    twice = [Shard(0), sw._StridedShard(0, split_factor=2)]
    # 11 rows over 3: 4, 4, 3; then each in two halves, of which each rank has a part
    found = {c: where((11, 2), (3, 2), c, twice) for c in itertools.product(range(3), range(2))}
    assert found[0, 0] == ((2, 2), (0, 0))
    assert found[0, 1] == ((2, 2), (1, 0))
    assert found[2, 1] == ((1, 2), (9, 0))
    assert sum(shape[0] for shape, _ in found.values()) == 11
    with pytest.raises(LayoutError):
        where((11, 2), (3, 2), (0, 0), [Shard(0), Shard(5)])


def test_arguments_are_read_in_torchs_forms(line):
    x = sw.distribute_tensor(torch.ones(4), line, [Shard(0)])
    assert _utils.try_find_mesh_from_args("cat", ([2, x], 0)) is line
    assert _utils.try_find_mesh_from_args("cat", (x._spec,)) is line
    with pytest.raises(ValueError, match="Cannot find device mesh"):
        _utils.try_find_mesh_from_args("cat", (torch.ones(2),))
    _utils.assert_no_mixed_partial_types([Partial("sum"), Partial("avg"), Shard(3)])
    with pytest.raises(ValueError, match="Mixed Partial reduce types"):
        _utils.assert_no_mixed_partial_types([Partial("sum"), Partial("max")])
    with pytest.raises(RuntimeError, match="Invalid mode"):
        _utils.ExplicitRedistributionContext(mode="none")
    with pytest.raises(RuntimeError, match="no object that propagates"):
        ShardingPropagator()
    assert [t.shape for t in fill_empty_tensor_to_shards([torch.ones(2, 3)], 0, 1)] == [(2, 3), (0, 3)]


def test_costs_order_redistributions(line):
    whole = torch.ones(64, 64)
    split, full, pending = (
        sw.distribute_tensor(whole, line, [p])._spec for p in (Shard(0), Replicate(), Partial())
    )
    assert redistribute_cost(full, split) == redistribute_cost(full, full) == 0
    assert 0 < redistribute_cost(split, full) < redistribute_cost(pending, full)
    other = sw.init_device_mesh("cpu", (2, 2))
    assert redistribute_cost(split, sw.distribute_tensor(whole, other, [Shard(0)] * 2)._spec) == math.inf


def test_a_copy_of_a_spec_can_be_changed_and_be_the_spec_of_a_tensor(line):
    mesh = sw.init_device_mesh("cpu", (2, 2))
    x = sw.distribute_tensor(torch.arange(8.0), mesh, [Shard(0), Shard(0)])
    spec = copy.deepcopy(x._spec)
    assert isinstance(spec, DTensorSpec)
    assert spec == x._spec == spec
    assert hash(spec) == hash(x._spec)
    spec.shard_order = (ShardOrderEntry(0, (1, 0)),)
    assert spec != x._spec
    assert x._spec.shard_order == (ShardOrderEntry(0, (0, 1)),)
    block = redistribute_local_tensor(x.to_local(), x._spec, spec)
    assert [b.tolist() for b in block.ranks] == [[0, 1], [4, 5], [2, 3], [6, 7]]
    y = sw.zeros(8, device_mesh=mesh, placements=[Shard(0), Shard(0)])
    y._local_tensor, y._spec = block, spec
    for z in (y, DTensor(block, spec)):
        assert torch.equal((z * 2).full_tensor().ranks[3], torch.arange(8.0) * 2)
        assert (z + x).sharding is spec.layout
    spec.placements = (Replicate(), Shard(0))
    assert spec.shard_order == (ShardOrderEntry(0, (1,)),)
    assert copy.copy(spec) == spec
    assert copy.copy(spec) is not spec


def test_a_spec_itself_says_how_to_change_a_copy(line):
    spec = sw.zeros(8, device_mesh=line, placements=[Shard(0)])._spec
    spec.use_strided_shard_as_shard_order = False  # one of two ways of writing an order, of which we have one
    with pytest.raises(AttributeError, match=r"(?s)shared by all tensors.*copy\.copy"):
        spec.shard_order = ()
    with pytest.raises(AttributeError, match="dtype"):
        copy.copy(spec).dtype = torch.float64
    assert copy.deepcopy([spec])[0] is spec


def test_orders_of_axes_are_written_by_split_factors_and_read_back(line):
    sizes = (2, 3, 4)
    with_order = {}
    for order in itertools.permutations(range(3)):
        entry = (ShardOrderEntry(1, order),)
        mesh = _Sizes(sizes)
        placements = DTensorSpec._convert_shard_order_to_StridedShard(entry, [Shard(1)] * 3, mesh)
        assert DTensorSpec._maybe_convert_StridedShard_to_shard_order(placements, mesh) == entry
        assert DTensorSpec.is_default_device_order(entry) == (order == (0, 1, 2))
        with_order[placements] = order
    assert len(with_order) == 6
    odd = (sw._StridedShard(0, split_factor=5), Shard(0), Replicate())
    assert DTensorSpec._maybe_convert_StridedShard_to_shard_order(odd, _Sizes(sizes)) is None


class _Sizes:
    """A mesh of which only the sizes of the axes are read."""

    def __init__(self, sizes):
        self._sizes = sizes

    def size(self, axis):
        return self._sizes[axis]


def test_a_spec_from_the_axis_of_each_dim(line):
    meta = TensorMeta(torch.Size([4, 8]), (8, 1), torch.float32)
    mesh = sw.init_device_mesh("cpu", (2, 2))
    spec = DTensorSpec.from_dim_map(mesh, [-1, 0], [1], meta)
    assert spec.placements == (Shard(1), Partial())
    assert spec.dim_map == [-1, 0]
    with pytest.raises(RuntimeError, match="axis 1"):
        DTensorSpec.from_dim_map(mesh, [1, -1], [1], meta)


def test_the_product_has_two_names(line):
    x = DTensor.from_local(torch.full((2,), 3.0), line, [Partial("prod")])
    assert x.placements == (Partial("product"),)
    assert x.placements[0].is_partial("prod")
    assert x.full_tensor().ranks[0].tolist() == [81.0, 81.0]


@pytest.mark.parametrize("placement", [Shard(0), sw._StridedShard(0, split_factor=2)])
def test_a_placement_gathers_along_its_axis(line, placement):
    full = torch.arange(12.0).view(6, 2)
    blocks, _ = placement._split_tensor(full, 4, with_padding=False)
    local = sw.per_rank(lambda rank: blocks[rank])
    assert all(
        torch.equal(b, full) for b in placement._to_replicate_tensor(local, line, 0, list(full.shape)).ranks
    )


def test_ranks_may_be_threads():
    store, found = dist.HashStore(), {}

    def run(rank):
        dist.init_process_group("threaded", rank=rank, world_size=3, store=store)
        mesh = sw.init_device_mesh("cpu", (3,))
        x = sw.distribute_tensor(torch.arange(7.0), mesh, [Shard(0)]).requires_grad_()
        (x.flip(0) * x).sum().backward()
        found[rank] = x.grad.full_tensor()
        dist.destroy_process_group()

    _install_threaded_pg()
    _set_thread_isolation_mode(True)
    try:
        threads = [threading.Thread(target=run, args=(rank,)) for rank in range(3)]
        for t in threads:
            t.start()
        for t in threads:
            t.join(60)
    finally:
        _set_thread_isolation_mode(False)
        _uninstall_threaded_pg()
    assert sorted(found) == [0, 1, 2]
    assert all(torch.equal(g, 2 * torch.arange(6.0, -1, -1)) for g in found.values())


def test_names_of_torchs_design_are_imported_and_refuse_to_be_used():
    from shardwise._dispatch import OpDispatcher
    from shardwise._op_schema import OpSchema, OpStrategy
    from shardwise._ops._matrix_ops import mm_single_dim_strategy
    from shardwise._ops.utils import register_op_strategy
    from shardwise._redistribute import _gen_transform_infos
    from shardwise.debug import _get_fast_path_sharding_prop_cache_stats
    from shardwise.experimental._attention import _PTRRLoadBalancer

    assert not isinstance(3, OpStrategy)
    used = [OpDispatcher, OpSchema, mm_single_dim_strategy, register_op_strategy, _gen_transform_infos]
    for name in [*used, _get_fast_path_sharding_prop_cache_stats, _PTRRLoadBalancer]:
        with pytest.raises(NotImplementedError, match=rf"(?s){name.__name__} was used.*why: .*fix: "):
            name(torch.ops.aten.mm.default)
    with pytest.raises(ImportError, match="OpSchemes"):
        from shardwise._op_schema import OpSchemes  # type: ignore[attr-defined] # noqa: F401


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("_ops._math_ops", "Partial"),
        ("_api", "_StridedShard"),
        ("_dispatch", "DTensorSpec"),
        ("_ops.strategy_validation", "Placement"),
        ("_utils", "_is_shard_like"),
        ("_tp_conv", "DTensor"),
        ("experimental._func_map", "Shard"),
    ],
)
def test_names_are_also_where_torchs_modules_import_them(module, name):
    homes = (sw, sw.placement_types, sw._dtensor_spec)
    found = getattr(importlib.import_module(f"shardwise.{module}"), name)
    assert found in [getattr(home, name, None) for home in homes]


def test_a_name_that_no_module_has_is_missing_in_each():
    for module in (_utils, views, sw.placement_types):
        assert not hasattr(module, "Shards")
    assert not hasattr(_utils, "normalize_too")


def test_strides_of_blocks_keep_the_order_of_the_dims():
    assert _utils.compute_local_stride((1, 8), (2, 6)) == (1, 2)
    assert _utils.compute_local_stride((24, 1, 6), (2, 6, 4)) == (24, 1, 6)


_SHAPES = [(), (3,), (2, 3), (1, 3, 1, 4), (2, 1, 4, 5)]


def _view_calls():
    for shape in _SHAPES:
        x, n = torch.empty(shape), len(shape)
        for op in (
            torch.atleast_1d,
            torch.atleast_2d,
            torch.atleast_3d,
            torch.flatten,
            torch.ravel,
            torch.squeeze,
        ):
            yield op, (x,)
        for d in range(-n, n):
            yield torch.unsqueeze, (x, d)
            for e in range(-n, n):
                yield torch.transpose, (x, d, e)
                yield torch.movedim, (x, d, e)
        yield torch.permute, (x, tuple(range(n))[::-1])
        yield Tensor.view, (x, -1)
        yield torch.reshape, (x, (1, *shape[::-1], 1))
        for times in ((3, 1, *[2] * n), (2, *[1] * n)):
            yield Tensor.repeat, (x, *times)
            yield torch.tile, (x, times)
        yield Tensor.expand, (x, 5, *[-1] * n)


def _size(spec, shape):
    """The size of a dim by what it is made of."""
    match spec:
        case views.Singleton():
            return 1
        case views.InputDim(d):
            return shape[d]
        case views.Broadcast(_, size):
            return size
        case views.Repeat(inner, times):
            return _size(inner, shape) * times
        case views.Flatten(dims):
            return math.prod(_size(d, shape) for d in dims)
        case views.Split(_, sizes, i):
            return sizes[i]
    raise AssertionError(spec)


def test_dim_maps_say_what_the_dims_of_a_view_are_made_of():
    calls = list(_view_calls())
    assert len(calls) > 100
    for op, args in calls:
        made_of = views.dim_maps[op](*args)
        assert tuple(_size(spec, args[0].shape) for spec in made_of) == op(*args).shape, (op, args)
    flat = views.Flatten((views.InputDim(2), views.InputDim(3)))
    assert views.view_groups((1, 1, 3, 2, 1, 1), (6, 1, 1, 1)) == (
        flat, views.InputDim(4), views.InputDim(5), views.Singleton(),
    )  # fmt: skip
    with pytest.raises(AssertionError, match="cannot be expanded"):
        views.dim_maps[torch.broadcast_to](torch.empty(24, 36), (1, 2, 4))


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
def test_scripts_call_functions_that_are_patched():
    def parts(z: Tensor) -> Tensor:
        return torch.view_as_real(z)

    z = torch.tensor([1 + 2j])
    assert torch.equal(torch.jit.script(parts)(z), torch.view_as_real(z))
