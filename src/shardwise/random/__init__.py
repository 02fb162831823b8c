"""Random numbers that are a function of seed, stream position and global element index, never of the layout.

In the order to read: `philox` makes words, `cells` says which elements a block holds, `fill` turns the one into values
of the other by a recipe, and the rest are recipes, written once for NumPy and torch with `arrays` and `elementary`.
"""

from shardwise.random.block_indices import Cells
from shardwise.random.discrete import bernoulli, integers, random_range
from shardwise.random.gamma import gamma
from shardwise.random.inversion import cauchy, exponential, geometric
from shardwise.random.normal import log_normal, normal
from shardwise.random.permutation import permutation
from shardwise.random.philox import Draw
from shardwise.random.poisson_binomial import binomial, poisson
from shardwise.random.uniform import uniform

__all__ = [
    "Cells",
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
