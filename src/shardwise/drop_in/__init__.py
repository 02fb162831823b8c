"""Running programs that were written for torch's package, unmodified: its modules and names, resolved to ours."""

from shardwise.drop_in.install import InstallError, install, installed
from shardwise.drop_in.state_dicts import support_state_dicts

__all__ = ["InstallError", "install", "installed", "support_state_dicts"]
