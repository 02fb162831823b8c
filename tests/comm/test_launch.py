"""Launching functions on local processes: results, failures, persistent workers, scripts."""

import _thread
import contextlib
import functools
import gc
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import shardwise as sw
from shardwise.comm.launch import LaunchError, Workers, launch

# Tests of failures mostly launch a lambda or closure: those fork, which takes a tenth of a second instead of two.
# After the start, forks and new interpreters run the same code.


def total(x: torch.Tensor, scale: int = 1) -> tuple[int, torch.Tensor]:
    y = x * scale * (dist.get_rank() + 1)
    dist.all_reduce(y)
    return dist.get_rank(), y


def total_and_path(x: torch.Tensor, scale: int) -> tuple[int, torch.Tensor, list[str]]:
    return *total(x, scale), sys.path


def threads() -> tuple[int, int]:
    return os.getpid(), torch.get_num_threads()


def only_on(rank: int, do: Callable[[], object]) -> None:
    if dist.get_rank() == rank:
        do()
    dist.barrier()


def boom() -> None:
    raise ValueError("boom")


def die(code: int = 3) -> None:
    os._exit(code)


def die_on(rank: int) -> None:
    only_on(rank, die)


def boom_on(rank: int) -> None:
    only_on(rank, boom)


def write_and_wait() -> None:
    sys.stdout.write("before the wait\n")
    dist.barrier()
    if dist.get_rank() == 1:
        die()
    sleep()


def rank_in_message() -> None:
    raise ValueError(f"boom on {dist.get_rank()}")


def ignore_a_fault() -> int:
    """Call different collectives on the ranks, and catch the error."""
    mesh = sw.init_device_mesh("cpu", (2,))
    x = sw.distribute_tensor(torch.ones(4, 2 + dist.get_rank()), mesh, [sw.Shard(0)], src_data_rank=None)
    with contextlib.suppress(sw.PeerError):
        x.full_tensor()
    return os.getpid()


def hash_of_text() -> int:
    return hash("dp")


def leave_group() -> int:
    dist.destroy_process_group()
    return os.getpid()


def sleep() -> None:
    time.sleep(60)


def wait_for(what: Callable[[], bool], seconds: float = 10.0) -> bool:
    deadline = time.monotonic() + seconds
    while not what() and time.monotonic() < deadline:
        time.sleep(0.02)
    return what()


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    # orphans that init does not reap stay as zombies
    stat = Path(f"/proc/{pid}/stat")
    return not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] != "Z"


def note_pid(folder: Path) -> None:
    (folder / str(os.getpid())).touch()


def noted_pids(folder: Path) -> list[int]:
    return [int(path.name) for path in folder.iterdir()]


@pytest.fixture
def pids(tmp_path: Path) -> Path:
    folder = tmp_path / "pids"
    folder.mkdir()
    return folder


@pytest.fixture(autouse=True)
def no_leftovers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    folder = tmp_path / "temp"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    yield
    assert multiprocessing.active_children() == []
    assert list(folder.iterdir()) == []


class Clock:
    def __enter__(self) -> "Clock":
        self.start = time.monotonic()
        return self

    def __exit__(self, *exc: object) -> None:
        self.seconds = time.monotonic() - self.start


# ---- results


def test_results_are_by_rank() -> None:
    results = launch(total_and_path, 2, torch.ones(2, 3), 10)
    assert [rank for rank, _, _ in results] == [0, 1]
    for _, y, path in results:
        assert torch.equal(y, torch.full((2, 3), 30.0))
        assert path == sys.path


def test_a_closure_runs_in_forks() -> None:
    torch.randn(300, 300) @ torch.randn(300, 300)  # OpenMP has threads here now
    seen = []

    def body(a: int) -> tuple[int, float]:
        seen.append(a)
        w = torch.randn(300, 300, requires_grad=True)
        (w @ w).sum().backward()
        y = torch.tensor([float(a)])
        dist.all_reduce(y)
        return torch.get_num_threads(), y.item()

    assert launch(body, 3, 5) == [(1, 15.0)] * 3
    assert seen == []


