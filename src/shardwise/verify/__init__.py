"""Checking rules by execution: every layout that a rule allows is run and compared with the op on full tensors."""

from shardwise.verify.prove import prove

__all__ = ["prove"]
