"""Parameters of tensor classes with `fsdp_pre_all_gather` and `fsdp_post_all_gather`."""

import pytest
import torch
from tests.parallel.data.models import full
from torch import nn
from torch.utils._pytree import tree_map_only

import shardwise as sw
from shardwise import LayoutError, Shard, simulate
from shardwise.comm import counting
from shardwise.fsdp import MixedPrecisionPolicy, fully_shard
from shardwise.parallel import explain, replicate


class Wrapper(torch.Tensor):
    """A tensor in another one."""

    @staticmethod
    def __new__(cls, data):
        return torch.Tensor._make_wrapper_subclass(cls, data.shape, data.stride(), dtype=data.dtype)

    def __init__(self, data):
        self._data = data

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        inner = tree_map_only(cls, lambda t: t._data, (args, kwargs or {}))
        out = func(*inner[0], **inner[1])
        return args[0] if func._schema.is_mutable else tree_map_only(torch.Tensor, cls, out)


class Gathered16(Wrapper):
    """A tensor that is gathered in bfloat16, and padded to the block of the first rank."""

    def fsdp_pre_all_gather(self, mesh, outer_size, outer_stride, module, mp_policy):
        assert isinstance(module, nn.Linear)
        assert isinstance(mp_policy, MixedPrecisionPolicy)
        assert outer_stride == (outer_size[1], 1)
        rows = -(-outer_size[0] // mesh.size())
        padding = self._data.new_zeros(max(0, rows - len(self._data)), *outer_size[1:])
        return (torch.cat([self._data, padding]).to(torch.bfloat16),), rows

    def fsdp_post_all_gather(self, all_gather_outputs, metadata, param_dtype, *, out=None):
        (whole,) = all_gather_outputs
        assert whole.dtype is torch.bfloat16
        assert len(whole) % metadata == 0
        return whole, (whole,)


class Gathered16Short(Gathered16):
    """The same with the arguments of earlier releases."""

    def fsdp_pre_all_gather(self, mesh):
        return (self._data.to(torch.bfloat16),), 1


class OneMethod(Wrapper):
    """A class with one of the two methods."""

    fsdp_pre_all_gather = Gathered16.fsdp_pre_all_gather


def model_of(kind, rows):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, rows, bias=False), nn.Linear(rows, 6, bias=False))
    for layer in model if kind is not None else ():
        layer.weight = nn.Parameter(kind(layer.weight.detach()))
    return model


def sharded(kind, rows, mesh, way=fully_shard):
    model = model_of(kind, rows)
    for layer in model:
        way(layer, mesh=mesh)
    return way(model, mesh=mesh)


def rows_of(rank):
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(rank)).bfloat16()


def train(kind, rows, way, mesh):
    """Gradients and weights after steps on two ranks."""
    model = sharded(kind, rows, mesh, way)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        model(sw.per_rank(lambda rank: rows_of(rank % 2))).float().pow(2).sum().backward()
        optimizer.step()
    return [full(p.grad) for p in model.parameters()], [plain(full(p)) for p in model.parameters()]


def plain(t):
    return t._data if isinstance(t, Wrapper) else t


def expected(rows):
    model = model_of(None, rows)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        grads = [torch.zeros_like(p, dtype=torch.bfloat16) for p in model.parameters()]
        for rank in range(2):
            low = [p.detach().bfloat16().requires_grad_() for p in model.parameters()]
            out = rows_of(rank)
            for w in low:
                out = out @ w.t()
            out.float().pow(2).sum().backward()
            grads = [g + w.grad for g, w in zip(grads, low, strict=True)]
        for p, g in zip(model.parameters(), grads, strict=True):
            p.grad = (g / 2).float()
        optimizer.step()
    return [p.grad for p in model.parameters()], [p.detach() for p in model.parameters()]


