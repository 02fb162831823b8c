"""Every row holds in every layout that it allows, and wrong rows are detected."""

import os
from dataclasses import replace

import pytest
import torch
from tests.rules.absent import ABSENT, REMOVED
from tests.rules.samples import calls_of, recorded

import shardwise as sw
from shardwise.rules import Row, RuleError, verify
from shardwise.rules.notation import row
from shardwise.rules.table import TABLE
from shardwise.rules.tables.pointwise import pointwise
from shardwise.rules.tables.view_and_cat import REGROUPED
from shardwise.verify.sampling import draw

pytestmark = pytest.mark.filterwarnings("ignore")
DEEP = os.environ.get("SHARDWISE_DEEP") == "1"
EXAMPLES = 5 if DEEP else 4


@pytest.fixture(autouse=True)
def _quiet(caplog):
    caplog.set_level("ERROR", logger="shardwise")  # backward passes may use the fallback


def proof_of(name):
    # without letters that must not be split and partial values that pass, dtypes do not matter
    plain = name in TABLE and TABLE[name].text == "pointwise"
    try:
        return verify(name, calls_of(name), examples=2 if plain else EXAMPLES)
    except RuleError as error:
        if "could be generated" not in error.what:
            raise
    calls = recorded().get(name)
    assert calls, f"there are no calls of {name}: write some in tests/rules/samples.py"
    return verify(name, calls)


# Reductions over all dims that are not those of `Partial`, so that no dim can be split by a rule; alternatives run them in
# several steps where that is cheaper (alternatives/statistics.py and alternatives/argmax.py).
UNSPLIT = {"aten._aminmax.default", "aten.norm.Scalar", "aten.norm.ScalarOpt_dtype"}


# ops without a kernel on a CPU are in tests/rules/tables/test_absent.py
@pytest.mark.parametrize("name", sorted({*TABLE, *REGROUPED} - {*ABSENT} - REMOVED))
def test_a_row_holds_in_every_layout_it_allows(name):
    proof = proof_of(name)
    assert name in UNSPLIT or proof.candidates > 2 * proof.calls + min(proof.calls, 2), (
        "no call was run with a split dim or a pending reduction"
    )


def test_rows_hold_for_the_calls_in_torchs_own_samples():
    every = recorded() if DEEP else recorded(20)
    calls = {name: calls for name, calls in every.items() if name in TABLE and calls}
    assert len(calls) > (100 if DEEP else 20)
    uncovered = set()
    for name in list(calls)[:: 1 if DEEP else 4]:
        try:
            assert verify(name, calls[name]).candidates > 0
        except RuleError as error:
            if "was not run" not in str(error):
                raise
            uncovered.add(name)
    # all its samples in torch have one dim, of which the row says nothing
    assert uncovered <= {"aten.multi_margin_loss.default"}


def test_a_row_without_calls_fails(monkeypatch):
    name = "aten.glu_jvp.default"  # its dim has no default, and no sample calls it
    monkeypatch.setitem(TABLE, name, Row("… !d -> … !d", lambda call: None))
    monkeypatch.setattr("tests.verify.test_prove.recorded", dict)
    with pytest.raises((AssertionError, RuleError), match=r"there are no calls|was not run"):
        proof_of(name)


def _rules(change):
    """A mutation of a row that changes the rules it builds."""

    def mutated(name):
        old = TABLE[name]

        def build(call):
            rule = old.build(call)
            return None if rule is None else change(rule)

        return replace(old, build=build, text=f"{old.text}, mutated")

    return mutated


@_rules
def allow_splits(rule):
    """Allow dims to be split that must not be."""

    def named(letters):
        return tuple(f"w{i}" if x is None else x for i, x in enumerate(letters))

    return replace(rule, inputs=tuple(map(named, rule.inputs)), outputs=tuple(map(named, rule.outputs)))


@_rules
def allow_splits_by_sum(rule):
    """Allow dims to be split that must not be, and sum over them."""
    inputs = [
        tuple(f"w{slot}.{i}" if x is None else x for i, x in enumerate(letters))
        for slot, letters in enumerate(rule.inputs)
    ]
    new = {x: "sum" for letters in inputs for x in letters if x.startswith("w")}
    return replace(rule, inputs=tuple(inputs), reduced={**rule.reduced, **new})


