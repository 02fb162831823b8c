"""Whole-step capture: a training step as one graph of ops on blocks and collectives, to run, compile, print and measure."""

from shardwise.compile.analysis import Collective, Memory
from shardwise.compile.capture import capture
from shardwise.compile.driver import WholeStep, whole_step
from shardwise.compile.errors import CaptureError
from shardwise.compile.fake import fake_mesh
from shardwise.compile.passes import EXACT, FAST, NONE, Passes
from shardwise.compile.program import Program
from shardwise.compile.saved import load, save

__all__ = [
    "EXACT",
    "FAST",
    "NONE",
    "CaptureError",
    "Collective",
    "Memory",
    "Passes",
    "Program",
    "WholeStep",
    "capture",
    "fake_mesh",
    "load",
    "save",
    "whole_step",
]
