"""Draw and run programs from the command line: python -m tests.programs.run FIRST COUNT."""
import sys, time, warnings, collections, traceback
import torch
warnings.simplefilter("ignore")
import logging; logging.disable(logging.CRITICAL)
torch.set_num_threads(1)
from tests.programs import templates_ops, templates_autograd
from tests.programs.drawing import draw_program
from tests.programs.program import simulated_difference
from tests.programs.shrink import printed, shrink
first, count = int(sys.argv[1]), int(sys.argv[2])
kinds = collections.Counter(); t0 = time.process_time(); gen = 0; n = 0
for seed in range(first, first + count):
    t = time.process_time()
    p = draw_program(seed)
    gen += time.process_time() - t
    n += len(p.statements)
    f = simulated_difference(p)
    kinds[f and f.kind] += 1
    if f:
        p, f = shrink(p, f, simulated_difference, 120)
        print("=== seed", seed); print(printed(p, f).split("\nfrom tests")[0], flush=True)
        print("#   mesh", p.mesh, flush=True)
print(kinds, "statements", n, "cpu", time.process_time() - t0, "gen", gen)
