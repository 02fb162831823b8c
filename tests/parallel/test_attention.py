"""`nn.MultiheadAttention` by heads: values, gradients and what is sent."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.debug import CommDebugMode
from shardwise.parallel import ColwiseParallel, PlanError, RowwiseParallel, parallelize_module

OPTIONS: dict[str, dict[str, Any]] = {
    "packed": {},
    "batch first": {"batch_first": True},
    "other sizes": {"kdim": 5, "vdim": 7},
    "bias_kv": {"add_bias_kv": True, "add_zero_attn": True},
    "no bias": {"bias": False},
}


def _full(t: Tensor) -> Tensor:
    t = t.full_tensor() if isinstance(t, sw.DTensor) else t
    return t.ranks[0] if isinstance(t, sw.PerRank) else t


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize(
    "ranks", [2, 3]
)  # 4 heads: two each, or a rank without one, so that features are split
@pytest.mark.parametrize("style", ["colwise", "style"])
def test_heads_are_split(options: dict[str, Any], ranks: int, style: str):
    torch.manual_seed(0)
    dense = nn.MultiheadAttention(8, 4, dtype=torch.float64, **options)
    q, k, v = (
        torch.randn(3, 3, n, dtype=torch.float64) for n in (8, options.get("kdim", 8), options.get("vdim", 8))
    )
    mask = torch.ones(3, 3, dtype=torch.bool).triu(1)
    with sw.simulate(ranks):
        mesh = sw.init_device_mesh("cpu", (ranks,), mesh_dim_names=("tp",))
        net = copy.deepcopy(dense)
        parallelize_module(net, mesh, {"": "colwise"} if style == "colwise" else ColwiseParallel())
        for weights in (True, False):
            got = net(q, key=k, value=v, attn_mask=mask, need_weights=weights)
            want = dense(q, k, v, attn_mask=mask, need_weights=weights)
            for a, b in zip(got, want, strict=True):
                assert (a is None) == (b is None)
                if b is not None:
                    assert not isinstance(a, sw.DTensor)
                    torch.testing.assert_close(_full(a), b, rtol=0, atol=1e-12)
        got[0].pow(2).sum().backward()
        want[0].pow(2).sum().backward()
        for (name, p), b in zip(net.named_parameters(), dense.parameters(), strict=True):
            torch.testing.assert_close(_full(p.grad), b.grad, rtol=0, atol=1e-12, msg=name)
            assert p.sharding.sharded or name == "out_proj.bias"


@pytest.mark.parametrize("heads", [4, 5])
@pytest.mark.parametrize("training", [True, False])
def test_an_encoder_layer_sends_two_all_reduces(heads: int, training: bool):
    torch.manual_seed(0)
    dense = nn.TransformerEncoderLayer(5 * 4, heads, 32, dropout=0.0, batch_first=True).train(training)
    x, padding = torch.randn(2, 5, 20), torch.arange(5) >= torch.tensor([[5], [3]])
    with sw.simulate(2):
        mesh = sw.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        net = copy.deepcopy(dense)
        plan = {"self_attn": "colwise", "linear1": "colwise", "linear2": "rowwise"}
        parallelize_module(net, mesh, plan)
        # without gradients torch takes a fused kernel for the whole layer
        with torch.set_grad_enabled(training), CommDebugMode() as comm:
            got = net(x, src_key_padding_mask=padding)
        assert torch.backends.mha.get_fastpath_enabled()
        torch.testing.assert_close(got, dense(x, src_key_padding_mask=padding))
        assert [e.step for e in comm.ledger.entries] == ["all-reduce"] * 2


def test_a_plain_input_gets_its_gradient_and_row_parallel_is_refused():
    with sw.simulate(2):
        mesh = sw.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        net = parallelize_module(nn.MultiheadAttention(8, 4), mesh, ColwiseParallel())
        x = torch.randn(3, 2, 8, requires_grad=True)
        net(x, x, x, need_weights=False)[0].sum().backward()
        assert x.grad is not None
        with pytest.raises(PlanError, match="heads are split by ColwiseParallel"):
            parallelize_module(nn.MultiheadAttention(8, 4), mesh, RowwiseParallel())
