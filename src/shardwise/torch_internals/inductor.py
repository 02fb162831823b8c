"""Compiling a function of plain tensors with inductor, without dynamo: nothing is guarded, so that a call checks nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch._inductor  # its compiler is imported by its `compile`, when it is first called
from torch import Tensor
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

__all__ = ["compile_function"]


def compile_function(function: Callable[..., Any], inputs: Sequence[Tensor]) -> Callable[..., Any]:
    """Compile a function of tensors that returns a tuple of tensors, given fake tensors like its arguments.

    What the function writes to its arguments, the compiled one writes there as well.

    >>> from shardwise.torch_internals.recording import empty_fake, new_fake_mode
    >>> x = empty_fake(new_fake_mode(), (2,), (1,), torch.empty(0))
    >>> compiled = compile_function(lambda x: (x,), [x])
    >>> compiled(torch.ones(2))[0]
    tensor([1., 1.])
    """
    # a mode with an environment of shapes, without which inductor does not look into its cache on disk; all shapes are fixed
    mode = FakeTensorMode(shape_env=ShapeEnv(), static_shapes=True)
    with mode:
        fakes: list[Any] = [
            torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device) for x in inputs
        ]
    with torch.no_grad(), tracing(TracingContext(mode)):
        module = make_fx(function, tracing_mode="real")(*fakes)
        # plain random ops draw from torch's generators, as in eager mode, instead of inductor's own
        with torch._inductor.config.patch(fallback_random=True):
            return torch._inductor.compile(module, fakes)  # type: ignore[no-any-return]
