"""Conjugate bits are resolved for kernels that do not handle them, also beneath a DTensor."""

import pytest
import torch

import shardwise as sw


@pytest.mark.parametrize("placement", [sw.Replicate(), sw.Shard(0), sw.Shard(1), sw.Partial()])
def test_a_complex_pseudo_inverse_is_that_of_the_dense_matrix(placement):
    torch.manual_seed(0)
    a = torch.randn(5, 4, dtype=torch.complex64)
    with sw.simulate(3):
        x = sw.distribute_tensor(a, sw.init_device_mesh("cpu", (3,)), [placement])
        torch.testing.assert_close(torch.linalg.pinv(x).full_tensor().ranks[0], torch.linalg.pinv(a))


def test_the_residuals_of_complex_least_squares_are_those_of_the_dense_ones():
    torch.manual_seed(0)
    a, b = torch.randn(5, 3, dtype=torch.complex64), torch.randn(5, 2, dtype=torch.complex64)
    want = torch.linalg.lstsq(a, b, driver="gelss")
    with sw.simulate(2):
        mesh = sw.init_device_mesh("cpu", (2,))
        x, y = (sw.distribute_tensor(t, mesh, [sw.Shard(0)]) for t in (a, b))
        got = torch.linalg.lstsq(x, y, driver="gelss")
        for mine, dense in zip(got[:2], want[:2], strict=True):
            torch.testing.assert_close(mine.full_tensor().ranks[0], dense)
