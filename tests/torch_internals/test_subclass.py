"""Wrapper tensors have the metadata given, no storage, and send ops to their class."""

from typing import ClassVar

import pytest
import torch

from shardwise.torch_internals.subclass import make_wrapper


class Wrapper(torch.Tensor):
    """Records its ops, and returns zeros for each."""

    ops: ClassVar[list] = []

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.prim.layout.default:
            return torch.sparse_csr
        cls.ops.append(func)
        return torch.zeros(2)


@pytest.mark.parametrize("requires_grad", [False, True])
def test_metadata(requires_grad):
    x = make_wrapper(Wrapper, (2, 3), (1, 2), torch.float64, torch.device("cpu"), requires_grad=requires_grad)
    assert type(x) is Wrapper
    assert (x.shape, x.stride(), x.dtype, x.device.type) == ((2, 3), (1, 2), torch.float64, "cpu")
    assert (x.layout, x.requires_grad) == (torch.strided, requires_grad)
    Wrapper.ops.clear()
    assert torch.equal(-x, torch.zeros(2))
    assert Wrapper.ops == [torch.ops.aten.neg.default]


def test_sparse_layouts():
    x = make_wrapper(
        Wrapper, (2, 3), None, torch.float32, torch.device("cpu"), torch.sparse_csr, dispatch_layout=True
    )
    assert x.layout is torch.sparse_csr
    assert x.shape == (2, 3)


def test_a_wrapper_has_no_storage():
    x = make_wrapper(Wrapper, (2**50,), (1,), torch.float32, torch.device("cpu"))
    assert x.numel() == 2**50
    with pytest.raises(RuntimeError, match="data pointer"):
        x.untyped_storage().data_ptr()
