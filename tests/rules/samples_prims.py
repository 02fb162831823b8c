"""Calls of torch's `prims`: tensors of one shape and of a dtype that the op takes, since nothing is promoted on the way to them."""

import torch
from tests.rules.calls import Call

from shardwise.rules.tables.prims import ROWS

_SHAPES = ((3, 4), (5, 1, 2), (6,))
_DTYPES = {
    **dict.fromkeys(
        "bitwise_not bitwise_and bitwise_or bitwise_xor gcd shift_left shift_right_arithmetic".split(),
        torch.int64,
    ),
    **dict.fromkeys("conj_physical imag real".split(), torch.complex128),
}


def _calls(name: str) -> list[Call]:
    _, packet, overload = name.split(".")
    op = getattr(getattr(torch.ops.prims, packet), overload)
    dtype = _DTYPES.get(packet, torch.float64)
    generator = torch.Generator().manual_seed(0)

    def drawn(shape: tuple[int, ...]) -> torch.Tensor:
        if dtype is torch.int64:
            return torch.randint(0, 9, shape, generator=generator)
        return torch.randn(shape, dtype=dtype, generator=generator)

    return [(tuple(drawn(shape) for _ in op._schema.arguments), {}) for shape in _SHAPES]


WRITTEN = {name: lambda name=name: _calls(name) for name in ROWS}
