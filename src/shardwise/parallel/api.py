"""Where torch keeps `parallelize_module`."""

from shardwise._reexports import reexports
from shardwise.parallel.parallelize import parallelize_module

__all__ = ["parallelize_module"]

__getattr__ = reexports("parallel.api")
