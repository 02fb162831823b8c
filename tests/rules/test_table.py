from pathlib import Path

import pytest
import torch
from tests.rules.absent import ABSENT, REMOVED
from tests.rules.samples import calls_of

import shardwise as sw
from shardwise.call.resolve import match_rule
from shardwise.rules.table import TABLE, printed
from shardwise.rules.tables.view_and_cat import REGROUPED
from shardwise.verify.cases import PlainCall
from shardwise.verify.sampling import draw

GOLDEN = Path(__file__).parents[2] / "docs" / "rules.txt"
NAMES = sorted({*TABLE, *REGROUPED} - REMOVED)


def op_of(name):
    namespace, packet, overload = name.split(".")
    return getattr(getattr(getattr(torch.ops, namespace), packet), overload)


def test_the_printed_table_is_the_one_in_the_repository():
    assert printed() == GOLDEN.read_text(), "run `make rules` and review the diff"


def test_the_printed_table_has_a_header_and_one_line_per_op():
    header, _, rows = printed().partition("\n\n")
    assert all(line.startswith("#") for line in header.splitlines())
    assert [line.split()[0] for line in rows.splitlines()] == sorted({*TABLE, *REGROUPED})


@pytest.mark.parametrize("name", NAMES)
def test_a_row_names_an_op_of_torch_that_returns_its_result(name):
    assert not any(a.alias_info is not None and a.alias_info.is_write for a in op_of(name)._schema.arguments)


def some_calls(name):
    """Calls of a row, written or generated."""
    if name in ABSENT:
        return ABSENT[name][2]()
    return calls_of(name) or draw(op_of(name), TABLE[name].text, 7, 0)


@pytest.mark.filterwarnings("ignore")
def test_the_text_of_a_row_states_which_reductions_pass_and_which_it_leaves():
    wrong = {}
    with sw.simulate(2):
        mesh = sw.init_device_mesh("cpu", (2,))
        for name in (n for n in NAMES if n in TABLE):
            met = [
                match_rule(PlainCall(op_of(name), tuple(args), dict(kwargs), mesh))
                for args, kwargs in some_calls(name)
            ]
            rules = [m.rule for m in met if m is not None]
            text, passes = TABLE[name].text, "passes any reduction" in TABLE[name].text
            found = {
                "no rule": not rules,
                "linear": any(r.linear for r in rules) != ("linear in" in text or passes),
                "monotone": any(r.monotone for r in rules)
                != any(word in text for word in ("increasing", "decreasing", "passes")),
                "reduction": {op for r in rules for op in r.reduced.values()} - {"sum"}
                != {op for op in ("max", "min", "product") if f"by {op}" in text},
            }
            if any(found.values()):
                wrong[name] = text, [what for what, is_wrong in found.items() if is_wrong]
    assert wrong == {}
