"""`install()`: our package in the place of torch's, for the rest of the process."""

from __future__ import annotations

import sys

from shardwise.drop_in.alias import AliasFinder
from shardwise.drop_in.client_fixes import client_fixer
from shardwise.drop_in.first_import import first_import
from shardwise.torch_internals.dtensor_class import PACKAGE, occupy_dtensor_class
from shardwise.torch_internals.releases import torch_release

__all__ = ["TESTED", "InstallError", "install", "installed"]

TESTED = ((2, 13), (2, 14), (2, 15))
"""The releases of torch with which the tests of clients were run."""


class InstallError(RuntimeError):
    """`shardwise.install()` came too late, or this release of torch was not tested with it."""


def installed() -> bool:
    """Whether `torch.distributed.tensor` is shardwise in this process."""
    return any(isinstance(finder, AliasFinder) for finder in sys.meta_path)


def install() -> None:
    """Put shardwise where `torch.distributed.tensor` is, for the rest of the process.

    What is imported from torch's package afterwards, by the program, by torch itself (`fully_shard`, pipelining,
    `torch.distributed.checkpoint`) or by libraries, is ours; torch's package is never loaded. To be called once, before
    torch's package is imported: first of all, or at least before `torch.distributed.fsdp`, `torch.distributed.checkpoint`,
    `torch.compile`, models of transformers, and peft. A second call does nothing.

    Raises:
        InstallError: torch's package is already loaded, or this release of torch was not tested.

    Nothing is communicated. `python -m shardwise run train.py ...` runs a program with it, unmodified.
    """
    if installed():
        return
    release = torch_release()
    if release not in TESTED:
        tested = ", ".join(f"{major}.{minor}" for major, minor in TESTED)
        raise InstallError(
            f"shardwise.install() was called with torch {release[0]}.{release[1]}.\n"
            f"  why: It changes what torch's own modules import, and was tested with torch {tested} only.\n"
            f'  fix: pip install "torch=={TESTED[-1][0]}.{TESTED[-1][1]}.*"'
        )
    if PACKAGE in sys.modules:
        raise InstallError(
            f"shardwise.install() was called too late: {PACKAGE} is already loaded.\n"
            f"  why: {first_import(PACKAGE)}\n"
            "  fix: Move these lines to the top of the program, before the imports of other libraries:\n"
            "           import shardwise\n"
            "           shardwise.install()\n"
            "       or run the program, as it is, with: python -m shardwise run train.py ..."
        )
    occupy_dtensor_class()
    sys.meta_path[:0] = [AliasFinder(), client_fixer()]
