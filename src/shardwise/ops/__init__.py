"""Ops that are not a rule: random ops, dropout, foreach ops, sparse tensors, requests for values; and patches of torch."""

from shardwise.ops.one_device import one_device
from shardwise.ops.patches import PATCHES, install_patches

__all__ = ["PATCHES", "install_patches", "one_device"]
