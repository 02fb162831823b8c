"""The facts about releases of torch hold for the installed one."""

import pytest
import torch

from shardwise.torch_internals.releases import linspace_arithmetic, torch_release


def test_the_release_is_a_supported_one():
    assert (2, 13) <= torch_release() < (2, 16)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int16])
def test_linspace_computes_as_stated(dtype):
    kind, fused = linspace_arithmetic(dtype)
    for steps in range(2, 60):
        index = torch.arange(steps)
        first, last = torch.tensor(-7, dtype=kind), torch.tensor(11, dtype=kind)
        step = (last - first) / (steps - 1)
        up, down = index.to(kind), (steps - 1 - index).to(kind)
        low = torch.add(first, up, alpha=step.item()) if fused else first + up * step
        high = torch.add(last, down, alpha=-step.item()) if fused else last - down * step
        want = torch.where(index < steps // 2, low, high).to(dtype)
        assert torch.equal(torch.linspace(-7, 11, steps, dtype=dtype), want)
