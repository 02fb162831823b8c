"""Random numbers as a function of seed, stream position and global element index, independent of the layout.

In reading order: `philox` computes random words, `block_indices` lists the elements of a block, `fill` converts the
words of a block to values by a recipe, and the other modules are recipes, written once for NumPy and torch in terms
of `numpy_or_torch` and `portable_math`.
"""

from shardwise.random.block_indices import BlockIndices
from shardwise.random.discrete import bernoulli, integers, random_range
from shardwise.random.gamma import gamma
from shardwise.random.inversion import cauchy, exponential, geometric
from shardwise.random.normal import log_normal, normal
from shardwise.random.permutation import permutation
from shardwise.random.philox import Draw
from shardwise.random.poisson_binomial import binomial, poisson
from shardwise.random.uniform import uniform

__all__ = [
    "BlockIndices",
    "Draw",
    "bernoulli",
    "binomial",
    "cauchy",
    "exponential",
    "gamma",
    "geometric",
    "integers",
    "log_normal",
    "normal",
    "permutation",
    "poisson",
    "random_range",
    "uniform",
]
