from pathlib import Path

import pytest
import torch

from shardwise.rules.table import TABLE, printed
from shardwise.rules.tables.view_and_cat import REGROUPED

GOLDEN = Path(__file__).parents[2] / "docs" / "rules.txt"


def test_the_printed_table_is_the_one_in_the_repo():
    assert printed() == GOLDEN.read_text(), "run `make rules` and look at the diff"


@pytest.mark.parametrize("name", sorted([*TABLE, *REGROUPED]))
def test_a_row_names_an_op_of_torch_that_returns_its_result(name):
    _, packet, overload = name.split(".")
    op = getattr(getattr(torch.ops.aten, packet), overload)
    assert not any(a.alias_info is not None and a.alias_info.is_write for a in op._schema.arguments)
