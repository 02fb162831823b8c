"""The line of the user's program that is being run, for error messages."""

from __future__ import annotations

import os
import traceback
from types import CodeType, FrameType, TracebackType

import torch
import typing_extensions

from shardwise.torch_internals.frames import calling_frame

__all__ = ["Place", "line_of_error", "line_of_place", "line_of_stack", "place_of_stack"]

Place = tuple[CodeType | None, int]
"""An instruction of the program, which `line_of_place` turns into a line."""

_OURS = (
    os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep,
    os.path.dirname(os.path.abspath(torch.__file__)) + os.sep,
    os.path.abspath(typing_extensions.__file__),  # functions of torch that are deprecated are called there
    "<frozen ",
    "<shardwise ",
)
_STANDARD = os.path.dirname(os.path.abspath(traceback.__file__)) + os.sep
_INSTALLED = (os.sep + "site-packages" + os.sep, os.sep + "dist-packages" + os.sep)
_is_ours: dict[str, bool] = {}


def _belongs_to_library(file: str) -> bool:
    known = _is_ours.get(file)
    if known is None:
        standard = file.startswith(_STANDARD) and not any(part in file for part in _INSTALLED)
        known = _is_ours[file] = standard or file.startswith(_OURS)
    return known


def line_of_stack(thread: int | None = None) -> tuple[str, int, str]:
    """File, line and function of the innermost frame of a thread that belongs to the user's program; of this one by default.

    >>> line_of_stack()[2]
    '<module>'
    """
    frame: FrameType | None = calling_frame(thread)
    known = _is_ours.get
    while frame is not None:
        code = frame.f_code
        file = code.co_filename
        ours = known(file)
        if not (_belongs_to_library(file) if ours is None else ours):
            return file, frame.f_lineno, code.co_name
        frame = frame.f_back
    return "", 0, ""


def place_of_stack(depth: int) -> Place:
    """The place that the line of `line_of_stack` is of, in less time.

    Args:
        depth: how many callers of the caller are known to belong to this library.

    >>> line_of_place(place_of_stack(0))[2]
    '<module>'
    """
    frame: FrameType | None = calling_frame(None, depth + 1)
    known = _is_ours.get
    while frame is not None:
        code = frame.f_code
        ours = known(code.co_filename)
        if not (_belongs_to_library(code.co_filename) if ours is None else ours):
            return code, frame.f_lasti
        frame = frame.f_back
    return None, 0


def line_of_place(place: Place) -> tuple[str, int, str]:
    """File, line and function of a place."""
    code, at = place
    if code is None:
        return "", 0, ""
    lines = (line for begin, end, line in code.co_lines() if begin <= at < end and line is not None)
    return code.co_filename, next(lines, code.co_firstlineno), code.co_name


def line_of_error(trace: TracebackType | None) -> tuple[str, int, str]:
    """File, line and function of the innermost frame of a traceback that belongs to the user's program."""
    last = ("", 0, "")
    for frame, line in traceback.walk_tb(trace):
        code = frame.f_code
        if not _belongs_to_library(code.co_filename):
            last = (code.co_filename, line, code.co_name)
    return last