def test_a_lambda_among_the_arguments_runs_in_forks() -> None:
    assert launch(functools.reduce, 2, lambda a, b: a + b, [1, 2, 3]) == [6, 6]


def test_one_process() -> None:
    assert launch(lambda: dist.get_world_size(), 1) == [1]


def test_tensors_are_returned_by_value() -> None:
    def body() -> dict[str, object]:
        x = torch.arange(6.0, requires_grad=True)
        return {
            "leaf": x,
            "view": x.detach().view(2, 3).t(),
            "int8": torch.tensor([1], dtype=torch.int8),
            "n": 1,
        }

    for result in launch(body, 2):
        assert result["leaf"].requires_grad
        assert result["view"].tolist() == [[0, 3], [1, 4], [2, 5]]
        assert result["int8"].dtype == torch.int8
        assert not result["leaf"].is_shared()


def test_output_is_passed_through(capfd: pytest.CaptureFixture[str]) -> None:
    launch(lambda: sys.stdout.write(f"out {dist.get_rank()}"), 2)
    launch(lambda: sys.stderr.write(f"err {dist.get_rank()}\n"), 2)
    out, err = capfd.readouterr()
    assert "out 0" in out
    assert "out 1" in out
    assert sorted(err.split("\n")) == ["", "err 0", "err 1"]


