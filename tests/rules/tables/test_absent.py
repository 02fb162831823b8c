"""Rows of ops without a CPU kernel: with reference kernels, and with meta kernels on the shapes of blocks."""

import itertools

import pytest
import torch
from tests.rules.absent import ABSENT, reference_kernels

import shardwise as sw
from shardwise.call.arguments import tensors_in, with_tensors
from shardwise.call.meta import infer_outputs
from shardwise.call.resolve import match_rule
from shardwise.comm import axes_of
from shardwise.layout import block_shape
from shardwise.plan import every_choice
from shardwise.plan.settings import forget_decisions
from shardwise.rules import RuleError, verify
from shardwise.rules.table import TABLE
from shardwise.verify.cases import PlainCall

pytestmark = pytest.mark.filterwarnings("ignore")


def _op(name):
    return getattr(torch.ops.aten, name.split(".")[1]).default


@pytest.mark.parametrize("name", ABSENT)
def test_there_is_no_cpu_kernel(name):
    args, kwargs = ABSENT[name][2]()[0]
    with pytest.raises(NotImplementedError):
        _op(name)(*args, **kwargs)


@pytest.mark.parametrize("name", ABSENT)
def test_a_row_holds_with_a_reference_kernel(name, caplog):
    caplog.set_level("ERROR", logger="shardwise")
    calls = ABSENT[name][2]()
    with reference_kernels():
        proof = verify(name, calls)
    assert proof.calls == len(calls)
    assert proof.candidates > 2 * proof.calls + 2, "nothing was split and nothing was pending"


@pytest.mark.parametrize("name", ABSENT)
def test_blocks_have_the_shapes_that_the_row_implies(name):
    split = set()
    for shape in ((2,), (3,), (2, 2)):
        with sw.simulate(4 if len(shape) > 1 else shape[0]):
            mesh = sw.init_device_mesh("cpu", shape, mesh_dim_names=("a", "b")[: len(shape)])
            for args, kwargs in ABSENT[name][2]():
                split |= _check_blocks(_op(name), args, kwargs, mesh)
        forget_decisions()
    letters = {x for args, kwargs in ABSENT[name][2]() for x in _letters(_op(name), args, kwargs)}
    assert split == letters, "a letter was never split"


def _letters(func, args, kwargs):
    with sw.simulate(2):
        met = match_rule(PlainCall(func, args, kwargs, sw.init_device_mesh("cpu", (2,))))
    return {x for letters in met.rule.inputs for x in letters if x is not None}


def _check_blocks(func, args, kwargs, mesh):
    """Check in each allowed layout that the meta kernel's outputs for blocks have the shapes of the outputs' blocks."""
    met = match_rule(PlainCall(func, args, kwargs, mesh))
    assert met is not None, f"the row does not cover {[tuple(t.shape) for t in tensors_in(args)]}"
    call, split = met.call, set()
    tensors = tensors_in([*args, *kwargs.values()])
    for choice in every_choice(met.rule, call.shapes, call.outputs, axes_of(mesh)):
        for letters, layout in zip(met.rule.inputs, choice.inputs, strict=True):
            split |= {x for x, dim in zip(letters, layout.dims, strict=True) if any(f.axes for f in dim)}
        for coord in itertools.product(*map(range, mesh.shape)):
            blocks = iter(
                torch.empty(block_shape(o, coord), dtype=t.dtype, device="meta")
                for o, t in zip(choice.inputs, tensors, strict=True)
            )
            results = infer_outputs(func, with_tensors(args, blocks), with_tensors(kwargs, blocks))
            shapes = [tuple(t.shape) for t in results if isinstance(t, torch.Tensor)]
            want = [block_shape(o, coord) for o in choice.outputs]
            for number, (got, expected) in enumerate(zip(shapes, want, strict=True)):
                assert number in met.rule.alike or got == expected, (choice, coord, number)
    return split


def test_a_wrong_row_is_detected(monkeypatch):
    flash = "aten._scaled_dot_product_flash_attention.default"
    monkeypatch.setitem(TABLE, "aten._scaled_dot_product_cudnn_attention.default", TABLE[flash])
    with pytest.raises(AssertionError):
        test_blocks_have_the_shapes_that_the_row_implies("aten._scaled_dot_product_cudnn_attention.default")
    cpu = TABLE["aten._scaled_dot_product_flash_attention_for_cpu_backward.default"]
    name = "aten._scaled_dot_product_efficient_attention_backward.default"
    monkeypatch.setitem(TABLE, name, cpu)
    with reference_kernels(), pytest.raises((RuleError, IndexError)):
        verify(name, ABSENT[name][2]())
