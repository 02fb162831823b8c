"""Imports torch's own clients of its DTensor, after `shardwise.install()`."""

import shardwise

shardwise.install()

import tests.drop_in.torch_runs  # noqa: E402
import torch.distributed.pipelining  # noqa: E402, F401
