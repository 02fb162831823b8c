"""Cheaper ways to run an op along a split dim than gathering it: statistics, halo exchanges, slices, argmax, ..."""

from shardwise.alternatives.alternative import Alternative
from shardwise.alternatives.registry import ALTERNATIVES, propose_alternative

__all__ = ["ALTERNATIVES", "Alternative", "propose_alternative"]
