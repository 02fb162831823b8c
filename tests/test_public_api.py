"""The public API: torch's names and signatures, documented, in the modules that torch documents."""

from __future__ import annotations

import doctest
import importlib
import inspect
import json
import pkgutil
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.distributed.device_mesh

import shardwise

SOURCE = Path(shardwise.__file__).parent
MODULES = sorted(m.name for m in pkgutil.walk_packages([str(SOURCE)], "shardwise."))
TORCH = "torch.distributed.tensor"
PATHS = [
    "",
    ".placement_types",
    ".device_mesh",
    ".debug",
    ".experimental",
    ".parallel",
    ".parallel.loss",
    ".parallel.style",
]
"""The modules that torch documents."""
OURS = {"DivergenceError", "PlanError", "linear_cross_entropy", "picture", "sanitize"}
"""Names in these modules that torch does not have."""
ADDED = {
    "rand": {"device"},
    "randn": {"device"},
    "experimental.local_map": {"spmd_types"},  # torch has it from 2.14
    "experimental.register_sharding": {"text", "by", "linear", "added", "reads", "empty"},
}
"""Arguments that torch does not have, or not in every release."""


DATA_PARALLEL = set(
    """CPUOffloadPolicy DataParallelMeshDims Explanation FSDPModule MixedPrecisionPolicy OffloadPolicy OwnerOptimizer UnshardHandle check_ranks explain
    fully_shard register_fsdp_forward_method replicate share_comm_ctx zero""".split()
)
"""Names of `shardwise.parallel` that torch has in `torch.distributed.fsdp`, or not at all."""


def torch_module(path: str) -> ModuleType:
    return importlib.import_module(TORCH + path)


def our_module(path: str) -> ModuleType:
    return importlib.import_module("shardwise" + path)


@pytest.mark.parametrize("module", ["parallel.api", "parallel.style"])
def test_modules_have_the_names_that_those_of_torch_import(module):
    from shardwise.parallel import ParallelStyle

    found = our_module(f".{module}")
    assert found.DTensor is shardwise.DTensor
    assert found.ParallelStyle is ParallelStyle


def test_all_is_sorted_and_complete():
    names = shardwise.__all__
    assert names == sorted(names)
    assert len(set(names)) == len(names)
    public = {
        n
        for n, v in vars(shardwise).items()
        if not n.startswith("_") and not inspect.ismodule(v) and n not in ("annotations",)
    }
    assert public == set(names)


def test_star_import_imports_exactly_all():
    scope: dict[str, object] = {}
    exec("from shardwise import *", scope)
    assert set(scope) - {"__builtins__"} == set(shardwise.__all__)


@pytest.mark.parametrize("name", shardwise.__all__)
def test_every_name_is_documented(name):
    thing = getattr(shardwise, name)
    doc = inspect.getdoc(thing)
    assert doc
    assert not doc.startswith(f"{name}(")  # the default docstring of a dataclass
    if inspect.isclass(thing) and thing.__module__.startswith("shardwise"):
        for member, value in vars(thing).items():
            if not member.startswith("_") and (
                inspect.isfunction(value) or isinstance(value, property | staticmethod)
            ):
                assert inspect.getdoc(getattr(thing, member)), f"{name}.{member}"


@pytest.mark.parametrize("path", PATHS)
def test_every_public_name_of_the_installed_torch_is_there(path):
    ours, theirs = our_module(path), torch_module(path)
    assert set(theirs.__all__) <= set(ours.__all__)
    assert all(hasattr(ours, name) for name in ours.__all__)
    if path:
        assert list(ours.__all__) == sorted(ours.__all__)
        assert set(ours.__all__) <= {*vars(theirs), *OURS, *DATA_PARALLEL}


def test_the_modules_of_torch_are_those_that_this_file_compares():
    documented = {
        m.name.removeprefix(TORCH)
        for m in pkgutil.walk_packages(torch_module("").__path__, f"{TORCH}.")
        if "._" not in m.name
    }
    by_another_path = {f".parallel.{name}" for name in ("api", "ddp", "fsdp", "input_reshard")}
    assert documented - by_another_path == set(PATHS[1:])