@_rules
def linear_in_first(rule):
    return replace(rule, linear=(*rule.linear, frozenset({0})))


@_rules
def linear_in_last(rule):
    return replace(rule, linear=(*rule.linear, frozenset({len(rule.inputs) - 1})))


@_rules
def linear_in_all(rule):
    return replace(rule, linear=(*rule.linear, frozenset(range(len(rule.inputs)))))


@_rules
def increasing(rule):
    return replace(rule, monotone={"max": "max", "min": "min"})


@_rules
def decreasing(rule):
    return replace(rule, monotone={"max": "min", "min": "max"})


@_rules
def passing_products(rule):
    return replace(rule, monotone={"product": "product"})


@_rules
def reduced_otherwise(rule):
    other = {"sum": "max", "max": "min", "min": "max", "product": "sum"}
    return replace(rule, reduced={x: other[op] for x, op in rule.reduced.items()})


@_rules
def reduced_by_avg(rule):
    return replace(rule, reduced=dict.fromkeys(rule.reduced, "avg"))


@_rules
def reversed_dims(rule):
    return replace(rule, outputs=tuple(letters[::-1] for letters in rule.outputs))


@_rules
def without_local(rule):
    return replace(rule, local=None)


@_rules
def without_ranges(rule):
    return replace(rule, ranges=frozenset())


@_rules
def without_addends(rule):
    return replace(rule, addends=frozenset())


@_rules
def with_empty_blocks(rule):
    return replace(rule, empty=True)


def _cases(mutation, names):
    return [pytest.param(mutation, f"aten.{n}", id=f"{mutation.__name__}-{n}") for n in names.split()]


for _name, _mutation in list(globals().items()):
    if getattr(_mutation, "__name__", "") == "mutated":
        _mutation.__name__ = _name

