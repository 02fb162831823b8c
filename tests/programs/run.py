"""Draw, run and shrink programs: python -m tests.programs.run FIRST COUNT."""

from __future__ import annotations

import collections
import logging
import sys
import time
import warnings

import torch
from tests.programs import templates_autograd, templates_ops  # noqa: F401  (they register templates)
from tests.programs.drawing import draw_program
from tests.programs.program import simulated_difference
from tests.programs.shrink import printed, shrink


def main(first: int, count: int) -> None:
    """Print each program that differs, shrunk, and how many there were of each kind."""
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    kinds: collections.Counter[str] = collections.Counter()
    start = time.process_time()
    for seed in range(first, first + count):
        program = draw_program(seed)
        found = simulated_difference(program)
        kinds["alike" if found is None else found.kind] += 1
        if found is not None:
            small, found = shrink(program, found, simulated_difference, 120)
            print(f"=== seed {seed}\n{printed(small, found)}", flush=True)
    print(dict(kinds), f"{time.process_time() - start:.0f} s CPU")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
