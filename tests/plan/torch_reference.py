"""The exact traffic of `redistribute` in `torch.distributed.tensor`, as a reference.

It is measured, not modelled: each rank of the mesh in turn runs torch's own `redistribute` over a fake process group, and
the collectives are recorded with the sizes of their buffers, padding included.

`python -m tests.plan.torch_reference` measures all `CASES` again (three minutes) and rewrites the committed
table that `load_reference` reads.
"""

import base64
import itertools
import json
import logging
import math
import time
import zlib
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _get_group_size_by_name
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, _redistribute
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

Shape: TypeAlias = tuple[int, ...]
Tokens: TypeAlias = tuple[str, ...]
Pair: TypeAlias = tuple[Tokens, Tokens]
Case: TypeAlias = tuple[Shape, Shape]

MESHES: tuple[Shape, ...] = ((8,), (2, 4), (2, 2, 2))
EVEN: tuple[Shape, ...] = ((16, 8), (8, 16, 8))
UNEVEN: tuple[Shape, ...] = ((13, 7), (13, 7, 5))
CASES: tuple[Case, ...] = tuple(itertools.product(MESHES, EVEN + UNEVEN))
REFERENCE = Path(__file__).parent / "data" / "torch-2.13-redistribute.json"


@dataclass(frozen=True)
class Traffic:
    """The number of collectives that one rank calls, and the bytes sent by all ranks."""

    collectives: int
    bytes: int


@dataclass(frozen=True)
class _Call:
    """One collective, as one rank calls it."""

    op: str
    group_size: int
    input_bytes: int


# The fraction of its input buffer that a rank of a group of n sends. A collective without a row here is an error.
_SHARE_SENT: dict[str, Callable[[int], Fraction]] = {
    "_c10d_functional::all_gather_into_tensor": lambda n: Fraction(n - 1),
    "_c10d_functional::reduce_scatter_tensor": lambda n: Fraction(n - 1, n),
    "_c10d_functional::all_reduce": lambda n: Fraction(2 * (n - 1), n),
    # not used on CPU: over gloo torch gathers everything and keeps a chunk
    "_dtensor::shard_dim_alltoall": lambda n: Fraction(n - 1, n),
}
_SENDS_NOTHING = {"_c10d_functional::wait_tensor", "_c10d_functional::_wrap_tensor_autograd"}


class UnknownCollectiveError(RuntimeError):
    """Torch called a collective whose traffic is not known here."""


class _Recorder(TorchDispatchMode):
    """Record every collective, and refuse unknown ones."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[_Call] = []

    def __torch_dispatch__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        name = func._schema.name
        if name in _SHARE_SENT:
            # each of torch's functional collectives takes its buffer first and its group last
            self.calls.append(_Call(name, _get_group_size_by_name(args[-1]), args[0].nbytes))
        elif func.namespace != "aten" and name not in _SENDS_NOTHING:
            raise UnknownCollectiveError(
                f"torch called {name}, whose traffic is not known here: add a row to _SHARE_SENT"
            )
        return func(*args, **(kwargs or {}))


def torch_traffic(
    mesh_shape: Shape,
    global_shape: Shape,
    source: Tokens,
    target: Tokens,
    dtype: torch.dtype = torch.float32,
) -> Traffic | None:
    """What torch sends from `source` to `target`, or None if torch raises.

    >>> torch_traffic((8,), (16, 8), ("S0",), ("R",))
    Traffic(collectives=1, bytes=3584)
    """
    return torch_table(mesh_shape, global_shape, [(source, target)], dtype)[source, target]


def torch_table(
    mesh_shape: Shape,
    global_shape: Shape,
    pairs: Iterable[Pair],
    dtype: torch.dtype = torch.float32,
) -> dict[Pair, Traffic | None]:
    """`torch_traffic` of many pairs, with one process group per rank."""
    parsed = {
        (source, target): (
            parse_tokens(source, len(mesh_shape), len(global_shape)),
            parse_tokens(target, len(mesh_shape), len(global_shape)),
        )
        for source, target in pairs
    }
    by_rank: list[list[list[_Call] | None]] = []
    # every rank, because a padded buffer is equal within its group only: other groups may hold smaller blocks
    for rank in range(math.prod(mesh_shape)):
        with _world_of(rank, mesh_shape) as mesh:
            by_rank.append([_calls(mesh, global_shape, dtype, *pair) for pair in parsed.values()])
    return {pair: _total(ranks) for pair, ranks in zip(parsed, zip(*by_rank, strict=True), strict=True)}


def parse_tokens(tokens: Tokens, mesh_ndim: int, tensor_ndim: int) -> tuple[Placement, ...]:
    """Torch's placements for tokens.

    >>> parse_tokens(("R", "S1", "P"), mesh_ndim=3, tensor_ndim=2)
    (Replicate(), Shard(dim=1), Partial(sum))
    """
    known: dict[str, Placement] = {"R": Replicate(), "P": Partial()}
    known |= {f"S{dim}": Shard(dim) for dim in range(tensor_ndim)}
    if len(tokens) != mesh_ndim or not known.keys() >= set(tokens):
        raise ValueError(
            f"{tokens!r} is not a placement tuple for {mesh_ndim} axes and {tensor_ndim} dims: "
            f"give {mesh_ndim} of {', '.join(known)}"
        )
    return tuple(known[token] for token in tokens)


def all_pairs(mesh_ndim: int, tensor_ndim: int) -> list[Pair]:
    """Every source and target that differ; a target is `P` only where its source is, as torch requires.

    >>> all_pairs(1, 1)
    [(('R',), ('S0',)), (('P',), ('R',)), (('P',), ('S0',)), (('S0',), ('R',))]
    """
    shards = [f"S{dim}" for dim in range(tensor_ndim)]
    on_axis = [
        (source, target)
        for source in ["R", "P", *shards]
        for target in ["R", "P", *shards]
        if target != "P" or source == "P"
    ]
    pairs = (
        (tuple(source for source, _ in axes), tuple(target for _, target in axes))
        for axes in itertools.product(on_axis, repeat=mesh_ndim)
    )
    return [(source, target) for source, target in pairs if source != target]


@contextmanager
def _world_of(rank: int, mesh_shape: Shape) -> Iterator[DeviceMesh]:
    """The mesh on `rank`, over a fake process group that is destroyed afterwards."""
    if dist.is_initialized():
        raise RuntimeError(
            "torch_reference creates fake process groups, and this process already has a default process group: "
            "call destroy_process_group() first, or measure in another process"
        )
    size = math.prod(mesh_shape)
    logger = logging.getLogger("torch.distributed.tensor")
    level = logger.level
    # torch warns about collectives it does not merge and about all-to-all over gloo, which is what we count
    logger.setLevel(logging.ERROR)
    _forget_plans()
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        yield DeviceMesh("cpu", torch.arange(size).view(mesh_shape))
    finally:
        dist.destroy_process_group()
        _forget_plans()
        logger.setLevel(level)


def _forget_plans() -> None:
    """Clear torch's plan caches: their keys omit the rank, but the plans depend on it."""
    _redistribute._gen_transform_infos.cache_clear()
    _redistribute.clear_redistribute_planner_cache()


