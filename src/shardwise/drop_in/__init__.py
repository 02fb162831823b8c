"""Running programs that were written for torch's package, unmodified: its modules and names, resolved to ours."""

from shardwise.drop_in.install import InstallError, install, installed

__all__ = ["InstallError", "install", "installed"]
