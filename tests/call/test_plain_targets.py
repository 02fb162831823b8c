"""Plain tensors that ops on DTensors write to have the values of the same program on one device."""

import warnings

import pytest
import torch
from tests.rules.calls import x

import shardwise as sw
from shardwise.experimental import implicit_replication

_OPS = {
    "add_": lambda t, a, b: t.add_(a, alpha=-2),
    "sub_": lambda t, a, b: t.sub_(a),
    "addmm_": lambda t, a, b: t.addmm_(a, b, beta=0.5),
    "index_add_": lambda t, a, b: t.index_add_(0, torch.tensor([0, 2, 2, 4, 1]), a),
    "copy_": lambda t, a, b: t.copy_(a),
    "mul_": lambda t, a, b: t[1:4].mul_(a[1:4]),
    "mm out": lambda t, a, b: torch.mm(a, b, out=t),
    "amax out": lambda t, a, b: torch.amax(a, 1, keepdim=True, out=t[:, :1]),
    "sort out": lambda t, a, b: torch.sort(a, 0, out=(t, torch.empty(5, 5, dtype=torch.int64)))[0],
}


@pytest.mark.parametrize("placement", [sw.Shard(0), sw.Shard(1), sw.Partial()])
@pytest.mark.parametrize("name", _OPS)
def test_a_plain_tensor_is_written_once(name, placement, caplog):
    caplog.set_level("ERROR", logger="shardwise")
    a, b, dense = x(5, 5), x(5, 5, seed=1), x(5, 5, seed=2)
    want = _OPS[name](dense, a, b)
    with sw.simulate(3), implicit_replication():
        mesh = sw.init_device_mesh("cpu", (3,), mesh_dim_names=("tp",))
        plain = x(5, 5, seed=2)
        operands = [sw.distribute_tensor(t, mesh, [placement]) for t in (a, b)]
        got = _OPS[name](plain, *operands)
    assert type(plain) is torch.Tensor
    torch.testing.assert_close(plain, dense)
    assert type(got) is torch.Tensor
    torch.testing.assert_close(got, want)


def test_an_empty_plain_out_is_resized(caplog):
    caplog.set_level("ERROR", logger="shardwise")
    with sw.simulate(3), implicit_replication():
        mesh = sw.init_device_mesh("cpu", (3,), mesh_dim_names=("tp",))
        a = sw.distribute_tensor(x(5, 4), mesh, [sw.Shard(0)])
        out = torch.empty(0, dtype=torch.float64)
        torch.neg(a, out=out)
    assert torch.equal(out, -x(5, 4))


def test_a_plain_target_is_an_error_by_default():
    with sw.simulate(3):
        mesh = sw.init_device_mesh("cpu", (3,), mesh_dim_names=("tp",))
        a, plain = sw.distribute_tensor(x(5, 4), mesh, [sw.Shard(0)]), x(5, 4)
        with pytest.raises(sw.LayoutError, match="mixed"):
            plain.add_(a)


OUTS = {
    "add": lambda x, out: torch.add(x, x, out=out),
    "mm": lambda x, out: torch.mm(x, x.t(), out=out),
    "nonzero": lambda x, out: torch.nonzero(x > 0.5, out=out),
    "bernoulli": lambda x, out: torch.bernoulli(x, out=out),
    "cat": lambda x, out: torch.cat([x, x], out=out),
}


@pytest.mark.parametrize("name", OUTS)
@pytest.mark.parametrize("elements", [0, 2])
def test_an_out_tensor_of_another_shape_is_resized(name, elements):
    dense = torch.arange(12.0).view(4, 3) / 12
    dtype = torch.int64 if name == "nonzero" else torch.float32
    sw.manual_seed(1)
    with warnings.catch_warnings(), sw.one_device():
        warnings.simplefilter("ignore")
        expected = OUTS[name](dense, torch.empty(elements, dtype=dtype))
    with sw.simulate(2):
        mesh = sw.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        x = sw.distribute_tensor(dense, mesh, [sw.Shard(0)])
        out = sw.empty(elements, dtype=dtype, device_mesh=mesh, placements=[sw.Shard(0)])
        sw.manual_seed(1)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert OUTS[name](x, out) is out
        assert bool(elements) == any("was resized" in str(w.message) for w in caught)
        assert out.shape == expected.shape
        assert torch.equal(out.full_tensor().ranks[1], expected)
