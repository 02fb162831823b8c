"""Running functions in forks of a prepared process: see server.py."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

__all__ = ["Run", "prepared"]

ROOT = Path(__file__).parents[2]
TIMEOUT = 120
Run = Callable[..., list[Any]]
"""`run("module:function", world=2, **kwargs)`: what the function returned on each rank."""


@contextlib.contextmanager
def prepared(module: str) -> Iterator[Run]:
    """A process that has imported a module, and forks for each run."""
    paths = [str(ROOT), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    server = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-m", "tests.drop_in.server", module],
        cwd=ROOT,
        env=env,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        bufsize=0,
        start_new_session=True,
    )
    assert server.stdin is not None
    assert server.stdout is not None
    requests, answers = server.stdin, server.stdout

    def read(count: int) -> bytes:
        data = b""
        while len(data) < count:
            if not select.select([answers], [], [], TIMEOUT)[0]:
                raise TimeoutError(f"no answer within {TIMEOUT} s")
            more = os.read(answers.fileno(), count - len(data))
            if not more:
                raise RuntimeError("the process died")
            data += more
        return data

    def run(function: str, *, world: int = 0, **kwargs: Any) -> list[Any]:
        job = {"function": function, "world": world, "kwargs": kwargs}
        requests.write(json.dumps(job).encode() + b"\n")
        requests.flush()
        results = pickle.loads(read(int.from_bytes(read(8), "little")))
        failed = [f"rank {rank}:\n{text}" for rank, (ok, text) in enumerate(results) if not ok]
        if failed:
            raise AssertionError("\n".join(failed))
        return [value for _, value in results]

    try:
        yield run
    finally:
        requests.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.wait(20)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)  # the session of the server: forks that remain
        server.wait()
        answers.close()
