"""local_map: functions of blocks as functions of DTensors, their placements, and errors."""

import pytest
import torch

import shardwise as sw
from shardwise import DTensor, LayoutError, Partial, Replicate, Shard
from shardwise.api.local_map import MapError
from shardwise.experimental import local_map


@pytest.fixture
def line():
    with sw.simulate(3):
        yield sw.init_device_mesh("cpu", (3,), mesh_dim_names=("tp",))


def test_a_matrix_product_of_blocks(line):
    a, b = torch.randn(4, 5), torch.randn(5, 2)
    x, y = sw.distribute_tensor(a, line, [Shard(1)]), sw.distribute_tensor(b, line, [Shard(0)])
    got = local_map(torch.mm, [Partial()], ([Shard(1)], [Shard(0)]))(x, y)
    assert got.placements == (Partial(),)
    torch.testing.assert_close(got.full_tensor().ranks[1], a @ b)


def test_inputs_are_redistributed_only_on_request(line):
    x = sw.distribute_tensor(torch.arange(6.0), line, [Shard(0)])
    with pytest.raises(ValueError, match="mismatched placements"):
        local_map(torch.neg, [Replicate()], ([Replicate()],))(x)
    got = local_map(torch.neg, [Replicate()], ([Replicate()],), redistribute_inputs=True)(x)
    assert torch.equal(got.to_local().ranks[2], -torch.arange(6.0))


def test_a_decorator_with_other_arguments_and_several_results(line):
    @local_map(out_placements=([Shard(0)], None, [Replicate()]), in_placements=([Shard(0)], None))
    def halves(block, number):
        """Halve a block."""
        return block / number, number + 1, torch.ones(2)

    assert halves.__doc__ == "Halve a block."
    first, number, last = halves(sw.distribute_tensor(torch.arange(6.0), line, [Shard(0)]), 2)
    assert isinstance(first, DTensor)
    assert first.full_tensor().ranks[0].tolist() == [0, 0.5, 1, 1.5, 2, 2.5]
    assert number == 3
    assert last.placements == (Replicate(),)
    plain = halves(torch.ones(3), 2)  # without a DTensor it is the function itself
    assert type(plain[0]) is torch.Tensor
    assert plain[0].tolist() == [0.5] * 3


@pytest.mark.parametrize(
    ("call", "what"),
    [
        (
            lambda x: local_map(torch.neg, [Shard(0)], ([Shard(0)], None))(x),
            "in_placements length 2 does not match the number of input args 1",
        ),
        (
            lambda x: local_map(torch.neg, ([Shard(0)], None))(x),
            "out_placements length 2 does not match the number of output values 1",
        ),
        (lambda x: local_map(torch.neg, [Shard(0)], (None,))(x), "in_placements of argument 0 is None"),
        (
            lambda x: local_map(torch.mul, [Shard(0)], ([Shard(0)], [Shard(0)]))(x, 2),
            "expects None placements for argument 1, which is 2",
        ),
        (lambda x: local_map(lambda b: 3, [Shard(0)])(x), "expects None placements for the result 3"),
        (lambda x: local_map(lambda b: x, [Shard(0)])(x), "returned a DTensor"),
        (lambda x: local_map(out_placements=[Shard(0)], spmd_types=True)(torch.neg)(x), "spmd_types=True"),
        (
            lambda x: local_map(torch.neg, [Shard(0)], None, (None,))(x),
            "expects in grad placements .* argument 0 are None",
        ),
    ],
)
def test_errors_name_the_argument_or_result(line, call, what):
    x = sw.distribute_tensor(torch.arange(6.0), line, [Shard(0)])
    with pytest.raises(MapError, match=what) as caught:
        call(x)
    assert isinstance(caught.value, AssertionError)  # torch's type
    assert isinstance(caught.value, LayoutError)
    assert "fix:" in str(caught.value)
