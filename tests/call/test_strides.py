"""Results have the strides that they have on one device, whatever runs the op."""

import pytest
import torch
from tests.dense import parse_placements, randn
from torch.nn import functional as F  # noqa: N812 (the usual name)

import shardwise as sw
from shardwise.call.meta import infer_outputs

aten = torch.ops.aten
CALLS = {
    "softmax along the split dim": lambda x: x.softmax(0),
    "layer norm along the split dim": lambda x: F.layer_norm(x.mT, x.mT.shape[-1:]),
    "renorm, on gathered tensors": lambda x: x.renorm(2, 0, 1.0),
    "xlogy": lambda x: torch.special.xlogy(x.mT, x.mT.contiguous() + 3),
    "a number to a power": lambda x: 2**x,
    "log sigmoid": F.logsigmoid,
    "batch norm": lambda x: F.batch_norm(x, None, None, training=True),
    "rfft": lambda x: torch.fft.rfft(x, dim=0),
    "rfft2": torch.fft.rfft2,
    "angle": lambda x: torch.complex(x, x).angle(),
    "floor division": lambda x: torch.floor_divide(x.mT.contiguous(), x.mT),
}


@pytest.mark.parametrize("placement", ["0", "1", "R", "P"])
@pytest.mark.parametrize("name", CALLS)
def test_strides_of_results_equal_those_of_one_device(name, placement):
    dense = randn(8, 5).mT
    want = CALLS[name](dense)
    with sw.simulate(3):
        mesh = sw.init_device_mesh("cpu", (3,), mesh_dim_names=("tp",))
        x = sw.distribute_tensor(randn(8, 5), mesh, parse_placements(placement)).mT
        got = CALLS[name](x)
        assert got.stride() == want.stride()
        assert got.is_contiguous() == want.is_contiguous()
        torch.testing.assert_close(got.full_tensor().ranks[1], want)
        assert got.contiguous().view(-1).full_tensor().ranks[0].shape == (want.numel(),)


STRIDED = [randn(4, 3, 5), randn(5, 3, 4).transpose(0, 2), randn(4, 5, 3).mT, randn(1, 3, 5).expand(4, 3, 5)]
TWO = [
    aten.copysign.Tensor,
    aten.floor_divide.default,
    aten.logaddexp.default,
    aten.logical_xor.default,
    aten.xlogy.Tensor,
]


@pytest.mark.parametrize("func", TWO, ids=str)
def test_inferred_strides_of_ops_of_two_tensors_equal_those_of_the_kernel(func):
    for a in STRIDED:
        for b in STRIDED:
            (inferred,) = infer_outputs(func, (a, b), {})
            assert inferred.stride() == func(a, b).stride(), (a.stride(), b.stride())
            if func is not aten.logaddexp.default:  # it takes no integers
                _compare_integers(func, a, b)


def _compare_integers(func, a, b):
    """The same for integers, one of them expanded: the kernel converts them first."""
    a, b = (torch.ones_like(t, dtype=torch.int64) for t in (a[:1], b))
    a = a.expand(4, 3, 5)
    (inferred,) = infer_outputs(func, (a, b), {})
    assert inferred.stride() == func(a, b).stride(), (a.stride(), b.stride())
