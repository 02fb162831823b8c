"""An optional extension in C++: ops whose blocks need not move run without Python."""

from shardwise.native.extension import NativeBuildError, disable, enable, is_enabled, number_of_calls

__all__ = ["NativeBuildError", "disable", "enable", "is_enabled", "number_of_calls"]
