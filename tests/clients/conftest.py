"""Tests of clients are collected where the clients are installed: requirements-clients.txt."""

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("transformers") and find_spec("peft") else ["*.py"]