WRONG = [
    *_cases(allow_splits, "_softmax.default cumsum.default sort.default cummax.default flip.default roll.default"),
    *_cases(allow_splits, "avg_pool2d.default upsample_bilinear2d.default linalg_qr.default"),
    *_cases(allow_splits, "_fft_c2c.default cat.default slice.Tensor topk.default glu.default"),
    *_cases(allow_splits, "_scaled_dot_product_flash_attention_for_cpu.default"),
    *_cases(allow_splits_by_sum, "median.dim logsumexp.default linalg_vector_norm.default var.correction argmax.default"),
    *_cases(allow_splits_by_sum, "max.dim embedding_dense_backward.default select.int"),
    *_cases(linear_in_first, "add.Tensor sub.Tensor lerp.Scalar addcmul.default relu.default exp.default"),
    *_cases(linear_in_first, "clamp.default abs.default pow.Tensor_Scalar add.Scalar amax.default prod.dim_int"),
    *_cases(linear_in_first, "addmm.default baddbmm.default maximum.default native_layer_norm.default _softmax.default"),
    *_cases(linear_in_first, "cat.default cumprod.default count_nonzero.default sort.default"),
    *_cases(linear_in_last, "div.Tensor gelu_backward.default tanh_backward.default lerp.Tensor"),
    *_cases(linear_in_last, "_softmax_backward_data.default native_layer_norm_backward.default addcdiv.default"),
    *_cases(linear_in_all, "mul.Tensor mm.default bmm.default dot.default addcmul.default"),
    *_cases(increasing, "neg.default abs.default sin.default cos.default sum.default square.default prod.default"),
    *_cases(decreasing, "relu.default exp.default floor.default amax.default clone.default sigmoid.default"),
    *_cases(passing_products, "neg.default exp.default add.Scalar relu.default"),
    *_cases(reduced_otherwise, "mm.default sum.dim_IntList amax.default amin.default prod.default any.dim all.default"),
    *_cases(reduced_otherwise, "embedding.default embedding_dense_backward.default mean.dim dot.default nansum.default"),
    *_cases(reduced_by_avg, "mm.default sum.default mean.default mv.default bmm.default"),
    *_cases(reversed_dims, "t.default transpose.int permute.default mm.default add.Tensor unbind.int"),
    *_cases(without_local, "mean.dim mean.default amax.default min.default embedding.default expand.default"),
    *_cases(without_ranges, "embedding.default"),
    *_cases(without_addends, "addmm.default baddbmm.default"),
    *_cases(allow_splits_by_sum, "native_layer_norm.default gather.default searchsorted.Tensor take.default"),
    *_cases(allow_splits_by_sum, "_cdist_forward.default index.Tensor index_copy.default _aminmax.dim isin.Tensor_Tensor"),
    *_cases(allow_splits, "renorm.default linalg_cross.default linalg_solve_triangular.default cholesky_solve.default"),
    *_cases(allow_splits, "_linalg_svd.default rot90.default scatter.src diagonal.default slice_scatter.default"),
    *_cases(linear_in_first, "index_put.default scatter_reduce.two index_copy.default linalg_matrix_exp.default"),
    *_cases(linear_in_first, "_cdist_forward.default renorm.default histc.default linalg_solve_triangular.default"),
    *_cases(linear_in_last, "index_reduce.default addmv.default"),
    *_cases(linear_in_all, "_trilinear.default linalg_cross.default"),
    *_cases(reduced_otherwise, "index_add.default scatter_add.default trace.default histc.default put.default"),
    *_cases(reduced_otherwise, "index.Tensor _trilinear.default addbmm.default _cdist_backward.default"),
    *_cases(without_local, "tril.default trace.default index.Tensor index_put.default index_select.default"),
    *_cases(without_local, "gather.default scatter.src select_scatter.default diagonal_backward.default"),
    *_cases(without_local, "addmv.default new_zeros.default"),
    *_cases(without_ranges, "tril.default trace.default index_put.default scatter_add.default"),
    *_cases(without_addends, "addmv.default addbmm.default index_add.default put.default"),
    *_cases(allow_splits, "unfold.default convolution.default native_group_norm.default"),
    *_cases(allow_splits_by_sum, "grid_sampler_2d.default im2col.default"),
    *_cases(linear_in_first, "mse_loss.default native_batch_norm.default huber_loss.default"),
    *_cases(linear_in_last, "convolution.default grid_sampler_2d.default soft_margin_loss_backward.default"),
    *_cases(linear_in_last, "native_group_norm_backward.default _weight_norm_interface_backward.default"),
    *_cases(reduced_otherwise, "convolution.default convolution_backward.default nll_loss_forward.default mse_loss.default"),
    *_cases(reduced_otherwise, "native_batch_norm_backward.default _embedding_bag_per_sample_weights_backward.default"),
    *_cases(without_local, "convolution.default convolution_backward.default mse_loss.default mse_loss_backward.default"),
    *_cases(without_local, "nll_loss_forward.default native_group_norm.default upsample_nearest2d_backward.default"),
    *_cases(without_local, "slice_backward.default affine_grid_generator.default multi_margin_loss.default"),
    *_cases(without_ranges, "nll_loss_forward.default nll_loss2d_forward.default nll_loss_backward.default"),
    *_cases(without_addends, "convolution.default"),
    *_cases(with_empty_blocks, "max_pool2d_with_indices.default reflection_pad2d.default"),
]  # fmt: skip


@pytest.mark.parametrize(("mutation", "name"), WRONG)
def test_a_wrong_row_is_detected(mutation, name, monkeypatch):
    monkeypatch.setitem(TABLE, name, mutation(name))
    with pytest.raises(RuleError, match="does not agree with its row"):
        verify(name, calls_of(name), examples=EXAMPLES)


_ATTENTION = "b h {} !e, b h {} !e, b h {} !f, b h {} {} -> b h {} !f, b h {}"


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        (
            "aten.native_layer_norm_backward.default",
            row("… d, … d, … !, … !, d, d -> … d, d, d", linear=[[0]]),
        ),
        (
            "aten._scaled_dot_product_flash_attention_for_cpu.default",
            row(_ATTENTION.format("!s", "t", "t", "!s", "t", "!s", "!s"), empty=False),
        ),
        (
            "aten._scaled_dot_product_flash_attention_for_cpu.default",  # a causal mask counts from the first query
            row(_ATTENTION.format("s", "!t", "!t", "s", "!t", "s", "s"), empty=False),
        ),
        ("aten.where.self", row("… d, … d, … d -> … d", linear=[[1]])),
        ("aten.where.self", row("… d, … d, … d -> … d", linear=[[2]])),
        ("aten.mv.default", row("m k, k -> m", linear=[[0, 1]])),
        ("aten.cumsum.default", row("… d -> … d")),
        ("aten.bmm.default", row("b m k, b k n -> b n m")),
        ("aten.dot.default", row("k, !k -> k")),
    ],
)
def test_a_wrong_text_is_detected(name, wrong, monkeypatch):
    monkeypatch.setitem(TABLE, name, wrong)
    with pytest.raises(sw.LayoutError, match=r"does not agree with its row|does not fit|was not run"):
        verify(name, calls_of(name), examples=EXAMPLES)


