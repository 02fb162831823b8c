"""Imports torchtitan, after `shardwise.install()`."""

import shardwise

shardwise.install()

import tests.drop_in.torchtitan_runs  # noqa: E402, F401
