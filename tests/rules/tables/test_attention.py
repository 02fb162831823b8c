"""Attention with split batches, heads and queries: dense values and gradients, without communication."""

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - the usual name
from tests.dense import compare, randn
from torch.nn.attention import SDPBackend, sdpa_kernel

from shardwise.rules import Call, Slot
from shardwise.rules.table import TABLE

aten = torch.ops.aten
Q, K, V = randn(4, 8, 6, 16), randn(4, 8, 10, 16, seed=1), randn(4, 8, 10, 16, seed=2)


@pytest.mark.parametrize("kernel", [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH])
@pytest.mark.parametrize("placement", ["0", "1"])
def test_batch_and_heads_may_be_split(kernel, placement):
    def attend(q, k, v):
        with sdpa_kernel(kernel):
            return F.scaled_dot_product_attention(q, k, v)

    assert compare(attend, [Q, K, V], [placement] * 3).bytes == 0
    compare(attend, [Q, K, V], [placement, "R", "P"])
    compare(
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True), [Q, K, V], [placement] * 3
    )


def test_queries_may_be_split_unless_causal():
    q = randn(4, 8, 6, 16)
    ledger = compare(F.scaled_dot_product_attention, [q, K, V], ["2", "R", "R"], (3,), grad=False)
    assert ledger.bytes == 0
    compare(F.scaled_dot_product_attention, [q, K, V], ["2", "R", "R"], (3,))
    compare(
        F.scaled_dot_product_attention, [q, K, V], ["2", "2", "2"]
    )  # 6 over 4 ranks: the last block is empty
    compare(
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        [q, K, V],
        ["2", "R", "R"],
        (3,),
    )


@pytest.mark.parametrize("shape", [(6, 10), (4, 1, 6, 10), (1, 8, 6, 10), (4, 8, 6, 10), (4, 1, 1, 10)])
@pytest.mark.parametrize("placement", ["0", "1", "2"])
def test_masks_broadcast(shape, placement):
    mask = randn(*shape, seed=3)

    def attend(q, k, v, m):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=m.detach())

    compare(
        attend,
        [Q, K, V, mask],
        [placement, placement if placement != "2" else "R", placement if placement != "2" else "R", "R"],
        (2,),
    )
    compare(attend, [Q, K, V, mask > 0], [placement, "R", "P", "0"], (2,))


@pytest.mark.parametrize("kernel", [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH])
@pytest.mark.parametrize("heads", [1, 2, 4])
@pytest.mark.parametrize("mesh", [(2,), (4,), (3,)])
def test_shared_key_heads(heads, mesh, kernel):
    k, v = randn(4, heads, 10, 16, seed=1), randn(4, heads, 10, 16, seed=2)

    def attend(q, k, v):
        with sdpa_kernel(kernel):
            return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)

    for placements in (["1", "1", "1"], ["1", "R", "R"], ["0", "0", "0"], ["P", "1", "1"]):
        ledger = compare(attend, [Q, k, v], placements, mesh)
        even = heads % mesh[0] == 0 and placements[0] == "1"
        assert kernel is SDPBackend.MATH or not even or ledger.bytes == 0


def test_groups_of_query_heads_are_not_divided():
    q, k = (
        randn(2, 10, 6, 16),
        randn(2, 5, 6, 16, seed=1),
    )  # blocks of 5 and 5 query heads, of 3 and 2 key heads
    for placements in (["1", "1"], ["1", "R"]):
        compare(
            lambda q, k: F.scaled_dot_product_attention(q, k, k, enable_gqa=True), [q, k], placements, (2,)
        )


@pytest.mark.parametrize(("keys", "group", "ranks"), [(3, 2, 2), (5, 2, 3), (5, 4, 3), (3, 4, 2), (7, 3, 2)])
def test_unequal_numbers_of_whole_groups_are_split(keys, group, ranks):
    q, k = randn(2, keys, group, 6, 8), randn(2, keys, 6, 8, seed=1)

    def attend(q, k):
        return F.scaled_dot_product_attention(q.flatten(1, 2), k, k, enable_gqa=True)

    assert compare(attend, [q, k], ["1", "1"], (ranks,)).bytes == 0
    compare(attend, [q, k], ["1", "R"], (ranks,))
    compare(attend, [q, k], ["R", "1"], (ranks,))


@pytest.mark.parametrize(("heads", "keys", "ranks"), [(8, 2, 4), (6, 2, 3)])
@pytest.mark.parametrize("causal", [False, True])
def test_queries_stay_where_there_are_fewer_keys_than_ranks(heads, keys, ranks, causal):
    q, k, v = randn(2, heads, 6, 8), randn(2, keys, 6, 8, seed=1), randn(2, keys, 6, 8, seed=2)

    def attend(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)

    # the gradients of keys and values are pending sums
    assert compare(attend, [q, k, v], ["1", "R", "R"], (ranks,)).bytes == 0
    compare(attend, [q, k, v], ["1", "3", "3"], (ranks,))
    compare(attend, [q, k, v], ["1", "P", "R"], (ranks,))


def _rule(name, tensors, **args):
    """The rule of an op without a CPU kernel, from the outputs of its meta kernel."""
    slots = {n: Slot(i) for i, n in enumerate(tensors)}
    op = getattr(aten, name).default
    meta = {n: torch.empty(s, device="meta", dtype=torch.float16) for n, s in tensors.items()}
    defaults = {a.name: a.default_value for a in op._schema.arguments}
    outputs = op(**{n: v for n, v in (defaults | args | meta).items() if v is not None or "attn_bias" in n})
    call = Call(
        f"aten.{name}.default",
        defaults | args | slots,
        tuple(slots.values()),
        tuple(tensors.values()),
        tuple(tuple(t.shape) for t in outputs if isinstance(t, torch.Tensor)),
        tuple(isinstance(t, torch.Tensor) for t in outputs),
    )
    return TABLE[call.op].build(call)


def test_rules_of_ops_without_a_cpu_kernel():
    qkv = {"query": (2, 4, 8, 16), "key": (2, 4, 6, 16), "value": (2, 4, 6, 16)}
    flash = _rule("_scaled_dot_product_flash_attention", qkv)
    assert flash.inputs == (("b", "h", None, None),) * 3
    assert flash.outputs[:2] == (("b", "h", None, None), ("b", "h", None))
    assert flash.alike == frozenset(range(2, len(flash.outputs)))
    efficient = _rule("_scaled_dot_product_efficient_attention", qkv, compute_log_sumexp=True)
    assert efficient.outputs[:2] == flash.outputs[:2]
    assert efficient.alike == frozenset({2, 3})
    cudnn = _rule("_scaled_dot_product_cudnn_attention", qkv, compute_log_sumexp=True)
    assert cudnn.outputs[0] == ("b", "h", None, None)
    assert _rule("_scaled_dot_product_flash_attention", qkv, dropout_p=0.5) is None
    shared = _rule("_scaled_dot_product_flash_attention", {**qkv, "query": (2, 8, 8, 16)})
    assert all(letters[1] == "h" for letters in shared.inputs)
    odd = _rule("_scaled_dot_product_flash_attention", {**qkv, "query": (2, 6, 8, 16)})
    assert all("h" not in letters for letters in odd.inputs)
