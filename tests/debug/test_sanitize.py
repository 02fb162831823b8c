"""`sanitize` finds what ranks do not agree on, with the same error on all of them, and nothing in right programs."""

from __future__ import annotations

import re

import pytest
import torch
import torch.distributed as dist
from tests.debug.divergences import BAD, DIVERGENCES, RIGHT

import shardwise as sw
from shardwise import DTensor, Replicate, Shard
from shardwise.debug import DivergenceError
from shardwise.debug.agreement_log import ENTRIES, find_difference
from shardwise.debug.fingerprint import fingerprint, fingerprint_on_device


def diverge() -> list[tuple[str, str, tuple[int, ...]]]:
    found = []
    for program in DIVERGENCES:
        try:
            with sw.sanitize():
                program()
            found.append(("", "", ()))
        except DivergenceError as error:
            found.append((error.kind, str(error), error.ranks))
    sw.manual_seed(0)  # for the tests after this one
    return found


@pytest.mark.processes
def test_a_divergence_is_the_same_error_on_all_ranks(workers):
    first, *others = workers.run(diverge)
    for other in others:
        assert other == first
    for (program, kind), (found, text, ranks) in zip(DIVERGENCES.items(), first, strict=True):
        assert found == kind, program.__name__
        assert BAD in ranks or kind in ("gradient", "layout"), program.__name__
        assert re.search(r"^  why: .*\n  fix: ", text, re.MULTILINE), program.__name__
        if program.__name__ != "drawn_alone":
            assert re.search(r"^  ranks? [\d, ]+: .* at .*divergences\.py:\d+ in ", text, re.MULTILINE), text
        if kind not in ("layout",):
            assert len(re.findall(r"^  ranks? [\d, ]+: ", text, re.MULTILINE)) >= 2, text


def run_right(names: list[str]) -> dict[str, tuple[object, object, int, int]]:
    found = {}
    for name in names:
        plain = RIGHT[name]()
        with sw.sanitize() as check:
            checked = RIGHT[name]()
        found[name] = (plain, checked, check.compared, check.comparisons)
    return found


@pytest.mark.processes
def test_right_programs_raise_nothing_and_give_the_same_numbers(workers):
    for found in workers.run(run_right, list(RIGHT)):
        for plain, checked, compared, comparisons in found.values():
            assert plain == checked
            assert compared > 0
            assert comparisons >= 1
        assert found["many ops"][3] >= 600 * 2 // ENTRIES


def sampled() -> tuple[list[int], str]:
    mesh = sw.init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
    x = sw.distribute_tensor(torch.ones(4), mesh, [Replicate()])
    counts = []
    with sw.sanitize(every=3) as check:
        for _ in range(6):
            x = x * 2
            check.step()
            counts.append(check.comparisons)
    if dist.get_rank() == 1:
        x._local_tensor[0] = 0
    try:
        with check:  # goes on with step 6, which is checked
            x + 1
    except DivergenceError as error:
        return counts, error.kind
    return counts, ""


@pytest.mark.processes
def test_every_so_many_steps_are_checked(workers):
    assert workers.run(sampled) == [([1, 1, 1, 2, 2, 2], "values")] * 4


def test_a_simulation_is_checked_as_well():
    with sw.simulate(4):
        mesh = sw.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        x = sw.distribute_tensor(torch.arange(8.0), mesh, [Replicate(), Shard(0)])
        with sw.sanitize() as check:
            x.exp().sum().item()
        assert check.compared > 0
        x.to_local().ranks[2][1] = 9.0
        with sw.sanitize(), pytest.raises(DivergenceError, match="A replicated tensor") as raised:
            x.exp()
        assert raised.value.ranks == (0, 2)
        assert "[0, 9, 2, 3]" in str(raised.value)


