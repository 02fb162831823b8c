"""`shardwise.install()`: every name that clients import is ours, and what can go wrong is said."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.drop_in.client import ROOT, Run, prepared

HERE = "tests.drop_in.names"


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    with prepared("tests.drop_in.only_shardwise") as run:
        yield run


def test_every_name_that_clients_import_is_ours(run: Run):
    assert run(f"{HERE}:missing_names", package="torch.distributed.tensor", install=True) == [[]]


def test_the_names_exist_without_install(run: Run):
    assert run(f"{HERE}:missing_names", package="shardwise", install=False) == [[]]


def test_torch_package_is_never_loaded(run: Run):
    clients = [
        "torch.distributed.fsdp",
        "torch.distributed.checkpoint",
        "torch.distributed.checkpoint.state_dict",
        "torch.distributed.pipelining",
        "torch.distributed._composable.replicate",
        "torch.distributed._tensor",
        "torch._inductor.inductor_prims",
        "accelerate",
    ]
    assert run(f"{HERE}:files_of_torch_after", modules=clients) == [[]]


@pytest.mark.parametrize(
    ("first", "told"),
    [
        ("from torch.distributed.fsdp import fully_shard", "torch.distributed.fsdp"),
        ("import torch.distributed.tensor as dt", "import torch.distributed.tensor as dt"),
        (
            "import torch\nwith shardwise.simulate(1):\n    shardwise.ones(2, device_mesh="
            "shardwise.init_device_mesh('cpu', (1,))) + 1",
            "first op",
        ),
    ],
)
def test_too_late_names_the_import_that_was_first(run: Run, tmp_path: Path, first: str, told: str):
    program = tmp_path / "train.py"
    program.write_text(f"import shardwise\n{first}\nshardwise.install()\n")
    (error,) = run(f"{HERE}:error_of", path=str(program))
    assert error.startswith("InstallError")
    assert "too late" in error
    assert told in error
    assert "to the top of the program" in error
    if "first op" not in told:
        assert "train.py:2" in error


def test_untested_releases_are_refused(run: Run):
    (error,) = run(f"{HERE}:error_on", release="2.99.0")
    assert "2.99" in error
    assert "2.13" in error


def test_modules_that_do_not_exist_are_named(run: Run):
    (error,) = run(f"{HERE}:error_of_unknown_module")
    assert "torch.distributed.tensor._nothing" in error


def test_a_client_without_what_is_put_right_is_left_alone(run: Run, tmp_path: Path):
    assert run(f"{HERE}:fixed_client", folder=str(tmp_path)) == [["fixed", "as it was"]]


PROGRAM = """
import sys
import torch, torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard, distribute_tensor, init_device_mesh
import helper

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
x = distribute_tensor(torch.arange(5.0), mesh, [Shard(0)])
if dist.get_rank() == 0:
    print(DTensor.__module__, sys.argv[1:], __name__)
total = (x * 2).sum().full_tensor().item()
if dist.get_rank() == 0:
    print(total)
dist.destroy_process_group()
"""


def test_run_under_torchrun(tmp_path: Path):
    (tmp_path / "train.py").write_text(PROGRAM)
    (tmp_path / "helper.py").write_text("")
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=1", "--standalone"]
    command = [*torchrun, "-m", "shardwise", "run", str(tmp_path / "train.py"), "--lr", "1"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert re.search(r"shardwise\S* \['--lr', '1'\] __main__\n20.0", done.stdout)


@pytest.mark.parametrize("arguments", [["run"], ["go"], ["run", "-x", "a.py"]])
def test_wrong_command_lines_show_the_usage(arguments: list[str], capsys: pytest.CaptureFixture[str]):
    from shardwise.drop_in.run import main

    assert main(arguments) == 2
    assert "usage: python -m shardwise run" in capsys.readouterr().err


def test_help(capsys: pytest.CaptureFixture[str]):
    from shardwise.drop_in.run import main

    assert main(["--help"]) == 0
    assert "torchrun" in capsys.readouterr().out
