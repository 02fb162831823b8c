"""Where torch keeps `parallelize_module`."""

from shardwise.parallel.parallelize import parallelize_module

__all__ = ["parallelize_module"]