def test_gradients_of_a_simulation_have_the_placement_claimed():
    with sw.simulate(2):
        mesh = sw.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        w = sw.distribute_tensor(torch.ones(3), mesh, [Replicate()]).requires_grad_()
        scale = sw.per_rank(lambda rank: torch.tensor(float(rank + 1)))
        with sw.sanitize(), pytest.raises(DivergenceError, match="placement that to_local claims"):
            (w.to_local() * scale).sum().backward()
        with sw.sanitize():
            (w.to_local(grad_placements=[sw.Partial()]) * scale).sum().backward()


def test_a_block_of_another_shape_is_found_in_a_simulation():
    with sw.simulate(2):
        mesh = sw.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        x = sw.distribute_tensor(torch.ones(4), mesh, [Shard(0)])
        x._local_tensor = sw.PerRank({0: torch.ones(2), 1: torch.ones(3)})
        with sw.sanitize(), pytest.raises(DivergenceError, match="does not fit") as raised:
            x + 1
        assert raised.value.ranks == (1,)


def test_nothing_is_checked_outside_of_the_block():
    with sw.simulate(2):
        mesh = sw.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        with sw.sanitize() as check:
            pass
        block = sw.per_rank(lambda rank: torch.tensor([float(rank)]))
        assert isinstance(DTensor.from_local(block, mesh, [Replicate()]) + 1, DTensor)
        assert check.compared == 0


@pytest.mark.parametrize("every", [0, -1, 1.5])
def test_every_is_a_number_of_steps(every):
    with pytest.raises(ValueError, match="number of steps"):
        sw.sanitize(every=every)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.complex64, torch.int64])
@pytest.mark.parametrize("size", [1, 7, 4096, 40_000])
def test_a_fingerprint_depends_on_every_element(dtype, size):
    x = (torch.arange(size) % 2).to(dtype)
    for where in {0, size // 2, size - 1}:
        y = x.clone()
        y[where] = 1 - y[where].to(torch.complex64) if dtype.is_complex else 1 - y[where].long()
        assert fingerprint(x) == fingerprint(x.clone())
        assert fingerprint(x) != fingerprint(y)
        assert not fingerprint_on_device(x).equal(fingerprint_on_device(y))


def test_fingerprints_of_tensors_that_are_no_row_of_bytes():
    x = torch.randn(30, 40)
    assert fingerprint(x.t()) == fingerprint(x.t().contiguous())
    assert fingerprint(x.t(), (1, 0)) == fingerprint(x)
    z = torch.randn(5, dtype=torch.complex64)
    assert fingerprint(z.conj()) == fingerprint(z.conj().resolve_conj())
    assert fingerprint(-x) != fingerprint(x)
    assert fingerprint(torch.randn(200, 200).double()) != fingerprint(torch.randn(200, 200).double())
    sparse = torch.eye(3).to_sparse()
    assert fingerprint(sparse) != fingerprint(sparse * 2)
    assert fingerprint(torch.empty(0)) == 0
    assert fingerprint(torch._efficientzerotensor((3,))) == 0  # has no memory to read


def test_the_first_difference_counts():
    def row(*entries, problem=-1, seed=0):
        codes, values = [c for c, _ in entries], [v for _, v in entries]
        pad = [0] * (ENTRIES - len(entries))
        return [len(entries), problem, seed, 0, *codes, *pad, *values, *pad]

    coords = [(0, 0), (0, 1), (1, 0), (1, 1)]
    right = [row((1, 5), (2, 6 + c[1])) for c in coords]
    assert find_difference(right, coords, [(), (1,)]) is None
    assert find_difference(right, coords, [(), ()]) == (1, "values", 0, (1,))
    shorter = [row((1, 5)), *right[1:]]
    assert find_difference(shorter, coords, [(), (1,)]) == (1, "order", 0, (1, 2, 3))
    gone = [row((1, 0), (2, 6)), *right[1:]]
    assert find_difference(gone, coords, [(), (1,)]) is None
    assert find_difference([row((1, 5), problem=0)] * 4, coords, [()]) == (0, "layout", 0, ())
    assert find_difference([row(seed=r) for r in range(4)], coords, []) == (-1, "random", 0, (1, 2, 3))
