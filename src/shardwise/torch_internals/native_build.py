"""Building a C++ extension against torch's headers."""

from __future__ import annotations

import os
import re
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.utils import cpp_extension

__all__ = ["NativeBuildError", "build_extension"]

_RELEASE = re.sub(r"\W", "_", torch.__version__)  # the cache is not divided by releases of torch


class NativeBuildError(RuntimeError):
    """The extension could not be built."""


def build_extension(name: str, source: Path) -> Any:
    """The module of a C++ source, from the cache of extensions (`TORCH_EXTENSIONS_DIR`) or built, in half a minute.

    Raises:
        NativeBuildError: the compiler or ninja is missing, or the source does not fit this torch.
    """
    try:
        with _scripts_on_path():
            return cpp_extension.load(f"{name}_{_RELEASE}", [str(source)], extra_cflags=["-O2"])
    except (RuntimeError, OSError) as error:
        raise NativeBuildError(
            f"The extension {name} could not be built: {error}\n"
            "  why: It is compiled for the installed torch when it is first used; that needs a C++ compiler and ninja.\n"
            "  fix: pip install shardwise[native] and install g++, or work without it: everything runs in Python as well."
        ) from error


@contextmanager
def _scripts_on_path() -> Iterator[None]:
    """Let torch find the ninja of this environment, also where the environment is not activated."""
    before = os.environ.get("PATH", "")
    os.environ["PATH"] = os.pathsep.join([sysconfig.get_path("scripts"), before])
    try:
        yield
    finally:
        os.environ["PATH"] = before
