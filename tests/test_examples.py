"""The examples run and show what they say."""

import pytest
import torch
from examples.train import Run, report, train
from examples.training_report import plot, size


@pytest.mark.processes
def test_training_on_four_processes_equals_training_on_one(workers, capsys):
    torch.set_num_threads(1)
    ranks, one = workers.run(train, 3, (2, 2), "", 5), train(3, (), "", 5)
    torch.testing.assert_close(torch.tensor(ranks[0].losses), torch.tensor(one.losses), rtol=0, atol=2e-6)
    assert one.losses[-1] < one.losses[0]
    assert all(run.losses == ranks[0].losses and run.sample == ranks[0].sample for run in ranks)
    assert ranks[0].sample == one.sample
    assert all(run.memory < 0.6 * one.memory for run in ranks)
    capsys.readouterr()
    report(ranks, one)
    printed = capsys.readouterr().out
    assert "all-reduce" in printed
    assert "reduce-scatter" in printed
    assert max(map(len, printed.splitlines())) <= 80


def test_a_report_of_runs_that_differ_fails():
    with pytest.raises(SystemExit, match="differ"):
        report([Run([5.0, 4.0])], Run([5.0, 4.5]))


def test_a_plot_shows_both_curves():
    text = plot({"a": [2.0, 1.0], "b": [2.0, 0.0]}, width=10, height=5)
    assert text.splitlines()[0].endswith("|=")
    assert "*" in text
    assert "o" in text


def test_sizes_have_a_unit():
    assert [size(n) for n in (12, 12_300, 4_560_000, 7.8e9)] == ["12 B", "12.3 kB", "4.6 MB", "7.80 GB"]