def test_the_output_of_a_killed_rank_is_not_lost(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONUNBUFFERED", "")
    with pytest.raises(LaunchError, match="rank 1 of 2 ended with exit code 3"):
        launch(write_and_wait, 2)
    assert capfd.readouterr().out == "before the wait\n" * 2


# ---- failures


def test_an_exception_names_its_rank_and_stops_the_rest(pids: Path) -> None:
    def body() -> None:
        note_pid(pids)
        only_on(1, boom)

    with Clock() as clock, pytest.raises(LaunchError, match="rank 1 of 3 raised ValueError: boom") as caught:
        launch(body, 3)
    assert clock.seconds < 6
    assert caught.value.rank == 1
    assert "in boom" in caught.value.traceback
    assert "in boom" in str(caught.value)
    assert "worker_process.py" not in caught.value.traceback
    assert "then failed: ranks 0, 2" in str(caught.value)  # they are told by the guard
    assert len(noted_pids(pids)) == 3
    assert not any(map(alive, noted_pids(pids)))


def test_an_exception_on_all_ranks_is_reported_once() -> None:
    def body() -> None:
        time.sleep(0 if dist.get_rank() else 0.2)
        boom()

    with Clock() as clock, pytest.raises(LaunchError, match="rank 0 of 3 raised ValueError: boom") as caught:
        launch(body, 3)
    assert clock.seconds < 1.5  # all have answered, so there is no wait
    assert "so did every other rank" in str(caught.value)


def test_the_first_of_two_failures_is_named() -> None:
    def body() -> None:
        time.sleep(0.3 * (2 - dist.get_rank()))
        raise ValueError(f"boom on {dist.get_rank()}")

    with pytest.raises(LaunchError, match="rank 2 of 3 raised ValueError: boom on 2") as caught:
        launch(body, 3)
    assert "then failed: ranks 0, 1" in str(caught.value)


@pytest.mark.parametrize("code", [0, 3])
def test_a_rank_that_exits_is_named(pids: Path, code: int) -> None:
    def body() -> None:
        note_pid(pids)
        only_on(1, lambda: die(code))

    with (
        Clock() as clock,
        pytest.raises(LaunchError, match=f"rank 1 of 3 ended with exit code {code}") as caught,
    ):
        launch(body, 3)
    assert clock.seconds < 3
    assert caught.value.rank == 1
    assert not any(map(alive, noted_pids(pids)))


def test_a_rank_that_is_killed_is_named(pids: Path) -> None:
    def body() -> None:
        note_pid(pids)
        only_on(0, lambda: os.kill(os.getpid(), signal.SIGKILL))

    with Clock() as clock, pytest.raises(LaunchError, match="rank 0 of 2 was killed by SIGKILL") as caught:
        launch(body, 2)
    assert clock.seconds < 3
    assert caught.value.rank == 0
    assert not any(map(alive, noted_pids(pids)))


def test_a_death_is_noticed_although_a_grandchild_holds_the_pipe(pids: Path) -> None:
    def body() -> None:
        if dist.get_rank() == 1:
            grandchild = os.fork()
            if grandchild == 0:
                sleep()
            note_pid(pids)
            (pids / str(grandchild)).touch()
            die()
        sleep()

    with Clock() as clock, pytest.raises(LaunchError, match="rank 1 of 2 ended with exit code 3"):
        launch(body, 2)
    assert clock.seconds < 4.5
    assert len(noted_pids(pids)) == 2
    assert wait_for(lambda: not any(map(alive, noted_pids(pids))))


def test_a_broken_connection_is_not_the_first_failure() -> None:
    def body() -> None:
        if dist.get_rank() == 1:
            dist.destroy_process_group()  # like a `finally` clause: the others see the broken connection first
            time.sleep(0.5)
            boom()
        dist.barrier()

    with pytest.raises(LaunchError, match="rank 1 of 2 raised ValueError: boom") as caught:
        launch(body, 2)
    assert "then failed: rank 0" in str(caught.value)


def test_a_broken_connection_is_explained() -> None:
    def body() -> None:
        if dist.get_rank() == 1:
            dist.destroy_process_group()
        else:
            dist.barrier()

    with pytest.raises(
        LaunchError, match=r"(?s)rank 0 of 2 raised .*rank 1 of 2 left the process group while others wait"
    ):
        launch(body, 2, timeout=20)


def test_sys_exit_is_a_failure() -> None:
    with pytest.raises(LaunchError, match="rank 0 of 2 raised SystemExit: 4"):
        launch(lambda: sys.exit(4), 2)


def test_a_timeout_shows_the_stack_of_each_rank(pids: Path) -> None:
    def body() -> None:
        note_pid(pids)
        only_on(1, sleep)

    with (
        Clock() as clock,
        pytest.raises(LaunchError, match=r"ranks 0, 1 of 2 did not finish within 0\.5 s") as caught,
    ):
        launch(body, 2, timeout=0.5)
    assert clock.seconds < 4
    assert "in barrier" in caught.value.traceback
    assert "in sleep" in caught.value.traceback
    assert not any(map(alive, noted_pids(pids)))


def test_a_result_that_cannot_be_sent_is_an_error() -> None:
    with pytest.raises(
        LaunchError, match=r"(?s)type generator that cannot be sent.*fix: Return plain tensors"
    ):
        launch(lambda: (i for i in range(3)), 2)


@pytest.fixture
def sigint_handled() -> Iterator[None]:
    """Let Python handle Ctrl-C, also if the tests run in the background and the shell ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("sigint_handled")
def test_ctrl_c_stops_the_workers(pids: Path) -> None:
    def interrupt() -> None:
        wait_for(lambda: len(noted_pids(pids)) == 2)
        _thread.interrupt_main()

    def body() -> None:
        note_pid(pids)
        sleep()

    thread = threading.Thread(target=interrupt)
    thread.start()
    with Clock() as clock, pytest.raises(KeyboardInterrupt):
        launch(body, 2)
    thread.join()
    assert clock.seconds < 4.5
    assert len(noted_pids(pids)) == 2
    assert not any(map(alive, noted_pids(pids)))


def test_the_error_can_be_pickled() -> None:
    error = pickle.loads(pickle.dumps(LaunchError("what", 2, "where")))
    assert (str(error), error.rank, error.traceback) == ("what", 2, "where")


@pytest.mark.parametrize(
    ("fn", "nprocs", "timeout", "error", "match"),
    [
        (3, 2, None, TypeError, "fn is 3.*fix: Pass the function"),
        (boom, 2.0, None, TypeError, "nprocs is 2.0.*fix: Pass an int"),
        (boom, True, None, TypeError, "nprocs is True"),
        (boom, 0, None, ValueError, "nprocs is 0.*fix: launch"),
        (boom, 2, 0, ValueError, "timeout is 0.*fix: Pass a number above 0"),
    ],
)
def test_invalid_arguments(
    fn: object, nprocs: object, timeout: float, error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=f"(?s){match}"):
        launch(fn, nprocs, timeout=timeout)  # type: ignore[arg-type]


def test_launch_inside_launch_is_refused() -> None:
    with pytest.raises(LaunchError, match="already part of a process group"):
        launch(lambda: launch(lambda: 1, 2), 2)


# ---- Workers


@pytest.fixture(scope="module")
def workers() -> Iterator[Workers]:
    with Workers(2, timeout=30) as pool:
        yield pool


@pytest.fixture
def temp_of_workers(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """For tests that restart the shared workers, whose folder outlives the test."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path_factory.getbasetemp()))


def test_workers_are_reused(workers: Workers) -> None:
    before = workers.run(threads)
    assert len({pid for pid, _ in before} | {os.getpid()}) == 3
    if "OMP_NUM_THREADS" not in os.environ:
        assert [n for _, n in before] == [1, 1]
    assert [y.item() for _, y in workers.run(total, torch.tensor(1.0))] == [3, 3]
    assert workers.run(threads) == before


def test_workers_are_reused_after_an_exception_on_all_ranks(workers: Workers) -> None:
    before = workers.run(threads)
    with pytest.raises(LaunchError, match="rank 0 of 2 raised ValueError: boom"):
        workers.run(boom)
    with pytest.raises(LaunchError, match="raised ValueError: boom on"):
        workers.run(rank_in_message)
    assert [y.item() for _, y in workers.run(total, torch.tensor(1.0))] == [3, 3]
    assert workers.run(threads) == before


@pytest.mark.usefixtures("temp_of_workers")
@pytest.mark.parametrize("failing", [boom_on, die_on])
def test_workers_restart_after_a_rank_failed(workers: Workers, failing: Callable[[int], None]) -> None:
    before = [pid for pid, _ in workers.run(threads)]
    with pytest.raises(LaunchError, match="rank 1 of 2"):
        workers.run(failing, 1)
    assert not any(map(alive, before))
    assert [y.item() for _, y in workers.run(total, torch.tensor(1.0))] == [3, 3]


@pytest.mark.usefixtures("temp_of_workers")
def test_workers_restart_when_the_group_is_destroyed_or_a_worker_killed(workers: Workers) -> None:
    first = workers.run(leave_group)
    second = [pid for pid, _ in workers.run(threads)]
    assert not set(first) & set(second)
    os.kill(second[0], signal.SIGKILL)
    os.waitid(os.P_PID, second[0], os.WEXITED | os.WNOWAIT)
    assert [y.item() for _, y in workers.run(total, torch.tensor(1.0))] == [3, 3]
    assert not any(map(alive, [*first, *second]))


@pytest.mark.usefixtures("temp_of_workers")
def test_workers_restart_after_a_fault_that_the_function_caught(workers: Workers) -> None:
    first = workers.run(ignore_a_fault)
    assert [y.item() for _, y in workers.run(total, torch.tensor(1.0))] == [3, 3]
    assert not any(map(alive, first))


@pytest.mark.parametrize("seed", [None, "random", "7"])
def test_all_ranks_hash_alike(monkeypatch: pytest.MonkeyPatch, seed: str | None) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    if seed is not None:
        monkeypatch.setenv("PYTHONHASHSEED", seed)
    one, other = launch(hash_of_text, 2)
    assert one == other


def test_workers_report_what_they_cannot_import(workers: Workers, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TypeError, match=r"(?s)lambda.*fix: Define it at module level"):
        workers.run(lambda: 1)
    monkeypatch.setattr(threads, "__module__", "loaded_from_nowhere")
    monkeypatch.setitem(sys.modules, "loaded_from_nowhere", sys.modules[__name__])
    with pytest.raises(TypeError, match=r"loaded_from_nowhere\.threads is not in a file"):
        workers.run(threads)


def test_run_after_close_is_an_error() -> None:
    with Clock() as clock, Workers(1) as pool:
        pass
    assert clock.seconds < 1  # closing does not wait for torch to load
    pool.close()
    with pytest.raises(RuntimeError, match="after close"):
        pool.run(threads)


def test_unreferenced_workers_exit() -> None:
    pool = Workers(1)
    [(pid, _)] = pool.run(threads)
    del pool
    gc.collect()
    assert not alive(pid)


# ---- scripts

SCRIPT = """
    import os, sys, torch, torch.distributed as dist
    from shardwise.comm.launch import launch

    class Pair:
        def __init__(self, a, b):
            self.a, self.b = a, b

    def body(pair):
        if __name__ == "__mp_main__":
            sys.stdout.write("hello ")
        x = torch.tensor([pair.a + dist.get_rank()])
        dist.all_reduce(x)
        return Pair(os.getpid(), (x.item(), sys.argv[1]))

    if __name__ == "__main__":
        results = launch(body, 2, Pair(10, None))
        assert all(isinstance(r, Pair) for r in results)
        assert not dist.is_initialized()
        who = "own" if os.getpid() in [r.a for r in results] else "other"
        # in one write: the processes of torchrun are unbuffered and share this pipe
        os.write(1, f"{who} {[r.b for r in results]}\\n".encode())
"""


def run_script(folder: Path, text: str, *before: str) -> "subprocess.CompletedProcess[str]":
    path = folder / "script"  # a script needs no suffix
    path.write_text(textwrap.dedent(text))
    paths = os.pathsep.join(entry for entry in sys.path if entry)
    command = [sys.executable, *before, str(path), "word"]
    env = {**os.environ, "PYTHONPATH": paths, "PYTHONUNBUFFERED": ""}
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=180, check=False)


