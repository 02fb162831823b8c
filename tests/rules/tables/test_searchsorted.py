"""Searches and histograms."""

import pytest
import torch
from tests.rules.against_dense import check, numbers

BOUNDS = torch.tensor([-1.0, 0.0, 0.5, 2.0], dtype=torch.float64)
X = numbers(5, 7)
CASES = {
    "bucketize": (torch.bucketize, [X, BOUNDS], ["[5:tp, 7]", "[4]"], "[5:tp, 7]"),
    "searchsorted": (
        lambda s, x: torch.searchsorted(s, x, right=True),
        [BOUNDS, X],
        ["[4]", "[5, 7:tp]"],
        "[5, 7:tp]",
    ),
    "row by row": (torch.searchsorted, [X.sort(1)[0], X], ["[5:tp, 7]", "[5:tp, 7]"], "[5:tp, 7]"),
    "columns of rows": (torch.searchsorted, [X.sort(1)[0], X], ["[5, 7]", "[5, 7:tp]"], "[5, 7:tp]"),
    "isin": (torch.isin, [X, X[0]], ["[5:tp, 7]", "[7]"], "[5:tp, 7]"),
    "isin a number": (lambda x: torch.isin(x, 0.0), [X], ["[5:tp, 7]"], "[5:tp, 7]"),
    "histc": (lambda x: x.histc(4, -1, 1), [X], ["[5:tp, 7]"], "[4] P(tp,sum)"),
}


@pytest.mark.parametrize("name", CASES)
def test_nothing_is_communicated(name):
    fn, values, layouts, expect = CASES[name]
    check(fn, values, layouts, expect=expect, grad=False)


@pytest.mark.parametrize(
    ("fn", "values", "layouts"),
    [
        (torch.searchsorted, [X.sort(1)[0], X], ["[5, 7:tp]", "[5, 7:tp]"]),
        (torch.bucketize, [X, BOUNDS], ["[5:tp, 7]", "[4:tp]"]),
        (lambda x: x.histc(4), [X], ["[5:tp, 7]"]),
        (lambda x: x.histc(4, -1, 1), [X], ["[5, 7] P(tp,sum)"]),
    ],
)
def test_split_sequences_and_pending_values_are_gathered_first(fn, values, layouts):
    check(fn, values, layouts, free=False, grad=False)
