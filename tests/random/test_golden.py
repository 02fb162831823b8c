"""Hashes of the random numbers: a change of one of them changes the numbers of every program (docs/adr/0010)."""

from __future__ import annotations

import hashlib
import math

import pytest
import torch
from tests.random.test_fill import MAKERS
from torch import Tensor

from shardwise.random import (
    BlockIndices,
    Draw,
    binomial,
    gamma,
    integers,
    normal,
    permutation,
    poisson,
    uniform,
)

DRAW = Draw(0x0123456789ABCDEF, 0xFEDCBA9876543210)
WIDE = torch.logspace(-2, 4, 501, dtype=torch.float64)
CASES = {
    **{name: (lambda make=make: make(DRAW, BlockIndices((501,)))) for name, make in MAKERS.items()},
    "permutation 100": lambda: permutation(DRAW, BlockIndices((100,))),
    "permutation 10000": lambda: permutation(DRAW, BlockIndices((10_000,))),
    "poisson": lambda: poisson(DRAW, BlockIndices((501,)), WIDE),
    "binomial": lambda: binomial(
        DRAW, BlockIndices((501,)), WIDE.ceil(), 0.001 + 0.998 * torch.arange(501) / 501
    ),
    "gamma": lambda: gamma(DRAW, BlockIndices((501,)), WIDE),
}
GOLDEN = {
    "uniform float32": "66dc2c81fe143901",
    "uniform -3..5.1 float32": "bfffcc8c1843eca3",
    "normal float32": "80d98c5bfcae8176",
    "normal .3 7 float32": "2205ffbae52388ed",
    "log_normal float32": "5fff81d473a9b31c",
    "exponential float32": "7d2d616f5ecde30d",
    "cauchy float32": "0378a342c0d9e74d",
    "bernoulli float32": "5b8528a5166ad6a4",
    "geometric float32": "6453aefd19fed1a8",
    "random float32": "e2c8140d4583a9c9",
    "uniform float64": "8e27b43a43909cc1",
    "uniform -3..5.1 float64": "a46527e06a7a6772",
    "normal float64": "a7aefaf8117355c8",
    "normal .3 7 float64": "f19399928fd75deb",
    "log_normal float64": "0b49fe720e2d2523",
    "exponential float64": "b7b98da1f0426c2c",
    "cauchy float64": "379e1cc3e1db11bd",
    "bernoulli float64": "c4768633538f975e",
    "geometric float64": "0a31f6ad8f464fa6",
    "random float64": "c36cf0b38c7283e0",
    "uniform bfloat16": "c3009633a11ca1fb",
    "uniform -3..5.1 bfloat16": "0a136edd535ef3e3",
    "normal bfloat16": "d31e994d3afa48d9",
    "normal .3 7 bfloat16": "d5d9242c25493982",
    "log_normal bfloat16": "94a28e6bcb6a4aac",
    "exponential bfloat16": "b8bfbb7c89275667",
    "cauchy bfloat16": "e7ef589f536e8987",
    "bernoulli bfloat16": "3fd8512a08c63b32",
    "geometric bfloat16": "db02677cf610d6b4",
    "random bfloat16": "82305b64c9edb030",
    "uniform float16": "2583813672f85d46",
    "uniform -3..5.1 float16": "1752ae6f7fb3e508",
    "normal float16": "1235000f83ebca78",
    "normal .3 7 float16": "694fd3f9d8bd41e1",
    "log_normal float16": "606816f772fe86c6",
    "exponential float16": "41d4b018bf102d13",
    "cauchy float16": "ddbfe9cca71fb5bf",
    "bernoulli float16": "5036075fa4cf9766",
    "geometric float16": "9fdce6c9c368fe29",
    "random float16": "61a5303c642bf5da",
    "random int64": "76f810632848c484",
    "geometric int64": "a0fc30d0df4f9396",
    "random int32": "5ed1dabc3e58041a",
    "geometric int32": "f38d76cca41257b7",
    "random int16": "7763826e8f339862",
    "geometric int16": "13d4a889b976eb80",
    "random int8": "695b73955b3bc522",
    "geometric int8": "acb0a06931cd01c8",
    "random uint8": "dcb954123d82f1ee",
    "geometric uint8": "acb0a06931cd01c8",
    "bernoulli bool": "2d24e7e6cf1a14c2",
    "integers small": "574d0988e0aa4996",
    "integers 2**40": "66884e807be89ed3",
    "integers above 2**63": "6219d1f891cffd2e",
    "integers all": "564dee092c2400a3",
    "integers float": "36e0e753a1b30f2e",
    "uniform complex64": "0500e49b6c1c7d78",
    "normal complex128": "31cb3a20fbaf77c1",
    "permutation 100": "fb24e94e3e4c3ff0",
    "permutation 10000": "1b40adba33c13349",
    "poisson": "32d913398331e68f",
    "binomial": "5693dd9bcb658771",
    "gamma": "cc41a8a087865288",
}


def _digest(t: Tensor) -> str:
    return hashlib.sha256(t.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()[:16]


@pytest.mark.parametrize("name", CASES)
def test_numbers_have_not_changed(name: str) -> None:
    assert _digest(CASES[name]()) == GOLDEN[name]


def test_first_numbers_by_the_definition() -> None:
    draw, four = Draw(0, 0), BlockIndices((4,))
    # the words of a counter of zeros: 6627e8d5 e169c58d bc57ac4c 9b00dbd8
    words = [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    assert uniform(draw, four, torch.float32).tolist() == [(w >> 8) / 2**24 for w in words]
    assert uniform(draw, four, torch.bfloat16).tolist() == [(w >> 24) / 2**8 for w in words]
    wide = [words[0] | words[1] << 32, words[2] | words[3] << 32]
    assert uniform(draw, BlockIndices((2,)), torch.float64).tolist() == [(w >> 11) / 2**53 for w in wide]
    for size in (1, 2, 6, 1000, 50_257, 2**31 - 1):
        assert integers(draw, BlockIndices((2,)), torch.int64, high=size).tolist() == [
            w * size >> 64 for w in wide
        ]
    words_of_many = integers(draw, BlockIndices((300,)), torch.int64, low=-(2**63), high=2**63)
    for size in (3, 50_257, 2**31 - 1):  # in few cases the carry from the lower half of the product matters
        scaled = [(w + 2**63) % 2**64 for w in words_of_many.tolist()]
        assert integers(draw, BlockIndices((300,)), torch.int64, high=size).tolist() == [
            w * size >> 64 for w in scaled
        ]
    for size in (2**31, 10**12, 2**63 - 1):
        assert integers(draw, BlockIndices((2,)), torch.int64, high=size).tolist() == [
            (w >> 1) % size for w in wide
        ]
    expected = []
    for v, w in (words[:2], words[2:]):
        radius = math.sqrt(-math.log(((v >> 1) + 0.5) / 2**31))
        turn = (w << 2 & 0xFFFFFFFF) / 2**31
        angle = (turn - 2 if turn >= 1 else turn) * math.pi / 4
        expected += [radius * (math.cos(angle) + math.sin(angle)) * (-1) ** (w >> 31)]
        expected += [radius * (math.cos(angle) - math.sin(angle)) * (-1) ** (w >> 30 & 1)]
    assert normal(draw, four, torch.float32).tolist() == pytest.approx(expected, rel=1e-6)
