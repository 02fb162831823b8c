"""Maxima and minima along a split dim with their indices: equal to the dense ones, and little is sent."""

import math

import pytest
import torch
from tests.dense import compare, randn

NAN = float("nan")
CASES = {
    "argmax": lambda x: x.argmax(-1),
    "argmin, keepdim": lambda x: x.argmin(1, keepdim=True),
    "argmax of all": lambda x: x.argmax(),
    "argmin of all, keepdim": lambda x: torch.ops.aten.argmin(x, None, True),
    "max": lambda x: x.max(1),
    "min, keepdim": lambda x: x.min(-1, keepdim=True),
    "argmax of columns": lambda x: x.argmax(0),
    "aminmax": lambda x: x.aminmax(dim=1),
    "aminmax of all": lambda x: x.aminmax(),
}
VALUES = {
    "ties": torch.tensor([[2, 7, 7, 1, 7, 0, 0, 3, 0]] * 3, dtype=torch.float64),
    "two NaN": torch.tensor(
        [[2, 7, NAN, 1, 7, 0, NAN, 3, 0], [1, 1, 1, 1, 1, 1, 1, 1, NAN]], dtype=torch.float64
    ),
    "infinities": torch.tensor([[-math.inf] * 9, [math.inf] * 9], dtype=torch.float64),
    "integers": torch.tensor([[-128, 127, 3, 127, -128, 0, 1, 2, 3]] * 2, dtype=torch.int8),
    "bools": torch.tensor([[False, True, True, False, False, True, True, True, False]] * 2),
    "bfloat16": randn(5, 9, dtype=torch.bfloat16),
    "float64": randn(5, 7),
}
LAYOUTS = [("1", (4,)), ("1", (3,)), ("0", (4,)), ("0 1", (2, 2)), ("1 1", (2, 2))]
# torch has no argmax of bools
PAIRS = [
    (name, values) for name in CASES for values in VALUES if values != "bools" or not name.startswith("arg")
]


@pytest.mark.parametrize(("name", "values"), PAIRS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_equals_the_dense_result(name, values, layout, taken):
    compare(CASES[name], [VALUES[values]], [layout[0]], layout[1], grad=False)
    assert taken or "columns" in name or "1" not in layout[0]


def test_gradients_and_pending_sums():
    for layout in ("0", "1", "P"):
        compare(lambda x: x.max(1), [randn(5, 9)], [layout])
        compare(lambda x: x.aminmax(dim=1), [randn(5, 9)], [layout])
        compare(lambda x: x.argmax(1), [randn(5, 9)], [layout], grad=False)


def test_a_factored_dim():
    compare(lambda x: x.flatten().argmax(), [randn(4, 6)], ["1"], (3,), grad=False)
    compare(lambda x: x.flatten().max(0), [randn(4, 6)], ["1"], (3,), grad=False)


def test_a_factored_dim_by_its_alternative(taken):
    test_a_factored_dim()
    assert {torch.ops.aten.argmax.default, torch.ops.aten.max.dim} <= set(taken)


@pytest.mark.parametrize("largest", [True, False])
@pytest.mark.parametrize("k", [1, 2, 3])
def test_topk(k, largest, taken):
    for layout, mesh in (("1", (4,)), ("0 1", (2, 2)), ("1 1", (2, 2))):
        compare(lambda x: x.topk(k, 1, largest), [randn(4, 16)], [layout], mesh)
        assert torch.ops.aten.topk.default in taken
        # blocks of 3, 3, 3 and 1
        compare(lambda x: x.topk(k, -1, largest), [randn(3, 10)], [layout], mesh, grad=False)


def test_large_rows_send_little():
    x = randn(3, 40_000)
    for fn in (lambda x: x.argmax(1), lambda x: x.max(1), lambda x: x.topk(5, 1), lambda x: x.argmax()):
        assert compare(fn, [x], ["1"], grad=False).bytes < 3000
    assert compare(lambda x: x.aminmax(dim=1), [x], ["1"], grad=False).bytes == 0
