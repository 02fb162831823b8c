"""The examples run and show what they say."""

import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from examples import anywhere, convnet, hsdp, muon, resume
from examples.train import Run, report, train
from examples.training_report import plot, size

import shardwise as sw


@pytest.mark.processes
def test_training_on_four_processes_equals_training_on_one(workers, capsys):
    torch.set_num_threads(1)
    ranks, one = workers.run(train, 3, (2, 2), "", 5), train(3, (), "", 5)
    torch.testing.assert_close(torch.tensor(ranks[0].losses), torch.tensor(one.losses), rtol=0, atol=2e-6)
    assert one.losses[-1] < one.losses[0]
    assert all(run.losses == ranks[0].losses and run.sample == ranks[0].sample for run in ranks)
    assert ranks[0].sample == one.sample
    assert all(run.memory < 0.3 * one.memory for run in ranks)
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


def _printed(capsys: Any) -> str:
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 80
    return text


@pytest.mark.processes
def test_one_script_trains_on_one_device_on_processes_and_in_a_simulation(workers, capsys):
    one = anywhere.main([])
    assert one == pytest.approx(anywhere.main(["--simulate", "6"]), abs=1e-6)
    assert all(one == pytest.approx(losses, abs=1e-6) for losses in workers.run(anywhere.train))
    lines = _printed(capsys).splitlines()
    if os.environ.get("SHARDWISE_DEEP") == "1":  # torchrun takes its time to start
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m"]
        command = [*torchrun, "examples.anywhere"]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
        assert done.stdout.split()[2:] == lines[0].split()[2:]


class Simulated:
    """`launch` on simulated ranks, which share one result; new processes would import torch and transformers for seconds."""

    def __call__(self, fn: Any, ranks: int, *args: Any) -> list[Any]:
        with sw.simulate(ranks):
            return [fn(*args)] * ranks


def test_a_convnet_with_split_images_equals_one_device(capsys, monkeypatch):
    monkeypatch.setattr(sw, "launch", Simulated())
    convnet.main(steps=1, size=24)
    assert "exchange" in _printed(capsys)


@pytest.mark.filterwarnings("ignore")  # transformers warns of its own code and of tiny sizes
def test_a_tensor_parallel_model_generates_and_adapts(capsys, monkeypatch):
    from examples import generate, lora

    monkeypatch.setattr(sw, "launch", Simulated())
    generate.main(["--tokens", "2"])
    assert "The same tokens on every rank" in _printed(capsys)
    lora.main(steps=2)
    assert "[64:tp, 64]" in _printed(capsys)


@pytest.mark.filterwarnings("ignore")  # transformers warns of its own code
def test_a_model_of_transformers_under_fsdp_and_tensor_parallelism(capsys, monkeypatch):
    from examples import fsdp_transformers

    monkeypatch.setattr(sw, "launch", Simulated())
    fsdp_transformers.main(steps=2)
    assert "[64:tp,dp, 64]" in _printed(capsys)


def test_muon_and_hybrid_sharding_equal_one_device(capsys, monkeypatch):
    monkeypatch.setattr(sw, "launch", Simulated())
    muon.main(steps=2)
    assert "2/4 of what gathering them everywhere would send" in _printed(capsys)
    hsdp.main(steps=2)
    assert "gradient [32, 32] P(pod,avg) P(dp,avg) -> [32:dp, 32]" in _printed(capsys)


class Forked:
    """A function of shardwise that starts processes, as forks: new interpreters would import torch for seconds."""

    def __init__(self, start: Any) -> None:
        self.start = start

    def __call__(self, fn: Any, ranks: int, *args: Any) -> list[Any]:
        return self.start(lambda *given: fn(*given), ranks, *args)


@pytest.mark.processes
def test_training_that_is_killed_goes_on(capsys, monkeypatch):
    monkeypatch.setattr(sw, "launch", Forked(sw.launch))
    monkeypatch.setattr(sw, "elastic", Forked(sw.elastic), raising=False)
    resume.main(steps=5, killed_at=3)
    text = _printed(capsys)
    assert "was killed by SIGKILL" in text
    assert "checkpoint, 3 ranks     from step 2" in text
    assert "memory, 3 ranks left    from step 3" in text
