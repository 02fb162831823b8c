"""A process that has imported what tests need and forks for each of them, so that imports are paid for once.

`python -m tests.drop_in.server module` imports a module and then reads jobs, one JSON object per line: a function as
`module:name`, keyword arguments, and the number of ranks. Each rank is a fork, with a gloo group if there are several.
"""

from __future__ import annotations

import faulthandler
import json
import os
import pickle
import sys
import tempfile
import time
import traceback
from importlib import import_module
from typing import Any

SECONDS = float(os.environ.get("SHARDWISE_FORK_SECONDS", "60"))


def _rank(job: dict[str, Any], rank: int, store: str, out: int) -> None:
    """Run the function of a job as one rank, and write what it returns or the error."""
    faulthandler.dump_traceback_later(SECONDS, exit=True)  # a rank that hangs shows where, and ends
    try:
        import torch

        torch.set_num_threads(1)
        world = job["world"]
        if world:
            import torch.distributed as dist

            places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
            os.environ.update({name: str(value) for name, value in places.items()})
            dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
        module, name = job["function"].split(":")
        answer = True, getattr(import_module(module), name)(**job["kwargs"])
    except BaseException:
        answer = False, traceback.format_exc()
    with os.fdopen(out, "wb") as file:
        pickle.dump(answer, file)


def _run(job: dict[str, Any]) -> list[tuple[bool, Any]]:
    pipes, pids = [], []
    with tempfile.TemporaryDirectory() as folder:
        for rank in range(max(job["world"], 1)):
            read, write = os.pipe()
            pid = os.fork()
            if pid == 0:
                os.close(read)
                _rank(job, rank, folder + "/store", write)
                os._exit(0)
            os.close(write)
            pipes.append(os.fdopen(read, "rb"))
            pids.append(pid)
        answers = []
        for pipe in pipes:
            with pipe:
                data = pipe.read()
            answers.append(pickle.loads(data) if data else (False, "the process died"))
        deadline = time.monotonic() + 10
        for pid in pids:
            while os.waitpid(pid, os.WNOHANG)[0] == 0 and time.monotonic() < deadline:
                time.sleep(0.01)
    return answers


def main() -> None:
    """Serve jobs until the input ends."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what programs print is not an answer
    import_module(sys.argv[1])
    for line in sys.stdin:
        data = pickle.dumps(_run(json.loads(line)))
        answers.write(len(data).to_bytes(8, "little") + data)
        answers.flush()


if __name__ == "__main__":
    main()