def check(found, rows):
    for mine, theirs in zip(found, expected(rows), strict=True):
        for a, b in zip(mine, theirs, strict=True):
            assert type(a) is torch.Tensor
            assert a.dtype is torch.float32
            torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize(
    ("kind", "rows", "way"),
    [
        (Gathered16, 8, fully_shard),
        (Gathered16, 7, fully_shard),
        (Gathered16Short, 8, fully_shard),
        (Gathered16Short, 7, replicate),
    ],
)
def test_training_computes_with_what_the_class_returns(kind, rows, way):
    with simulate(2):
        check(train(kind, rows, way, sw.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))), rows)


def train_on_pairs(rows):
    return train(
        Gathered16, rows, fully_shard, sw.init_device_mesh("cpu", (2, 2), mesh_dim_names=("x", "dp"))["dp"]
    )


@pytest.mark.processes
def test_training_on_processes(workers):
    for found in workers.run(train_on_pairs, 7):
        check(found, 7)


def test_bytes_are_those_of_the_tensors_that_are_sent():
    with simulate(2):
        mesh = sw.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        model = sharded(Gathered16, 8, mesh)
        with counting() as ledger, torch.no_grad():
            model(sw.per_rank(rows_of))
        assert (
            ledger.bytes == 2 * 2 * (8 * 6 // 2) * 2
        )  # two layers, two ranks, half of the elements, two bytes
        assert explain(model).groups[0].gathers[0].bytes == ledger.bytes / 2


class Pair(Wrapper):
    """Two tensors, which are gathered together: the parameter is their mean. As torch's own, it wants memory without an offset."""

    def fsdp_pre_all_gather(self, mesh):
        return (self._data, self._data + 2), None

    def fsdp_post_all_gather(self, all_gather_outputs, metadata, param_dtype, *, out=None):
        first, second = all_gather_outputs
        assert first.storage_offset() == second.storage_offset() == 0
        assert param_dtype is torch.float32  # that of the parameter, if the policy names none
        return (first + second) / 2 - 1, ()


def test_what_is_gathered_is_in_memory_of_its_own():
    with simulate(2):
        mesh = sw.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        rows = torch.ones(2, 6)
        out = sharded(Pair, 8, mesh)(sw.per_rank(lambda rank: rows))
        torch.testing.assert_close(out.ranks[1], model_of(None, 8)(rows))


def gather_in_16_bits(mesh):
    """The gathered weights of a model of plain tensors, of which one has the methods, and the mesh that they got."""
    model, seen = sharded(None, 8, mesh), []

    def before(mesh, outer_size, outer_stride, module, mp_policy):
        seen.append((mesh.ndim, mesh.size(), outer_size))
        return (block.bfloat16(),), None

    def after(all_gather_outputs, metadata, param_dtype, *, out=None):
        return all_gather_outputs[0].to(param_dtype), ()

    block = model[0].weight.to_local()
    model[0].weight._local_tensor.fsdp_pre_all_gather = before
    model[0].weight._local_tensor.fsdp_post_all_gather = after
    model(torch.ones(1, 6)).sum().backward()
    model.unshard()
    for layer in model:
        layer.unshard()
    return [layer.weight.detach().clone() for layer in model], seen[0]


def on_pairs():
    return gather_in_16_bits(sw.init_device_mesh("cpu", (2, 2), mesh_dim_names=("pod", "dp")))


@pytest.mark.processes
def test_methods_of_a_single_tensor(workers):
    first, second = model_of(None, 8)
    for (one, other), mesh in workers.run(on_pairs):
        torch.testing.assert_close(one, first.weight.bfloat16().float(), rtol=0, atol=0)
        torch.testing.assert_close(other, second.weight, rtol=0, atol=0)
        assert mesh == (1, 2, (8, 6))  # without the axis that replicates


def test_classes_that_do_not_fit():
    with simulate(2):
        mesh = sw.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        model = fully_shard(model_of(Gathered16, 8), mesh=mesh, shard_placement_fn=lambda p: Shard(1))
        with pytest.raises(LayoutError, match=r"(?s)0.weight is a .*why: .*first dim.*fix: "):
            model(sw.per_rank(rows_of))
        with pytest.raises(LayoutError, match=r"(?s)only one of .*why: .*fix: "):
            fully_shard(model_of(OneMethod, 8), mesh=mesh)(sw.per_rank(rows_of))
