"""Cheaper ways to run an op along a split dim than gathering it: statistics, halo exchanges, slices, argmax, ..."""

__all__: list[str] = []
