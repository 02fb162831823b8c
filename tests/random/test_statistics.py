"""Statistical quality: moments, distribution functions, tails, and independence of neighbours."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from shardwise.layout import LayoutError
from shardwise.random import (
    BlockIndices,
    Draw,
    bernoulli,
    binomial,
    cauchy,
    exponential,
    gamma,
    geometric,
    integers,
    log_normal,
    normal,
    permutation,
    poisson,
    random_range,
    uniform,
)
from shardwise.random.fill import Recipe, at
from shardwise.random.normal import box_muller

DRAW = Draw(2**63 + 12345, 77)
MILLION = BlockIndices((10**6,))
FLOATS = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


def kolmogorov_smirnov(u: Tensor) -> float:
    """The Kolmogorov-Smirnov statistic of numbers against the uniform distribution; 1.95 is the 0.1 % level."""
    n = u.numel()
    u = u.double().sort().values
    steps = torch.arange(n + 1, dtype=torch.float64) / n
    return float(max((steps[1:] - u).max(), (u - steps[:-1]).max())) * math.sqrt(n)


def chi_square(found: Tensor, expected: Tensor) -> float:
    """The chi-square statistic of counts, as a standard score."""
    keep = expected > 10
    assert keep.any()
    found, expected = found.double()[keep], expected.double()[keep]
    free = keep.sum().item()
    return (((found - expected) ** 2 / expected).sum().item() - free) / math.sqrt(2 * free)


def correlation(x: Tensor, y: Tensor) -> float:
    """The correlation of two samples, as a standard score."""
    return float(torch.corrcoef(torch.stack([x.double(), y.double()]))[0, 1]) * math.sqrt(x.numel())


def test_normal_numbers_of_float32() -> None:
    n = 10**7
    z = normal(DRAW, BlockIndices((n,)), torch.float32).double()
    for power, mean, variance in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96), (6, 15, 10170)):
        assert abs((z**power).mean().item() - mean) < 4 * math.sqrt(variance / n), power
    assert kolmogorov_smirnov(torch.special.ndtr(z)) < 1.95
    for tail in (3.0, 4.0, 4.8):
        for side in (z, -z):
            expected = n * torch.special.ndtr(torch.tensor(-tail, dtype=torch.float64)).item()
            assert abs((side > tail).sum().item() - expected) < 4 * math.sqrt(expected), tail
    assert 5 < z.abs().max() < 6.7


def test_far_tails_are_reached() -> None:
    """Numbers above 5.5 come from words near 0, which are rare in a sample and therefore given here."""
    words = torch.arange(0, 4000, dtype=torch.int32)
    value, other = box_muller(words, torch.zeros_like(words))
    radius = torch.hypot(value.double(), other.double())
    u = (words.double() // 2 + 0.5) / 2**31
    assert torch.allclose(radius, (-2 * u.log()).sqrt(), rtol=1e-6)
    assert radius.max() > 6.6


@pytest.mark.parametrize("dtype", FLOATS)
def test_normal_numbers(dtype: torch.dtype) -> None:
    z = normal(DRAW, MILLION, dtype, mean=2.0, std=3.0).double()
    assert abs(z.mean().item() - 2) < 4 * 3e-3
    assert abs(z.var().item() - 9) < 4 * 9 * math.sqrt(2e-6)
    if dtype in (torch.float32, torch.float64):
        assert kolmogorov_smirnov(torch.special.ndtr((z - 2) / 3)) < 1.95


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_complex_numbers(dtype: torch.dtype) -> None:
    z = normal(DRAW, MILLION, dtype)
    for part in (z.real, z.imag):
        assert abs(part.double().var().item() - 0.5) < 4 * 0.5 * math.sqrt(2e-6)
    assert abs(correlation(z.real, z.imag)) < 4
    u = uniform(DRAW, MILLION, dtype)
    real = uniform(
        DRAW, BlockIndices((2 * 10**6,)), torch.float32 if dtype == torch.complex64 else torch.float64
    )
    assert torch.equal(torch.view_as_real(u).reshape(-1), real)


@pytest.mark.parametrize(("dtype", "bits"), [*zip(FLOATS, (24, 53, 8, 11), strict=True)])
def test_uniform_numbers(dtype: torch.dtype, bits: int) -> None:
    u = uniform(DRAW, MILLION, dtype).double()
    assert ((u * 2.0**bits) % 1 == 0).all()
    assert 0 <= u.min() < u.max() < 1
    assert abs(u.mean().item() + 2.0 ** (-bits - 1) - 0.5) < 4 * math.sqrt(1 / 12e6)
    if bits > 20:
        assert kolmogorov_smirnov(u) < 1.95
    else:
        counts = torch.bincount((u * 2.0**bits).long(), minlength=2**bits)
        assert len(counts) == 2**bits
        assert abs(chi_square(counts, torch.full((2**bits,), 1e6 / 2**bits))) < 4


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(
    ("low", "high"), [(-1.0, 1.0), (5.0, 5.1), (-0.3, -0.1), (1000.0, 1001.0), (0.0, 1e-3), (2.0, 2.0)]
)
def test_uniform_numbers_stay_below_high(dtype: torch.dtype, low: float, high: float) -> None:
    u = uniform(DRAW, BlockIndices((200_000,)), dtype, low=low, high=high).double()
    if low == high:
        assert (u == low).all()
        return
    assert u.max() < high
    step = float(torch.finfo(dtype).eps) * max(abs(low), abs(high))
    assert u.min() >= low - step
    if step < (high - low) / 100:
        assert abs(u.mean().item() - (low + high) / 2) < 4 * (high - low) / math.sqrt(12 * 200_000) + step


@pytest.mark.parametrize("shift", [1, 2, 3, 4, 8, 1024])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_neighbours_are_uncorrelated(dtype: torch.dtype, shift: int) -> None:
    u, z = uniform(DRAW, MILLION, dtype), normal(DRAW, MILLION, dtype)
    assert abs(correlation(u[shift:], u[:-shift])) < 4
    assert abs(correlation(z[shift:], z[:-shift])) < 4
    assert abs(correlation(z[shift:] ** 2, z[:-shift] ** 2)) < 4


def test_positions_seeds_and_lanes_are_uncorrelated() -> None:
    index = torch.arange(200_000)
    recipe = Recipe(True, lambda word: word.double())
    draws = [Draw(7, 1), Draw(7, 2), Draw(7, 1 + 2**32), Draw(8, 1), Draw(7 + 2**32, 1), Draw(1, 7)]
    samples = [at(draw, index, recipe) for draw in draws]
    samples += [at(draws[0], index, recipe, lane=lane) for lane in (1, 2, 2**15)]
    samples += [at(draws[0], index + 2**34, recipe), at(draws[0], index + 2**48, recipe)]
    for i, x in enumerate(samples):
        for y in samples[:i]:
            assert abs(correlation(x, y)) < 4.5


def test_bits_are_fair() -> None:
    words = integers(DRAW, MILLION, torch.int64, low=-(2**63), high=2**63)
    for bit in range(64):
        ones = (words >> bit & 1).sum().item()
        assert abs(ones - 5e5) < 4.5 * 500, bit


@pytest.mark.parametrize("p", [0.0, 1e-4, 0.1, 0.5, 0.9, 1.0])
def test_bernoulli(p: float) -> None:
    ones = bernoulli(DRAW, MILLION, torch.float32, p=p)
    assert set(ones.unique().tolist()) <= {0.0, 1.0}
    assert abs(ones.double().sum().item() - 1e6 * p) <= 4 * math.sqrt(1e6 * p * (1 - p))
    for dtype in (torch.float64, torch.float32):
        each = bernoulli(DRAW, MILLION, torch.bool, p=torch.full((10**6,), p, dtype=dtype))
        exact = bernoulli(DRAW, MILLION, torch.bool, p=torch.tensor(p, dtype=dtype).item())
        assert torch.equal(each, exact)


def test_bernoulli_of_many_probabilities() -> None:
    p = torch.linspace(0, 1, 10**6)
    ones = bernoulli(DRAW, MILLION, torch.uint8, p=p).double()
    assert abs(ones.mean().item() - 0.5) < 4e-3
    tenths = ones.view(10, -1).mean(1)
    assert (tenths - p.view(10, -1).mean(1)).abs().max() < 6e-3


@pytest.mark.parametrize(("low", "high"), [(0, 1), (0, 2), (-3, 4), (10, 1010), (0, 2**16)])
def test_integers_of_small_ranges(low: int, high: int) -> None:
    x = integers(DRAW, MILLION, torch.int64, low=low, high=high)
    counts = torch.bincount(x - low, minlength=high - low)
    assert len(counts) == high - low
    assert abs(chi_square(counts, torch.full((high - low,), 1e6 / (high - low)))) < 4


@pytest.mark.parametrize(
    "size", [2**31 - 1, 2**31, 2**31 + 1, 3 * 2**40, 2**63 - 1, 2**63, 2**63 + 5, 3 * 2**62, 2**64 - 1, 2**64]
)
def test_integers_of_large_ranges(size: int) -> None:
    low = -(2**63) if size > 2**62 else -17
    x = integers(DRAW, MILLION, torch.int64, low=low, high=low + size)
    u = (x.double() - float(low)) / float(size)
    assert 0 <= u.min() < u.max() <= 1
    if size in (2**63 + 5, 3 * 2**62):  # as in torch, words beyond the range wrap around to its start
        assert u.max() > 0.99
    else:
        assert kolmogorov_smirnov(u) < 1.95


@pytest.mark.parametrize(
    "dtype", [*FLOATS, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool]
)
def test_default_ranges_are_those_of_torch(dtype: torch.dtype) -> None:
    low, high = random_range(dtype, None, None)
    x = integers(DRAW, MILLION, dtype, "cpu", low, high)
    expected = torch.empty(10**6, dtype=dtype).random_()
    assert x.dtype == dtype
    assert x.min() >= 0
    assert x.double().max().item() == pytest.approx(expected.double().max().item(), rel=1e-3, abs=1)
    assert x.double().mean().item() == pytest.approx(expected.double().mean().item(), rel=0.01)


@pytest.mark.parametrize("dtype", FLOATS)
def test_integers_as_floats_stay_in_range(dtype: torch.dtype) -> None:
    high = 2 ** (torch.finfo(dtype).bits if dtype != torch.float16 else 15) - 1
    x = integers(DRAW, BlockIndices((10**5,)), dtype, low=1, high=min(high, 2**62)).double()
    assert x.min() >= 1
    assert x.max().item() < high


@pytest.mark.parametrize("dtype", FLOATS)
def test_exponential(dtype: torch.dtype) -> None:
    x = exponential(DRAW, MILLION, dtype, lambd=2.0).double()
    assert x.min() > 0
    assert x.isfinite().all()
    assert abs(x.mean().item() - 0.5) < 4 * 0.5e-3 + torch.finfo(dtype).eps / 8
    if torch.finfo(dtype).bits >= 32:
        assert kolmogorov_smirnov(-torch.expm1(-2 * x)) < 1.95


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_cauchy_and_log_normal(dtype: torch.dtype) -> None:
    x = cauchy(DRAW, MILLION, dtype, median=1.0, sigma=2.0).double()
    assert x.isfinite().all()
    assert kolmogorov_smirnov(((x - 1) / 2).atan() / math.pi + 0.5) < 1.95
    x = log_normal(DRAW, MILLION, dtype, mean=0.5, std=0.25).double()
    assert kolmogorov_smirnov(torch.special.ndtr((x.log() - 0.5) / 0.25)) < 1.95


@pytest.mark.parametrize("p", [1e-3, 0.2, 0.5, 0.95, 1.0])
@pytest.mark.parametrize("dtype", [torch.int64, torch.float32])
def test_geometric(p: float, dtype: torch.dtype) -> None:
    x = geometric(DRAW, MILLION, dtype, p=p).double()
    assert x.min() == 1
    k = torch.arange(1, int(x.max()) + 1).double()
    found = torch.bincount(x.long() - 1)
    assert abs(chi_square(found, 1e6 * p * (1 - p) ** (k - 1))) < 4
    assert abs(x.mean().item() - 1 / p) <= 4 * math.sqrt(1 - p) / p / 1e3


@pytest.mark.parametrize("rate", [0.05, 3.0, 9.9, 10.1, 60.0, 4000.0])
def test_poisson(rate: float) -> None:
    n = 200_000
    x = poisson(DRAW, BlockIndices((n,)), torch.full((n,), rate, dtype=torch.float64))
    k = torch.arange(int(x.max()) + 1).double()
    chance = (k * math.log(rate) - rate - torch.lgamma(k + 1)).exp()
    assert abs(chi_square(torch.bincount(x.long()), n * chance)) < 4
    assert abs(x.mean().item() - rate) < 4 * math.sqrt(rate / n)


@pytest.mark.parametrize(
    ("count", "p"), [(1, 0.3), (20, 0.9), (39, 0.25), (60, 0.5), (5000, 0.999), (10**6, 0.3)]
)
def test_binomial(count: int, p: float) -> None:
    n = 200_000
    x = binomial(DRAW, BlockIndices((n,)), *(torch.full((n,), v, dtype=torch.float64) for v in (count, p)))
    assert 0 <= x.min() <= x.max() <= count
    k = torch.arange(int(x.max()) + 1).double()
    ways = math.lgamma(count + 1) - torch.lgamma(k + 1) - torch.lgamma(count - k + 1)
    chance = (ways + k * math.log(p) + (count - k) * math.log1p(-p)).exp()
    assert abs(chi_square(torch.bincount(x.long()), n * chance)) < 4
    assert abs(x.mean().item() - count * p) < 4 * math.sqrt(count * p * (1 - p) / n)


@pytest.mark.parametrize("shape", [0.1, 0.9, 1.0, 7.5, 1000.0])
def test_gamma(shape: float) -> None:
    n = 200_000
    x = gamma(DRAW, BlockIndices((n,)), torch.full((n,), shape, dtype=torch.float64))
    assert kolmogorov_smirnov(torch.special.gammainc(torch.tensor(shape, dtype=torch.float64), x)) < 1.95


def test_edges_of_poisson_binomial_and_gamma() -> None:
    assert poisson(DRAW, BlockIndices((50,)), torch.zeros(50)).eq(0).all()
    some = torch.full((50,), 7.0)
    for p, successes in ((0.0, 0.0), (1.0, 7.0)):
        assert binomial(DRAW, BlockIndices((50,)), some, torch.full((50,), p)).eq(successes).all()
        assert (
            binomial(DRAW, BlockIndices((50,)), some * 1000, torch.full((50,), p)).eq(1000 * successes).all()
        )
    assert binomial(DRAW, BlockIndices((50,)), torch.zeros(50), torch.full((50,), 0.4)).eq(0).all()
    assert (gamma(DRAW, BlockIndices((50,)), torch.full((50,), 1e-3)) > 0).all()


def test_rejection_is_independent_per_element() -> None:
    """The number of an element does not depend on the other elements of the block."""
    shape, full = (60, 50), BlockIndices((60, 50))
    rates = torch.logspace(-2, 5, 3000, dtype=torch.float64)[torch.randperm(3000)].view(shape)
    p = torch.rand(shape, dtype=torch.float64)
    makers = [
        lambda cells, at: poisson(DRAW, cells, rates[at]),
        lambda cells, at: binomial(DRAW, cells, rates[at].floor(), p[at]),
        lambda cells, at: gamma(DRAW, cells, rates[at]),
    ]
    for make in makers:
        dense = make(full, (slice(None), slice(None)))
        for rows, cols in (
            (slice(0, 60), slice(7, 8)),
            (slice(3, 40), slice(10, 49)),
            (slice(59, 60), slice(0, 50)),
        ):
            block = BlockIndices(shape, (range(60)[rows], range(50)[cols]))
            assert torch.equal(make(block, (rows, cols)), dense[rows, cols])


@pytest.mark.parametrize("n", [5, 4096, 4097, 10_007])
def test_permutations_look_uniform(n: int) -> None:
    """Over many draws: uniform values at each position, uncorrelated neighbours, the expected number of fixed points."""
    draws = 600 if n < 4097 else 200
    permutations = torch.stack([permutation(Draw(5, k), BlockIndices((n,))) for k in range(draws)])
    bins = min(n, 16)
    for position in (0, 1, n // 2, n - 1):
        counts = torch.bincount(permutations[:, position] * bins // n, minlength=bins)
        width = torch.bincount(torch.arange(n) * bins // n, minlength=bins)
        assert abs(chi_square(counts, draws * width / n)) < 4
    if n > 5:
        x = permutations.double()
        assert abs(correlation(x[:, 1:].reshape(-1), x[:, :-1].reshape(-1))) < 4.5
        assert abs(correlation(x[1:].reshape(-1), x[:-1].reshape(-1))) < 4.5
        assert abs(correlation(x.reshape(-1), torch.arange(n).repeat(draws))) < 4.5
        steps = permutations.diff(dim=1).abs()  # on average, 2 neighbours stay neighbours
        assert abs(steps.eq(1).sum().item() - 2 * draws) < 4.5 * math.sqrt(2 * draws)
    fixed = permutations.eq(torch.arange(n)).sum().item()
    assert abs(fixed - draws) < 4.5 * math.sqrt(draws)


def test_small_permutations_are_equally_likely() -> None:
    found = torch.stack([permutation(Draw(6, k), BlockIndices((4,))) for k in range(4800)])
    counts = (found * torch.tensor([64, 16, 4, 1])).sum(1).unique(return_counts=True)[1]
    assert len(counts) == 24
    assert abs(chi_square(counts, torch.full((24,), 200.0))) < 4


THREE = BlockIndices((3,))
HUGE = BlockIndices((2**49,), (range(3),))
ERRORS = {
    "uniform integers": (lambda: uniform(DRAW, THREE, torch.int64), "uniform was called for a tensor of dtype torch.int64"),
    "normal integers": (lambda: normal(DRAW, THREE, torch.int64), "normal was called for a tensor of dtype torch.int64"),
    "complex exponential": (lambda: exponential(DRAW, THREE, torch.complex64), "exponential was called for"),
    "permutation as int8": (lambda: permutation(DRAW, BlockIndices((129,)), torch.int8), "largest integer of torch.int8 is 127"),
    "rejection for too many elements": (lambda: gamma(DRAW, HUGE, torch.ones(3)), r"a Philox block of its own"),
}  # fmt: skip


@pytest.mark.parametrize("name", ERRORS)
def test_errors_state_what_why_and_how_to_fix_it(name: str) -> None:
    call, message = ERRORS[name]
    with pytest.raises(LayoutError, match=message) as caught:
        call()
    assert caught.value.what.endswith(".")
    assert caught.value.why
    assert caught.value.fix
