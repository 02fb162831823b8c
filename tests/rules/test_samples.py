import pytest
import torch
from tests.rules.samples import calls_of


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("aten.avg_pool2d.default", torch.int64),
        ("aten.avg_pool3d_backward.default", torch.int64),
        ("aten.upsample_bilinear2d.default", torch.uint8),
        ("aten._upsample_bicubic2d_aa.default", torch.uint8),
        ("aten.max_pool2d_with_indices.default", torch.uint8),
        ("aten.reflection_pad3d.default", torch.int64),
    ],
)
def test_kernels_that_may_round_are_called_with_integers(name, dtype):
    assert dtype in {args[0].dtype for args, _ in calls_of(name)}


def test_copying_variants_have_the_calls_of_their_views():
    assert len(calls_of("aten.transpose_copy.int")) == len(calls_of("aten.transpose.int"))