def _calls(
    mesh: DeviceMesh,
    global_shape: Shape,
    dtype: torch.dtype,
    source: tuple[Placement, ...],
    target: tuple[Placement, ...],
) -> list[_Call] | None:
    """The collectives that this rank calls, or None if torch raises."""
    block_shape, _ = compute_local_shape_and_global_offset(global_shape, mesh, source)
    block = torch.empty(block_shape, dtype=dtype)
    stride = torch.empty(global_shape, device="meta").stride()
    recorder = _Recorder()
    with recorder:
        try:
            tensor = DTensor.from_local(block, mesh, source, shape=torch.Size(global_shape), stride=stride)
            tensor.redistribute(mesh, target)
        except UnknownCollectiveError:
            raise
        except Exception:  # torch fails with RuntimeError, ValueError, AssertionError, ...
            return None
    return recorder.calls


def _total(ranks: Sequence[list[_Call] | None]) -> Traffic | None:
    """The total of all ranks, without groups of one rank; None if torch raises on any."""
    calls = [[call for call in rank if call.group_size > 1] for rank in ranks if rank is not None]
    if len(calls) < len(ranks):
        return None
    counts = {len(rank) for rank in calls}
    sent = sum((_bytes_sent(call) for rank in calls for call in rank), Fraction(0))
    if len(counts) > 1 or sent.denominator != 1:
        raise RuntimeError(
            f"ranks of one group disagree, so this would hang or be wrong on real processes: {calls}"
        )
    return Traffic(counts.pop(), int(sent))


def _bytes_sent(call: _Call) -> Fraction:
    """The bytes that one rank sends in one collective."""
    return _SHARE_SENT[call.op](call.group_size) * call.input_bytes


def load_reference() -> dict[Case, dict[Pair, Traffic | None]]:
    """The committed measurement of every pair of `CASES`, in float32."""
    return {
        (tuple(row["mesh"]), tuple(row["shape"])): dict(
            zip(all_pairs(len(row["mesh"]), len(row["shape"])), _decode(row), strict=True)
        )
        for row in json.loads(REFERENCE.read_text())["cases"]
    }


def _encode(traffic: Sequence[Traffic | None]) -> dict[str, Any]:
    """The distinct values, and for each pair, in the order of `all_pairs`, the index of its value."""
    values = list(dict.fromkeys(traffic))
    index = {value: number for number, value in enumerate(values)}
    numbers = array("H", (index[value] for value in traffic))
    return {
        "values": [value and (value.collectives, value.bytes) for value in values],
        "pairs": base64.b64encode(zlib.compress(numbers.tobytes(), 9)).decode(),
    }


def _decode(row: dict[str, Any]) -> list[Traffic | None]:
    """The inverse of `_encode`."""
    values = [None if value is None else Traffic(*value) for value in row["values"]]
    return [values[number] for number in array("H", zlib.decompress(base64.b64decode(row["pairs"])))]


def main() -> None:
    """Measure all `CASES`, print their totals, and rewrite the committed table."""
    rows = []
    for mesh_shape, global_shape in CASES:
        start = time.perf_counter()
        pairs = all_pairs(len(mesh_shape), len(global_shape))
        table = torch_table(mesh_shape, global_shape, pairs)
        rows.append({"mesh": mesh_shape, "shape": global_shape} | _encode([table[pair] for pair in pairs]))
        done = [traffic for traffic in table.values() if traffic is not None]
        print(
            f"mesh {mesh_shape!s:10} shape {global_shape!s:12} pairs {len(pairs):5}"
            f" raise {len(pairs) - len(done)} collectives {sum(t.collectives for t in done):6}"
            f" bytes {sum(t.bytes for t in done):10} {time.perf_counter() - start:6.1f} s"
        )
    REFERENCE.parent.mkdir(exist_ok=True)
    lines = ",\n".join(json.dumps(row, separators=(",", ":")) for row in rows)
    REFERENCE.write_text(f'{{"torch": "{torch.__version__}", "dtype": "float32", "cases": [\n{lines}\n]}}\n')


if __name__ == "__main__":
    main()
