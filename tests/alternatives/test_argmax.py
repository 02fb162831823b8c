"""The largest along a split dim and where it is: the dense answer, ties and NaN too, and little sent."""

import math

import pytest
import torch
from tests.dense import agrees, drawn

from shardwise.alternatives import argmax as extremes
from shardwise.alternatives import registry as offers

NAN = float("nan")
CASES = {
    "argmax": lambda x: x.argmax(-1),
    "argmin kept": lambda x: x.argmin(1, keepdim=True),
    "argmax of all": lambda x: x.argmax(),
    "argmin of all, kept": lambda x: torch.ops.aten.argmin(x, None, True),
    "max": lambda x: x.max(1),
    "min kept": lambda x: x.min(-1, keepdim=True),
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
    "narrow": drawn(5, 9, dtype=torch.bfloat16),
    "drawn": drawn(5, 7),
}


@pytest.fixture
def chosen(monkeypatch):
    """What is offered, where gathering costs the world, so that small tensors take this way too."""
    made = []
    monkeypatch.setattr(
        "shardwise.alternatives.registry.seconds_of", lambda plans: math.inf if any(plans) else 0.0
    )
    for op, make in extremes.OFFERS.items():
        watched = lambda *call, make=make: made.append(make(*call)) or made[-1]  # noqa: E731
        monkeypatch.setitem(offers.OFFERS, op, watched)
    return made


LIES = [("1", (4,)), ("1", (3,)), ("0", (4,)), ("0 1", (2, 2)), ("1 1", (2, 2))]


# torch has no argmax of bools
PAIRS = [
    (name, values) for name in CASES for values in VALUES if values != "bools" or not name.startswith("arg")
]


@pytest.mark.parametrize(("name", "values"), PAIRS)
@pytest.mark.parametrize("lies", LIES)
def test_the_answer_is_the_dense_one(name, values, lies, chosen):
    agrees(CASES[name], [VALUES[values]], [lies[0]], lies[1], grad=False)
    assert any(chosen) or "columns" in name or "1" not in lies[0]


def test_gradients_and_pending_sums():
    for lie in ("0", "1", "P"):
        agrees(lambda x: x.max(1), [drawn(5, 9)], [lie])
        agrees(lambda x: x.aminmax(dim=1), [drawn(5, 9)], [lie])
        agrees(lambda x: x.argmax(1), [drawn(5, 9)], [lie], grad=False)


def test_rows_that_are_seen_in_another_shape():
    agrees(lambda x: x.flatten().argmax(), [drawn(4, 6)], ["1"], (3,), grad=False)
    agrees(lambda x: x.flatten().max(0), [drawn(4, 6)], ["1"], (3,), grad=False)


@pytest.mark.parametrize("largest", [True, False])
@pytest.mark.parametrize("k", [1, 2, 3])
def test_topk(k, largest, chosen):
    for lie, mesh in (("1", (4,)), ("0 1", (2, 2)), ("1 1", (2, 2))):
        agrees(lambda x: x.topk(k, 1, largest), [drawn(4, 16)], [lie], mesh)
        agrees(
            lambda x: x.topk(k, -1, largest), [drawn(3, 10)], [lie], mesh, grad=False
        )  # blocks of 3, 3, 3, 1


def test_large_rows_send_little():
    x = drawn(3, 40_000)
    for fn in (lambda x: x.argmax(1), lambda x: x.max(1), lambda x: x.topk(5, 1), lambda x: x.argmax()):
        assert agrees(fn, [x], ["1"], grad=False).bytes < 3000
    assert agrees(lambda x: x.aminmax(dim=1), [x], ["1"], grad=False).bytes == 0
