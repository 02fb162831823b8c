"""Running the library on devices that are not there, in a process of its own: `python -m tests.compile.other_devices PART`.

Tensors have no values and the process group does nothing, so what is seen is that each op finds its route and creates its
results on the device of its operands. Parts:

- `rules`: each row of the rule table, in layouts that it allows, on a `cuda` mesh.
- `forward`: the programs of the matrix, among them the modules of `shardwise.parallel`, on a `cuda` mesh.
- `backward`: the same with their backward passes, on a mesh of a device that torch lets Python define ("robot").

For CUDA tensors torch's CPU build has no device guard, which kernels and nodes of autograd graphs ask for a stream (without one,
a node ends the process), so one that does nothing is compiled here. The engine that runs backward passes asks for an
accelerator, too, and that cannot be given to it from outside.

A line for each failure, and last the number of what ran.
"""

import ctypes
import logging
import os
import subprocess
import sys
import traceback
import warnings
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from tests.compile.matrix import PROGRAMS
from tests.rules.test_table import NAMES, op_of, some_calls
from torch._subclasses import FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils import backend_registration
from torch.utils._python_dispatch import _disable_current_modes

import shardwise as sw
from shardwise.call.arguments import map_tensors, tensors_in
from shardwise.comm import coord_of
from shardwise.dispatch.router import dispatch
from shardwise.layout import Spec, block_shape
from shardwise.tensor.dtensor import DTensor
from shardwise.verify.cases import cases

DEEP = os.environ.get("SHARDWISE_DEEP") == "1"
# what CPU builds of torch say, and builds for CUDA
NO_DEVICE = ("not compiled with CUDA", "Found no NVIDIA driver")
REFUSED_BY_TORCH = {
    # fake kernels that run the real one on zeros, or ask the device for something
    "aten._aminmax.default": NO_DEVICE,
    "aten._aminmax.dim": NO_DEVICE,
    "aten._batch_norm_no_update.default": ("CUDA driver version is insufficient",),
    "aten.geqrf.default": NO_DEVICE,
    "aten.multi_margin_loss_backward.default": NO_DEVICE,
    "aten.multilabel_margin_loss_backward.default": NO_DEVICE,
    # the fake kernel takes one dtype, ours all that kernels take
    "aten._grouped_mm.default": "Expected inputs of BF16 type",
    "item_branch": "aten._local_scalar_dense",
}


GUARD = """
#include <c10/core/impl/DeviceGuardImplInterface.h>
static c10::impl::DeviceGuardImplRegistrar guard(
    c10::DeviceType::CUDA, new c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA>());
"""


def add_cuda_guard():
    """Give torch a guard of CUDA devices that does nothing, unless it has one."""
    if torch.version.cuda:
        return
    home = Path(torch.__file__).parent
    with TemporaryDirectory() as folder:
        source, library = Path(folder) / "guard.cpp", Path(folder) / "guard.so"
        source.write_text(GUARD)
        command = [
            os.environ.get("CXX", "c++"),
            "-std=c++20",
            "-shared",
            "-fPIC",
            "-O0",
            "-w",
            f"-I{home / 'include'}",
        ]
        subprocess.run([*command, source, "-o", library, f"-L{home / 'lib'}", "-lc10"], check=True)
        ctypes.CDLL(str(library))


class Mode(FakeTensorMode):
    """Fake tensors, among them those that are created from numbers, on a device that is not there."""

    @property
    def avoid_device_init(self):
        return True


class Robot(backend_registration._DummyBackendModule):
    """What torch asks of the module of a device."""

    def get_amp_supported_dtype(self):
        return [torch.bfloat16, torch.float16]


def report(name, error):
    """A line for a failure, unless torch refuses the call."""
    text = str(error)
    refusals = REFUSED_BY_TORCH.get(name, ())
    if any(words in text for words in ([refusals] if isinstance(refusals, str) else refusals)):
        return False
    where = [f"{f.filename.rpartition('/')[2]}:{f.lineno}" for f in traceback.extract_tb(error.__traceback__)]
    line = text.splitlines()[0][:300] if text else ""
    sys.stdout.write(f"{name}: {type(error).__name__} {line} ({' '.join(where[-5:])})\n")
    return True


def run_row(name, mesh):
    """Run the calls of a row in the layouts that it allows; the number of runs."""
    func, ran = op_of(name), 0
    with _disable_current_modes(), torch.enable_grad():
        calls = list(some_calls(name))[: 3 if DEEP else 1]
    for args, kwargs in calls:
        args, kwargs = (map_tensors(on_device, tree) for tree in (tuple(args), dict(kwargs)))
        if kwargs.get("device") is not None:
            kwargs["device"] = torch.device("cuda")
        for number, case in enumerate(cases(func, args, kwargs, mesh, 0)):
            if number == 5 and not DEEP:
                break
            pairs = zip(case.tensors, case.choice.inputs, strict=True)
            given, named = case.arguments([in_layout(t, layout, mesh) for t, layout in pairs])
            ran += 1
            for number, out in enumerate(tensors_in([dispatch(func, (), given, named)])):
                check_result(out, "cuda", mesh, number in getattr(case.match.rule, "alike", ()))
    return ran


def on_device(t):
    return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="cuda")


def in_layout(t, layout, mesh):
    block = torch.empty(block_shape(layout, coord_of(mesh)), dtype=t.dtype, device="cuda")
    return DTensor(block, Spec(mesh, layout, t.dtype, t.shape, t.stride()))


def check_result(out, device, mesh, any_shape=False):
    """A result is on the device, and its block has the shape that the layout says."""
    if out.device.type != device:
        raise AssertionError(f"the result is on {out.device}")
    if isinstance(out, DTensor):
        block, wanted = out._local_tensor, block_shape(out._spec.layout, coord_of(mesh))
        if block.device.type != device or (tuple(block.shape) != wanted and not any_shape):
            raise AssertionError(f"the block of {out._spec} is {block}")


def run_program(name, mesh, device):
    """Run a program of the matrix, and its backward pass if gradients are recorded."""
    fn, args = PROGRAMS[name](mesh)
    results = [t for t in pytree.tree_leaves(fn(*args)) if isinstance(t, torch.Tensor)]
    for t in results:
        check_result(t, device, mesh)
    recorded = [t for t in results if t.requires_grad]
    if device == "robot" and recorded:
        loss = sum(t.float().square().mean() for t in recorded[:2])
        (loss.full_tensor() if isinstance(loss, DTensor) else loss).backward()
        for t in args:
            if isinstance(t, torch.Tensor) and t.grad is not None:
                check_result(t.grad, device, mesh)


def run_all(part):
    """The numbers of what ran and of what failed."""
    device = "robot" if part == "backward" else "cuda"
    ran = failed = 0
    with sw.compile.fake_mesh((2,), ("tp",), rank=1, device_type=device) as mesh:
        for name in NAMES if part == "rules" else PROGRAMS:
            with Mode(allow_non_fake_inputs=part == "rules"):
                try:
                    if part == "rules":
                        ran += run_row(name, mesh) > 0
                    else:
                        with torch.device(device):
                            run_program(name, mesh, device)
                        ran += 1
                except Exception as error:
                    failed += report(name, error)
    return ran, failed


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    if sys.argv[1] == "backward":
        backend_registration._setup_privateuseone_for_python_backend("robot", Robot())
        # on a thread of its own an error would end the process, because the guard is called while it passes
        torch.autograd.set_multithreading_enabled(False)
    else:
        add_cuda_guard()
    sys.stdout.write("{} ran, {} failed\n".format(*run_all(sys.argv[1])))
