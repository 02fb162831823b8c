"""Imports torch's own clients of its DTensor, after `shardwise.install()`."""

import shardwise

shardwise.install()

import torch.distributed.pipelining  # noqa: E402, F401