def test_a_rule_that_ignores_casts_is_detected(monkeypatch):
    monkeypatch.setattr("shardwise.rules.Rule.cast", lambda rule, call: rule)
    for name in ("aten.sum.default", "aten.copy.default", "aten.mul.Scalar", "aten.cat.default"):
        with pytest.raises(RuleError, match="does not agree with its row"):
            verify(name, calls_of(name), examples=EXAMPLES)


def test_the_counterexample_is_small_and_complete(monkeypatch):
    monkeypatch.setitem(TABLE, "aten.sub.Tensor", pointwise(linear=[[0]]))
    x, y = torch.tensor([1.0, 2.0]), torch.tensor([3.0, 5.0])
    with pytest.raises(RuleError) as caught:
        verify(torch.ops.aten.sub.Tensor, [((x.repeat(9), 1.0), {}), ((x, y), {"alpha": 2})])
    error = caught.value
    assert error.what == "aten.sub.Tensor does not agree with its row, 'pointwise; linear in (0)'."
    assert error.why.splitlines() == [
        "aten.sub.Tensor(x0, x1, alpha=2) on a mesh of a=2 gave the result, which is f32[2] P(a,sum), as -11.0 at [0], not -5.0",
        "       x0 is f32[2] P(a,sum): [1.0, 2.0]",
        "       x1 is f32[2]: [3.0, 5.0]",
        "       got [-11.0, -18.0]",
        "       expected [-5.0, -8.0]",
    ]
    assert "remove them from linear=" in error.fix


@pytest.mark.parametrize(
    "op", ["add_.Tensor", "mul_.Tensor", "neg_.default", "cumsum_.default", "relu_.default"]
)
def test_an_in_place_op_has_the_row_of_its_functional_variant(op):
    proof = verify(f"aten.{op}", examples=EXAMPLES)
    assert proof.row == TABLE[f"aten.{op.replace('_', '')}"].text
    assert proof.candidates > 20


def test_the_proof_states_what_was_run():
    proof = verify("aten.mm.default", examples=2, seed=3)
    assert proof == verify(torch.ops.aten.mm.default, examples=2, seed=3)
    assert (proof.op, proof.row, proof.calls) == ("aten.mm.default", TABLE["aten.mm.default"].text, 2)
    assert str(proof) == (
        f"aten.mm.default agrees with its row, '{proof.row}', in {proof.candidates} layouts of 2 calls, "
        f"{proof.gradients} of them with gradients"
    )
    assert 0 < proof.gradients < proof.candidates


@pytest.mark.parametrize(
    ("op", "calls", "what"),
    [
        ("aten.nonesuch.default", None, "is not the name of an op"),
        (torch.ops.aten.add, None, r"has \d+ overloads"),
        (torch.add, None, "is not an op"),
        ("aten.nonzero.default", None, "has no row"),
        ("aten.mm.default", [], "was not run"),
        ("aten.reflection_pad1d.default", None, "could be generated"),
        ("aten._linalg_svd.default", None, "could be generated.*\n.*internal to torch"),
        ("aten.index_select.default", None, "could be generated.*\n.*Its index must be valid indices"),
    ],
)
def test_why_a_row_cannot_be_verified(op, calls, what):
    with pytest.raises(sw.LayoutError, match=what):
        verify(op, calls)


def test_calls_are_not_generated_without_shapes():
    with pytest.raises(
        RuleError, match=r"could be generated(.|\n)*does not give the shapes of its 3 tensors"
    ):
        draw(torch.ops.aten.addmv.default, "listed by a function", 2, 0)


def test_a_wrong_gradient_is_detected(monkeypatch):
    # the row of a backward op sums over a dim that the op keeps
    monkeypatch.setitem(TABLE, "aten.tanh_backward.default", row("… d, … d -> … !", by={"d": "sum"}))
    with pytest.raises(RuleError, match="gradient"):
        verify("aten.tanh.default", [((torch.randn(4, 1),), {})])
