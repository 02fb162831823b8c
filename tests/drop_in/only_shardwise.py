"""Imports shardwise and installs nothing."""

import torch  # noqa: F401

import shardwise  # noqa: F401
