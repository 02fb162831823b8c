"""Logarithm, exponential, cosine and sine: accurate, and the same bits in NumPy and torch."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from shardwise.random.normal import box_muller, half_open
from shardwise.random.numpy_or_torch import sqrt_
from shardwise.random.poisson_binomial import log_factorial
from shardwise.random.portable_math import cos_sin, exp, ln

WIDTHS = [(np.float32, 3e-7), (np.float64, 1e-15)]


def _numbers(lo: float, hi: float, dtype: type, count: int = 300_001) -> np.ndarray:
    return np.random.default_rng(1).uniform(lo, hi, count).astype(dtype)


def _both(function, x: np.ndarray) -> np.ndarray:
    """The result by NumPy, after a check that torch's has the same bits."""
    by_numpy = function(x.copy())
    by_torch = function(torch.from_numpy(x.copy()))
    pairs = zip(by_numpy, by_torch, strict=True) if isinstance(by_numpy, tuple) else [(by_numpy, by_torch)]
    for a, b in pairs:
        assert a.tobytes() == b.numpy().tobytes()
    return by_numpy


@pytest.mark.parametrize(("dtype", "bound"), WIDTHS)
def test_ln(dtype: type, bound: float) -> None:
    x = np.exp(_numbers(-60, 60, np.float64)).astype(dtype)
    x[:5] = 1, 2, 0.5, math.sqrt(2), math.sqrt(0.5)
    true = np.log(x.astype(np.longdouble))
    error = np.abs(_both(ln, x) - true)
    assert (error <= bound * np.abs(true) + 1e-30).all()
    scaled = _both(lambda x: ln(x, scale=-2.0, power=31), x)
    true = -2 * np.log(x.astype(np.longdouble) / 2**31)
    assert (np.abs(scaled - true) <= bound * np.abs(true) + 1e-30).all()


@pytest.mark.parametrize(("dtype", "bound"), WIDTHS)
def test_cos_sin(dtype: type, bound: float) -> None:
    y = _numbers(-1, 1, dtype)
    y[:3] = -1, 0, 1
    cos, sin = _both(cos_sin, y)
    angle = y.astype(np.longdouble) * (np.longdouble(1) * np.pi / 4)
    assert np.abs(cos - np.cos(angle)).max() < bound / 2
    assert np.abs(sin - np.sin(angle)).max() < bound / 2
    small = np.abs(angle) > 0
    assert (np.abs(sin / np.sin(angle, where=small, out=np.ones_like(angle)) - 1)[small] < bound).all()


@pytest.mark.parametrize(("dtype", "bound", "limit"), [(np.float32, 3e-7, 87.0), (np.float64, 1e-15, 708.0)])
def test_exp(dtype: type, bound: float, limit: float) -> None:
    x = _numbers(-limit, limit, dtype)
    x[:3] = 0, 0.3, -0.3
    assert np.abs(_both(exp, x) / np.exp(x.astype(np.longdouble)) - 1).max() < bound
    beyond = np.array([2 * limit, -2 * limit, np.inf, -np.inf, 1], dtype)
    assert _both(exp, beyond)[:4].tolist() == [np.inf, 0, np.inf, 0]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_square_root_is_correctly_rounded(dtype: type) -> None:
    x = _numbers(0, 50, dtype)
    assert (_both(sqrt_, x) == np.array([math.sqrt(v) for v in x.astype(np.float64)]).astype(dtype)).all()


@pytest.mark.parametrize(("word", "count"), [(np.uint32, 32), (np.int64, 64)])
def test_normal_numbers_of_extreme_words_are_finite(word: type, count: int) -> None:
    edge = [0, 1, 2, 3, 2**count - 1, 2**count - 2, 2 ** (count - 1), 2 ** (count - 1) - 1, 2 ** (count - 2)]
    edge += [2 ** (count - 2) - 1, 3 * 2 ** (count - 2), 2**count - 2 ** (count // 4), 2 ** (count // 3)]
    first, second = np.meshgrid(np.array(edge, np.uint64), np.array(edge, np.uint64))
    first, second = (w.reshape(-1).astype(np.uint64).astype(word) for w in (first, second))
    value, other = box_muller(first.copy(), second.copy())
    assert np.isfinite(value).all()
    assert np.isfinite(other).all()
    by_torch = box_muller(
        *(torch.from_numpy(w.view(np.int32 if count == 32 else np.int64).copy()) for w in (first, second))
    )
    assert value.tobytes() == by_torch[0].numpy().tobytes()
    assert other.tobytes() == by_torch[1].numpy().tobytes()
    length = np.hypot(value.astype(np.float64), other.astype(np.float64))
    assert length.max() == pytest.approx(math.sqrt(2 * count * math.log(2)), rel=1e-6)


@pytest.mark.parametrize(("word", "count", "bound"), [(np.uint32, 32, 1e-6), (np.int64, 64, 1e-14)])
def test_box_muller_is_accurate(word: type, count: int, bound: float) -> None:
    first, second = (np.random.default_rng(s).integers(0, 2**count, 200_000, np.uint64) for s in (1, 2))
    u = (first >> np.uint64(1)).astype(np.longdouble) + 0.5
    angle = (second << np.uint64(66 - count)).view(np.int64).astype(np.longdouble) / 2.0**63 * (
        np.pi / 4
    ) + np.pi / 4
    radius = np.sqrt(-2 * np.log(u / np.longdouble(2.0) ** (count - 1)))
    signs = [
        1 - 2 * (second >> np.uint64(count - 1 - k) & np.uint64(1)).astype(np.longdouble) for k in (0, 1)
    ]
    value, other = box_muller(first.astype(word), second.astype(word))
    # near 1, u has 24 bits, as in torch, which limits the accuracy of a small radius
    near = bound / np.minimum(radius, 1)
    assert (np.abs(value - signs[0] * radius * np.sin(angle)) < near).all()
    assert (np.abs(other - signs[1] * radius * np.cos(angle)) < near).all()


def test_half_open_is_never_zero() -> None:
    for word, power in ((np.uint32, 31), (np.int64, 63)):
        ends = half_open(np.array([0, 2 ** (power + 1) - 1], np.uint64).astype(word))
        assert ends.tolist() == [0.5, 2.0**power]


def test_log_factorial() -> None:
    k = torch.cat(
        [torch.arange(300.0, dtype=torch.float64), torch.tensor([1e4, 1e6, 1e9, 1e12], dtype=torch.float64)]
    )
    true = torch.lgamma(k + 1)
    assert ((log_factorial(k) - true).abs() <= 2e-12 + 1e-15 * true.abs()).all()
