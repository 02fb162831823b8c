"""Grouped matrix products: experts, tokens and hidden dims stay split, whatever the groups are."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.rules.against_dense import check, numbers
from tests.strategies import layouts
from tests.values import tensor

import shardwise as sw
from shardwise.comm import axes_of, counting

grouped_mm = torch.nn.functional.grouped_mm
X = numbers(10, 8, dtype=torch.float32)
W = numbers(4, 8, 12, seed=1, dtype=torch.float32)
ENDS = torch.tensor([3, 3, 8, 10], dtype=torch.int32)


def product(x, w, ends):
    return grouped_mm(x, w, offs=ends)


@pytest.mark.parametrize(
    ("mesh", "x", "w", "expect"),
    [
        ((4,), "[10, 8]", "[4:tp, 8, 12]", "[10, 12] P(tp,sum)"),  # experts
        ((4,), "[10:tp, 8]", "[4, 8, 12]", "[10:tp, 12]"),  # tokens, unevenly
        ((4,), "[10, 8:tp]", "[4, 8:tp, 12]", "[10, 12] P(tp,sum)"),  # contraction
        ((4,), "[10, 8]", "[4, 8, 12:tp]", "[10, 12:tp]"),  # output
        ((4,), "[10, 8] P(tp,sum)", "[4, 8, 12]", "[10, 12] P(tp,sum)"),
        ((4,), "[10, 8]", "[4, 8, 12] P(tp,sum)", "[10, 12] P(tp,sum)"),
        ((2, 2), "[10:dp, 8]", "[4:tp, 8, 12]", "[10:dp, 12] P(tp,sum)"),
        ((2, 2), "[10:dp, 8:tp]", "[4, 8:tp, 12]", "[10:dp, 12] P(tp,sum)"),
        ((2, 2), "[10, 8:dp]", "[4:tp, 8:dp, 12]", "[10, 12] P(tp,sum) P(dp,sum)"),
        ((2, 2), "[10, 8]", "[4:tp, 8, 12:dp]", "[10, 12:dp] P(tp,sum)"),
        ((2, 2), "[10, 8] P(dp,sum)", "[4:tp, 8, 12]", "[10, 12] P(tp,sum) P(dp,sum)"),
        ((2, 2), "[10:tp,dp, 8]", "[4, 8, 12]", "[10:tp,dp, 12]"),
        ((2, 2), "[10, 8]", "[4:dp,tp, 8, 12]", "[10, 12] P(tp,sum) P(dp,sum)"),
    ],
)
def test_nothing_moves_whatever_is_split(mesh, x, w, expect):
    check(product, [X, W, ENDS], [x, w, "[4]"], mesh=mesh, expect=expect)


def test_the_output_of_a_batch_of_products_stays_split():
    a, b = numbers(4, 5, 8, dtype=torch.float32), numbers(4, 8, 12, seed=1, dtype=torch.float32)
    check(grouped_mm, [a, b], ["[4:tp, 5, 8]", "[4:tp, 8, 12]"], expect="[4:tp, 5, 12]")


def test_only_offsets_that_are_split_or_pending_are_gathered():
    with sw.simulate(4):
        mesh = sw.init_device_mesh("cpu", (4,))
        x, w = (sw.distribute_tensor(t, mesh, [p]) for t, p in ((X, sw.Replicate()), (W, sw.Shard(0))))
        for placement, collective in ((sw.Shard(0), "all-gather"), (sw.Partial(), "all-reduce")):
            ends = sw.distribute_tensor(ENDS, mesh, [placement])
            with counting() as ledger:
                grouped_mm(x, w, offs=ends)
            assert [e.step for e in ledger.entries] == [collective]


def by_group(a, b, ends):
    """The definition, in float64; results beyond the last group are 0."""
    a, b = a.double(), b.double()
    if ends is None:
        return a @ b
    starts = [0, *ends[:-1]]
    spans = [slice(s, e) for s, e in zip(starts, ends, strict=True)]
    if a.dim() == b.dim():
        return torch.stack([a[:, s] @ b[s] for s in spans])
    if a.dim() == 2:
        parts = [a[s] @ b[i] for i, s in enumerate(spans)]
        return torch.cat([*parts, a.new_zeros(a.shape[0] - ends[-1], b.shape[-1])])
    parts = [a[i] @ b[:, s] for i, s in enumerate(spans)]
    return torch.cat([*parts, a.new_zeros(a.shape[1], b.shape[1] - ends[-1])], 1)


@st.composite
def grouped_calls(draw):
    """The operands of a form with drawn sizes, and the ends of its groups: some may be empty, all may be short of the end."""
    size = st.integers(1, 9)
    a_dims, b_dims = draw(st.sampled_from([(2, 3), (2, 2), (3, 2), (3, 3)]))
    m, k, n, groups = draw(size), draw(size), draw(size), draw(st.integers(1, 5))
    jagged = {(2, 3): m, (3, 2): n, (2, 2): k}.get((a_dims, b_dims))
    ends = None
    if jagged is not None:
        cuts = draw(st.lists(st.integers(0, jagged), min_size=groups, max_size=groups).map(sorted))
        ends = [*cuts[:-1], jagged] if draw(st.booleans()) else cuts
    a = numbers(*((groups,) if a_dims == 3 else ()), m, k, dtype=torch.float32)
    b = numbers(*((groups,) if b_dims == 3 else ()), k, n, seed=1, dtype=torch.float32)
    return a, b, ends


def known_gradients(a, b, ends):
    """The part of each gradient that torch defines: beyond the last group it leaves memory as it was."""
    if ends is None:
        return slice(None), slice(None)
    rows, columns = slice(ends[-1]), (slice(None), slice(ends[-1]))
    return {(2, 3): (rows, slice(None)), (3, 2): (slice(None), columns), (2, 2): (columns, rows)}[
        a.dim(), b.dim()
    ]


@given(st.data())
def test_results_and_gradients_equal_dense_in_any_layout(data):
    a, b, ends = data.draw(grouped_calls())
    dense = [t.clone().requires_grad_() for t in (a, b)]
    want = by_group(*dense, ends)
    grad = numbers(*want.shape, seed=2, dtype=torch.float32)
    known = slice(None)
    if ends is not None and a.dim() != b.dim():  # further results are undefined
        known = slice(ends[-1]) if a.dim() == 2 else (slice(None), slice(ends[-1]))
        undefined = torch.ones_like(grad, dtype=torch.bool)
        undefined[known] = False
        grad = grad.masked_fill(undefined, 0)
    expected = torch.autograd.grad(want, dense, grad.double())
    with sw.simulate(4):
        mesh = sw.init_device_mesh("cpu", data.draw(st.sampled_from([(4,), (2, 2), (3,)])))
        on = axes_of(mesh)

        def drawn(t):
            layout = data.draw(layouts(on, tuple(t.shape)))
            return tensor(t, layout.with_partial({axis: "sum" for axis, _ in layout.partial}), mesh)

        x, y = (drawn(t).detach().requires_grad_() for t in (a, b))
        offs = None if ends is None else drawn(torch.tensor(ends, dtype=torch.int32))
        got = grouped_mm(x, y, offs=offs)
        grads = torch.autograd.grad(got, [x, y], drawn(grad))
        for rank in range(mesh.size()):
            torch.testing.assert_close(
                got.full_tensor().of_rank(rank)[known].double(), want.detach()[known], rtol=1e-4, atol=1e-4
            )
            for g, w, at in zip(grads, expected, known_gradients(a, b, ends), strict=True):
                g = g.full_tensor().of_rank(rank)
                torch.testing.assert_close(g[at], w[at], rtol=1e-4, atol=1e-4)


def experts(x, router, up, down):
    """A mixture of experts as `transformers` runs it: sort the tokens by expert, multiply by group, sum."""
    scores, chosen = (x @ router).softmax(-1).topk(2)
    order = chosen.flatten().argsort()
    counts = torch.nn.functional.one_hot(chosen.flatten(), up.shape[0]).sum(0)
    ends = counts.cumsum(0, dtype=torch.int32)
    tokens = x[order // 2]
    hidden = torch._grouped_mm(tokens, up.transpose(-2, -1), ends).relu()
    out = torch._grouped_mm(hidden, down.transpose(-2, -1), ends)
    weighted = out * scores.flatten()[order].unsqueeze(-1)
    return torch.zeros_like(x).index_add(0, order // 2, weighted)


@pytest.mark.parametrize("up", ["[6:tp, 16, 8]", "[6, 16:tp, 8]", "[6:tp, 16:dp, 8]", "[6:dp, 16:tp, 8]"])
@pytest.mark.parametrize("x", ["[12:dp, 8]", "[12, 8]", "[12, 8] P(dp,sum)"])
def test_a_mixture_of_experts_equals_dense(x, up):
    values = [
        numbers(*s, seed=i, dtype=torch.float32)
        for i, s in enumerate([(12, 8), (8, 6), (6, 16, 8), (6, 8, 16)])
    ]
    groups, hidden, _ = up.split(", ")
    down = f"{groups}, 8, {hidden}]"  # its contracted dim is split like the hidden dim of the first product
    check(experts, values, [x, "[8, 6]", up, down], mesh=(2, 2), free=False)
