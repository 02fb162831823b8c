"""`context_parallel`: attention over split sequences on plain tensors equals that of one device."""

from __future__ import annotations

import pytest
import torch
from tests.experimental.context_parallel_runs import all_runs, attention, dispatched
from torch.nn import functional as F  # noqa: N812

import shardwise as sw
from shardwise.comm.launch import Workers
from shardwise.experimental import context_parallel
from shardwise.experimental._attention import _context_parallel_shard, _LoadBalancer, set_rotate_method

_original = F.scaled_dot_product_attention


@pytest.mark.parametrize("length", [8, 12, 16])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("balance", [False, True])
def test_equals_one_device_in_simulation(length: int, is_causal: bool, balance: bool) -> None:
    with sw.simulate(4):
        pairs = attention(length, is_causal, balance)
    assert len(pairs) == 8 + balance
    for ours, dense in pairs:
        torch.testing.assert_close(ours, dense, rtol=1e-12, atol=1e-12)
    assert F.scaled_dot_product_attention is _original


@pytest.mark.parametrize("balanced", [False, True])
def test_dtensors_and_styles(balanced: bool) -> None:
    with sw.simulate(4):
        for ours, dense in dispatched(16, balanced):
            torch.testing.assert_close(ours, dense, rtol=1e-12, atol=1e-12)
    assert F.scaled_dot_product_attention is _original


def test_equals_one_device_on_processes(workers: Workers) -> None:
    for pairs in workers.run(all_runs):
        for ours, dense in pairs:
            torch.testing.assert_close(ours, dense, rtol=1e-12, atol=1e-12)


def test_refusals() -> None:
    with sw.simulate(4):
        mesh = sw.init_device_mesh("cpu", (4,))
        x = torch.zeros(2, 3, 8, 4)

        def enter(*buffers: torch.Tensor, dims: list[int] | None = None, **kwargs: object) -> None:
            with context_parallel(
                mesh, buffers=list(buffers), buffer_seq_dims=dims or [2] * len(buffers), **kwargs
            ):
                pass

        with pytest.raises(ValueError, match="length 6 for 4 ranks"):
            enter(x[:, :, :6])
        with pytest.raises(ValueError, match="length 4, 8"):
            enter(x, x[:, :, :4])
        with pytest.raises(ValueError, match="must have the same number of elements"):
            enter(x, dims=[2, 2])
        with pytest.raises(ValueError, match="must be a subset of `buffers`"):
            enter(x, no_restore_buffers={x.clone()})
        with pytest.raises(ValueError, match="requires grad"):
            enter(x.clone().requires_grad_())
        with pytest.raises(ValueError, match="2 axes"), context_parallel(sw.init_device_mesh("cpu", (2, 2))):
            pass
        with pytest.raises(NotImplementedError, match="head-tail"):
            _context_parallel_shard(mesh, [x], [2], _LoadBalancer())
        with pytest.raises(NotImplementedError, match="ring"):
            set_rotate_method("ring")
        assert x.shape == (2, 3, 8, 4)
        with context_parallel(mesh):
            for options in ({"dropout_p": 0.1}, {"attn_mask": torch.ones(8, 8)}):
                with pytest.raises(NotImplementedError, match=next(iter(options))):
                    F.scaled_dot_product_attention(x, x, x, **options)
            with pytest.raises(ValueError, match="8 queries and 6 keys"):
                F.scaled_dot_product_attention(x, x[:, :, :6], x[:, :, :6], is_causal=True)
            whole = sw.distribute_tensor(x, mesh, [sw.Replicate()])
            with pytest.raises(sw.LayoutError, match="Inside context_parallel"):
                F.scaled_dot_product_attention(whole, whole, whole)
    assert F.scaled_dot_product_attention is _original


def test_a_backward_pass_that_would_read_the_restored_buffer_is_an_error(workers: Workers) -> None:
    assert all(workers.run(_late_backward))


def _late_backward() -> bool:
    mesh = sw.init_device_mesh("cpu", (4,))
    x, weight = torch.ones(2, 8), torch.ones(2, 2, requires_grad=True)
    with context_parallel(mesh, buffers=[x], buffer_seq_dims=[1]):
        y = (x * weight).sum()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()
    return x.shape == (2, 8)
