"""Cheaper ways than gathering to run an op along a split dim: statistics, halo exchanges, slices, ..."""

from shardwise.alternatives.alternative import Alternative
from shardwise.alternatives.registry import ALTERNATIVES, propose_alternative

__all__ = ["ALTERNATIVES", "Alternative", "propose_alternative"]