def test_a_name_is_the_same_object_in_every_module():
    from shardwise import debug, device_mesh, placement_types

    for module in (placement_types, device_mesh):
        for name in module.__all__:
            assert getattr(module, name) is getattr(shardwise, name)
    assert debug.CommDebugMode.__name__ == "CommDebugMode"
    assert shardwise.DeviceMesh is torch.distributed.device_mesh.DeviceMesh
    assert shardwise.init_device_mesh is torch.distributed.device_mesh.init_device_mesh


SIGNATURES = [
    f"{path}.{name}".removeprefix(".")
    for path in PATHS
    for name in torch_module(path).__all__
    if inspect.isfunction(getattr(torch_module(path), name))
] + [
    "DTensor.from_local",
    "DTensor.to_local",
    "DTensor.redistribute",
    "DTensor.full_tensor",
    "debug.CommDebugMode",
]


@pytest.mark.parametrize("name", SIGNATURES)
def test_arguments_have_torchs_names_kinds_and_defaults(name):
    def parameters(package):
        thing = package
        for part in name.split("."):
            thing = getattr(thing, part)
        return inspect.signature(thing).parameters

    theirs = parameters(torch_module(""))
    ours = [p for p in parameters(our_module("")).values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
    assert {p.name for p in ours} - ADDED.get(name, set()) <= set(theirs) <= {p.name for p in ours}
    added = [p for p in ours if p.name not in theirs]
    assert all(p.default is not p.empty for p in added)
    shared = [p for p in ours if p.name in theirs]
    for p in shared:
        assert (p.kind, p.default) == (theirs[p.name].kind, theirs[p.name].default), p.name
    positional = [p.name for p in theirs.values() if p.kind is not inspect.Parameter.KEYWORD_ONLY]
    assert [p.name for p in ours][: len(positional)] == positional


@pytest.mark.parametrize("name", MODULES)
def test_every_module_has_a_docstring_and_all(name):
    module = importlib.import_module(name)
    assert module.__doc__
    assert all(hasattr(module, n) for n in module.__all__)


def test_src_never_imports_torch_distributed_tensor():
    imports = re.compile(r"^\s*(from|import)\s+torch\.distributed\.(_?tensor)\b", re.M)
    files = list(SOURCE.rglob("*.py"))
    assert len(files) > 100
    assert [file for file in files if imports.search(file.read_text())] == []


PROGRAM = """
    import io, json, sys
    import torch
    import shardwise as sw

    def imported():
        return [m for m in sys.modules if m.startswith("torch.distributed.tensor")]

    before = imported()
    with sw.simulate(4):
        mesh = sw.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        x = sw.distribute_tensor(torch.arange(6.0, requires_grad=True), mesh, [sw.Shard(0), sw.Partial()])
        file = io.BytesIO()
        torch.save(x, file)
        file.seek(0)
        y = torch.load(file, weights_only=True)
        after = imported()  # torch's autograd may import it later
        y.redistribute(dp=sw.Replicate()).full_tensor().sum().backward()
    print(json.dumps([before, after, repr(y.sharding), y.grad.to_local().ranks[0].tolist(), sw.__version__]))
"""


def test_a_program_does_not_import_torch_distributed_tensor():
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(PROGRAM)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    before, after, layout, grad, version = json.loads(done.stdout.splitlines()[-1])
    assert before == after == []
    assert layout == "[6:dp] P(tp,sum)"
    assert grad == [1.0] * 3
    assert re.fullmatch(r"\d+\.\d+\.\d+", version)


def test_the_package_is_marked_as_typed():
    assert (SOURCE / "py.typed").exists()


def test_the_main_public_names_have_examples():
    finder = doctest.DocTestFinder(recurse=False)
    with_examples = {
        n for n in shardwise.__all__ if any(t.examples for t in finder.find(getattr(shardwise, n), n))
    }
    assert {
        "DTensor",
        "Layout",
        "PerRank",
        "Shard",
        "arange",
        "distribute_tensor",
        "per_rank",
        "simulate",
    } <= with_examples
