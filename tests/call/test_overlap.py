"""Out variants that read memory which they write: refused where one device refuses them, alike on all ranks."""

from __future__ import annotations

import pytest
import torch
from tests.dense import parse_placements

import shardwise as sw

REFUSED = (
    "torch.add(x[:3], 1, out=x[1:])",
    "torch.mul(x[:3], x[1:], out=x[1:])",
    "torch.where(x[:3] > 0, x[:3], x[:3], out=x[1:])",
    "torch.cumsum(x[:3], 0, out=x[1:])",
    "torch.cat([x[:2], x[:1]], out=x[1:])",
    "torch.stack([x[0], x[1]], out=x[1:3])",
    "torch.index_select(x, 0, i, out=x[:2])",
    "torch.addmm(x[:3], x[:3].clone(), x.clone(), out=x[1:])",
    "torch.neg(x.detach()[:3], out=x[1:])",
    "torch.exp(x.view(-1)[:8], out=x.view(-1)[2:10])",
)
ALLOWED = (
    "torch.add(x[:2], 1, out=x[2:])",
    "torch.add(x, 1, out=x)",
    "torch.exp(x[1:], out=x[1:])",
    "torch.cat([x[:1], x[1:2]], out=x[2:])",
    "torch.mvlgamma(x[:3] + 3, 2, out=x[1:])",
)


def _run(source: str, x: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
    exec(source, {"torch": torch, "x": x, "i": i})
    return x


@pytest.mark.parametrize("size", [2, 5])
@pytest.mark.parametrize("placements", ["0", "1", "R", "P"])
@pytest.mark.parametrize("source", REFUSED + ALLOWED)
def test_out_variants(source: str, placements: str, size: int) -> None:
    x, i = torch.arange(1.0, 17.0, dtype=torch.float64).view(4, 4), torch.tensor([1, 0])
    with sw.simulate(size):
        mesh = sw.init_device_mesh("cpu", (size,))
        ours = sw.distribute_tensor(x.clone(), mesh, parse_placements(placements))
        index = sw.distribute_tensor(i, mesh, [sw.Replicate()])
        if source in REFUSED:
            for a, b in ((x, i), (ours, index)):
                with pytest.raises(RuntimeError, match="refer to a single memory location"):
                    _run(source, a, b)
        else:
            torch.testing.assert_close(
                _run(source, ours, index).full_tensor().ranks[0], _run(source, x.clone(), i)
            )