def test_a_script_starts_its_processes(tmp_path: Path) -> None:
    done = run_script(tmp_path, SCRIPT)
    assert done.stdout == "hello hello other [(21, 'word'), (21, 'word')]\n", done.stderr


def test_the_same_script_runs_under_torchrun(tmp_path: Path) -> None:
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = run_script(tmp_path, SCRIPT, *torchrun)
    assert done.stdout == "own [(21, 'word'), (21, 'word')]\n" * 2, done.stderr


def test_a_script_without_a_main_guard_is_an_error(tmp_path: Path) -> None:
    done = run_script(
        tmp_path, SCRIPT.replace('__name__ == "__main__"', "True").replace("body, 2,", "body, 1,")
    )
    assert done.returncode == 1
    assert 'under `if __name__ == "__main__":`' in done.stderr


def test_under_torchrun_nprocs_must_match(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",
    }.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(
        ValueError, match=r"(?s)nprocs is 2, but torchrun has started 1 process.*--nproc-per-node 2"
    ):
        launch(boom, 2)
    with pytest.raises(LaunchError, match="rank 0 of 1 raised ValueError: boom") as caught:
        launch(boom, 1)
    assert caught.value.rank == 0
    assert "in boom" in caught.value.traceback
    assert not dist.is_initialized()
    assert launch(lambda: os.getpid(), 1) == [os.getpid()]
    with pytest.raises(LaunchError, match="cannot be sent"):
        launch(lambda: (i for i in range(3)), 1)


ORPHANS = """
    import os, pathlib, signal, sys, time
    from shardwise.comm.launch import Workers, launch

    def note():
        pathlib.Path(sys.argv[2], str(os.getpid())).touch()

    if __name__ == "__main__":
        workers = Workers(1)
        workers.run(note)
        if os.fork() == 0:  # a bystander that holds copies of the parent's pipes
            pathlib.Path(sys.argv[1]).write_text(str(os.getpid()))
            time.sleep(60)
            os._exit(0)
        launch(lambda: (note(), time.sleep(60)), 2)
"""


def test_workers_exit_when_their_parent_is_killed(tmp_path: Path, pids: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(ORPHANS))
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "TMPDIR": tempfile.gettempdir()}
    bystander = tmp_path / "bystander"
    with subprocess.Popen([sys.executable, str(script), str(bystander), str(pids)], env=env) as parent:
        assert wait_for(lambda: len(noted_pids(pids)) == 3 and bystander.exists(), 30)
        parent.kill()
    assert wait_for(lambda: not any(map(alive, noted_pids(pids))))
    assert wait_for(lambda: not list(Path(tempfile.gettempdir()).iterdir()))
    assert alive(int(bystander.read_text()))
    os.kill(int(bystander.read_text()), signal.SIGKILL)
