"""The ops that collectives are counted under are those that torch's own CommDebugMode counts."""

import subprocess
import sys

import pytest
import torch
from torch.distributed.tensor.debug import CommDebugMode, _comm_mode

from shardwise.torch_internals.collective_ops import collective_ops


@pytest.mark.parametrize("name", collective_ops())
def test_ops_are_those_that_torch_counts(name):
    op = collective_ops()[name]
    assert isinstance(op, torch._ops.OpOverloadPacket)
    assert op in {*CommDebugMode().comm_registry, *_comm_mode.c10d_collective_ops}


def test_importing_shardwise_registers_the_ops_without_torchs_dtensor():
    code = (
        "import sys, torch, shardwise.debug\n"
        "print(torch.ops.c10d_functional.all_reduce, 'torch.distributed.tensor' in sys.modules)"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.split() == ["c10d_functional.all_reduce", "False"]
