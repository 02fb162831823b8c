"""Programs with sparse DTensors give the results of plain sparse tensors, in simulation and on real processes."""

import copy
import io
import logging
import pickle
import warnings

import pytest
import torch
import torch.nn.functional as nnf
from torch import Tensor

import shardwise as sw
from shardwise import DTensor, LayoutError, Partial, Replicate, Shard
from shardwise.call.trace import trace_calls
from shardwise.comm import block_of, counting
from shardwise.comm.sparse_parts import cut_sparse
from shardwise.layout import Axes, parse_layout
from shardwise.tensor.sparse_tensor import SparseDTensor

pytestmark = [
    pytest.mark.filterwarnings("ignore:Sparse"),
    pytest.mark.filterwarnings("ignore:.*Sparse CSR"),
    pytest.mark.filterwarnings("ignore:ComplexHalf"),
]

KINDS = {
    "coo": lambda t: t.to_sparse(),
    "csr": lambda t: t.to_sparse_csr(),
    "csc": lambda t: t.to_sparse_csc(),
    "bsr": lambda t: t.to_sparse_bsr((2, 2)),
    "bsc": lambda t: t.to_sparse_bsc((2, 2)),
    "hybrid": lambda t: t.to_sparse(1),
}


def matrix():
    return torch.tensor([[1.0, 0, 2, 0], [0, 0, 3, 4], [0, 0, 0, 0], [1, 0, 0, 5]])


def tall():
    return torch.arange(12.0).view(4, 3) - 5


def table():
    return torch.arange(40.0).view(10, 4) / 7


def is_sparse(x):
    return (x._local_tensor if isinstance(x, DTensor) else x).layout is not torch.strided


def grads(fn, *make):
    """A program: the result of a function and the gradients of its inputs."""

    def program(put):
        given = [put(m()).requires_grad_() for m in make]
        out = fn(*given)
        dense = out.to_dense() if is_sparse(out) else out
        (dense * dense).sum().backward()
        return [out, *(x.grad for x in given)]

    return program


def train(optimizer, lookup, **zero):
    """A program: an embedding table after some optimizer steps with sparse gradients."""

    def program(put):
        w = torch.nn.Parameter(put(table()))
        step = optimizer([w])
        index = put(torch.tensor([1, 3, 3, 9, 0, 1]))
        for _ in range(3):
            step.zero_grad(**zero)
            out = lookup(index, w)
            (out * out).sum().backward()
            step.step()
        return [w, w.grad]

    return program


def accumulate(put):
    w = put(table()).requires_grad_()
    for at in ([1, 3, 3, 9], [0, 1, 1]):
        nnf.embedding(put(torch.tensor(at)), w, sparse=True).pow(2).sum().backward()
    sparse = w.grad.clone()
    (w * w).sum().backward()
    return [sparse, sparse._nnz(), sparse.coalesce().values(), sparse.coalesce().indices(), w.grad]


def dense_gradient(put):
    given = [put(m).requires_grad_() for m in (matrix().to_sparse_csr(), tall(), tall().t().contiguous())]
    torch.sparse.sampled_addmm(*given, beta=2.0).sum().backward()
    return [x.grad for x in given]


def properties(put, make):
    x = put(make(matrix()))
    return [x._nnz(), x.sparse_dim(), x.dense_dim(), x.numel(), x.is_sparse, x.is_sparse_csr, tuple(x.shape)]


def components(put, kind):
    x = put(KINDS[kind](matrix()))
    if kind in ("coo", "hybrid"):
        return [x.coalesce().indices(), x.coalesce().values(), x._indices(), x._values(), x.is_coalesced()]
    if kind in ("csr", "bsr"):
        return [x.crow_indices(), x.col_indices(), x.values()]
    return [x.ccol_indices(), x.row_indices(), x.values()]


def write(name, *make, kind="coo"):
    """A program: a sparse tensor after an in-place method."""

    def program(put):
        x = put(KINDS[kind](tall() if name == "t_" else matrix()))
        getattr(x, name)(*(put(m()) if callable(m) else m for m in make))
        return [x, tuple(x.shape), x.to_dense() + 1]

    return program


def write_values(put):
    x = put(matrix().to_sparse())
    x._values().mul_(2)
    return x


def save_and_load(put):
    file = io.BytesIO()
    torch.save(put(matrix()).to_sparse_csr(), file)
    file.seek(0)
    return torch.load(file)


def transposed():
    return matrix().t().contiguous().to_sparse()


def indices():
    return torch.tensor([[0, 1, 1, 3], [2, 0, 0, 1]])


def four():
    return torch.tensor([1.0, 2, 3, 4])


def coo(put, *size, **more):
    return torch.sparse_coo_tensor(put(indices()), put(four()), *size, **more)


def invalid(put):
    try:
        coo(put, (2, 2), check_invariants=True)
    except RuntimeError:
        return "out of range"
    return "no error"


def without_derivative(put):
    out = torch.smm(put(matrix().to_sparse()).requires_grad_(), put(tall()))
    try:
        out.to_dense().sum().backward()
    except RuntimeError:
        return [out, "no derivative"]
    return [out]


PROGRAMS = {
    **{f"to {kind}": grads(make, matrix) for kind, make in KINDS.items()},
    **{f"from {kind}": grads(lambda x: x.to_dense(), lambda k=kind: KINDS[k](matrix())) for kind in ("coo", "csr", "hybrid")},
    **{f"from {kind} without gradients": lambda put, m=make: put(m(matrix())).to_dense() for kind, make in KINDS.items()},
    **{f"properties of {kind}": lambda put, m=make: properties(put, m) for kind, make in KINDS.items()},
    **{f"components of {kind}": lambda put, k=kind: components(put, k) for kind in KINDS},
    **{f"copies of {kind}": lambda put, m=make: [
        put(m(matrix())).clone(), put(m(matrix())).detach(), torch.zeros_like(put(m(matrix()))),
        pickle.loads(pickle.dumps(put(m(matrix())))),
    ] for kind, make in KINDS.items()},
    "deep copies": lambda put: copy.deepcopy(put(matrix().to_sparse())),
    "saved": save_and_load,
    "a scalar": lambda put: put(torch.tensor(3.0)).to_sparse(),
    "no elements": lambda put: put(torch.zeros(3, 3)).to_sparse().coalesce().to_dense(),
    "by layout": lambda put: torch.zeros_like(put(matrix()), layout=torch.sparse_coo),
    "coo_tensor": lambda put: coo(put, (4, 5)).coalesce(),
    "coo_tensor without a size": coo,
    "coo_tensor, checked": lambda put: coo(put, (4, 4), check_invariants=True),
    "coo_tensor with an index out of range": invalid,
    "gradient of coo_tensor": grads(lambda x: torch.sparse_coo_tensor(_like(x, indices()), x, (4, 4)).coalesce(), four),
    "csr_tensor": lambda put: torch.sparse_csr_tensor(
        put(torch.tensor([0, 2, 3])), put(torch.tensor([0, 1, 1])), put(four()[:3]), (2, 2)
    ),
    "mm": grads(torch.sparse.mm, lambda: matrix().to_sparse(), tall),
    "mm of csr": grads(torch.sparse.mm, lambda: matrix().to_sparse_csr(), tall),
    "mm with csr": lambda put: put(tall()).t() @ put(matrix().to_sparse_csr()),
    "mm of two": grads(torch.sparse.mm, lambda: matrix().to_sparse(), transposed),
    "mm by amax": grads(lambda x, y: torch.sparse.mm(x, y, "amax"), lambda: matrix().to_sparse_csr(), tall),
    "mv": lambda put: put(matrix().to_sparse()) @ put(four()),
    "addmm": grads(torch.sparse.addmm, tall, lambda: matrix().to_sparse(), tall),
    "sampled_addmm": grads(
        torch.sparse.sampled_addmm, lambda: matrix().to_sparse_csr(), tall, lambda: tall().t().contiguous()
    ),
    "dense gradient of a sparse tensor": dense_gradient,
    "smm": lambda put: torch.smm(put(matrix().to_sparse()), put(tall())),
    "smm has no derivative": without_derivative,
    "sspaddmm": lambda put: torch.sspaddmm(put(tall().to_sparse()), put(matrix().to_sparse()), put(tall())),
    "mm with out=": lambda put: torch.mm(
        put(matrix().to_sparse_csr()), put(tall()), out=put(torch.zeros(4, 3))
    ),
    "linear": grads(nnf.linear, lambda: tall().t().contiguous(), lambda: matrix().to_sparse()),
    "sum": grads(lambda x: torch.sparse.sum(x, dim=0), lambda: matrix().to_sparse()),
    "softmax": grads(lambda x: torch.sparse.softmax(x, 1), lambda: matrix().to_sparse()),
    "add": grads(lambda x, y: x + y, lambda: matrix().to_sparse(), transposed),
    "add to dense": grads(lambda x, y: x + y, matrix, transposed),
    "subtract from dense": lambda put: put(matrix()) - put(transposed()),
    "add_ to dense": lambda put: put(matrix()).add_(put(transposed()), alpha=3),
    "add hybrid to dense": lambda put: put(matrix()) + put(matrix().to_sparse(1)),
    "mul": grads(lambda x, y: x * y, lambda: matrix().to_sparse(), transposed),
    "a mask": grads(lambda x, y: x.sparse_mask(y), matrix, transposed),
    "a hybrid mask": lambda put: (put(matrix()) + 1).sparse_mask(put(matrix().to_sparse(1))),
    "a mask of csr": lambda put: (put(matrix()) + 1).sparse_mask(put(matrix().to_sparse_csr())),
    "an uncoalesced mask": lambda put: put(matrix()).sparse_mask(coo(put, (4, 4)).coalesce()),
    "pointwise": lambda put: [f(put(matrix().to_sparse())) for f in (torch.neg, torch.sin, torch.relu, torch.sqrt)],
    "pointwise csr": lambda put: put(matrix().to_sparse_csr()).sin(),
    "rows": lambda put: [row.to_dense() for row in put(matrix().to_sparse())],
    "cat": lambda put: torch.cat([put(matrix().to_sparse()), put(transposed())]),
    "another dtype": lambda put: [put(matrix().to_sparse()).double(), put(matrix().to_sparse_csr()).half()],
    "complex": lambda put: put(torch.complex(matrix(), matrix()).to_sparse()).conj().to_dense(),
    "item": lambda put: put(matrix().to_sparse()).sum().item(),
    "values": grads(lambda x: x.coalesce().values(), lambda: matrix().to_sparse()),
    "in place": lambda put: [
        write("mul_", 3)(put), write("zero_")(put), write("add_", transposed)(put), write("copy_", transposed)(put),
        write("sin_", kind="csr")(put),
    ],
    "transposed in place": write("t_"),
    "resized": write("sparse_resize_", (5, 6), 2, 0),
    "values in place": write_values,
    "second derivative": lambda put: _hessian(put(matrix()).requires_grad_()),
    "in inference mode": torch.inference_mode()(lambda put: put(matrix()).to_sparse().to_dense() @ put(tall())),
    "accumulated gradients": accumulate,
    "gather": grads(lambda x: torch.gather(x, 0, _like(x, torch.tensor([[0, 1, 1, 3]])), sparse_grad=True), matrix),
    "SGD": train(lambda p: torch.optim.SGD(p, lr=0.1), lambda i, w: nnf.embedding(i, w, sparse=True)),
    "SGD on bags": train(
        lambda p: torch.optim.SGD(p, lr=0.1),
        lambda i, w: nnf.embedding_bag(i.view(2, 3), w, sparse=True, mode="sum"),
        set_to_none=False,
    ),
    "SGD with momentum": train(
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), lambda i, w: nnf.embedding(i, w, sparse=True)
    ),
    "SGD on lists": train(
        lambda p: torch.optim.SGD(p, lr=0.1, foreach=True), lambda i, w: nnf.embedding(i, w, sparse=True)
    ),
    "SparseAdam": train(
        lambda p: torch.optim.SparseAdam(p, lr=0.1), lambda i, w: nnf.embedding(i, w, sparse=True, padding_idx=1)
    ),
    "Adagrad": train(lambda p: torch.optim.Adagrad(p, lr=0.1), lambda i, w: nnf.embedding(i, w, sparse=True)),
}  # fmt: skip


def _like(x, t):
    return sw.distribute_tensor(t, x.device_mesh, src_data_rank=None) if isinstance(x, DTensor) else t


def _hessian(x):
    (first,) = torch.autograd.grad(torch.sparse.mm(x.to_sparse(), x).pow(3).sum(), x, create_graph=True)
    return torch.autograd.grad(first.sum(), x)[0]


def flat(value):
    return [x for v in value for x in flat(v)] if isinstance(value, list | tuple) else [value]


LAYOUTS = {
    "R": [Replicate()],
    "0": [Shard(0)],
    "1": [Shard(1)],
    "0 1": [Shard(0), Shard(1)],
    "0 0": [Shard(0)] * 2,
}


def putter(mesh, placements):
    def put(t):
        fits = t.layout is torch.strided and all(not p.is_shard() or p.dim < t.dim() for p in placements)
        return sw.distribute_tensor(t.clone(), mesh, placements if fits else [Replicate()] * mesh.ndim)

    return put


def full(x):
    """The full value of a result, which must be the same on all ranks."""
    x = x.detach().full_tensor() if isinstance(x, DTensor) else x
    if not isinstance(x, sw.PerRank):
        return x.detach() if isinstance(x, Tensor) else x
    first, *others = x.ranks
    for other in others:
        torch.testing.assert_close(other, first, rtol=0, atol=0, equal_nan=True)
    return first


def assert_same(got, want):
    got, want = flat(got), flat(want)
    assert len(got) == len(want)
    for g, w in zip(got, want, strict=True):
        if not isinstance(w, Tensor):
            assert g == w
            continue
        assert (g.layout, g.dtype, g.shape) == (w.layout, w.dtype, w.shape)
        if w.layout is torch.sparse_coo:
            assert g.sparse_dim() == w.sparse_dim()
            assert g.is_coalesced() or not w.is_coalesced()  # torch loses it where it steals a gradient
        torch.testing.assert_close(g, w, equal_nan=True)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_equals_the_one_on_plain_tensors(name, layout, caplog):
    caplog.set_level(logging.ERROR, logger="shardwise")
    want = PROGRAMS[name](lambda t: t.clone())
    placements = LAYOUTS[layout]
    with sw.simulate(3 if len(placements) == 1 else 4):
        shape = (3,) if len(placements) == 1 else (2, 2)
        mesh = sw.init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp")[: len(shape)])
        got = PROGRAMS[name](putter(mesh, placements))
        assert_same([full(x) for x in flat(got)], want)
        assert all(isinstance(x, DTensor) for x in flat(got) if isinstance(x, Tensor))
        for x in flat(got):
            if isinstance(x, DTensor):
                assert x._local_tensor.ranks[0].dim() == x.dim()
                assert isinstance(x, SparseDTensor) == is_sparse(x)


def failures(layout):
    """The programs that fail on real processes, by name."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.getLogger("shardwise").setLevel(logging.ERROR)
    placements = LAYOUTS[layout]
    mesh = sw.init_device_mesh("cpu", (4,) if len(placements) == 1 else (2, 2))
    wrong = {}
    for name, program in PROGRAMS.items():
        try:
            assert_same(
                [full(x) for x in flat(program(putter(mesh, placements)))], program(lambda t: t.clone())
            )
        except Exception as error:
            wrong[name] = repr(error)[:300]
    return wrong


@pytest.mark.processes
@pytest.mark.parametrize("layout", ["0", "0 1"])
def test_programs_on_real_processes(workers, layout):
    assert workers.run(failures, layout) == [{}] * 4


def distribute_from(kind, source):
    """Distribute a sparse tensor whose other ranks have fewer elements than the source."""
    warnings.simplefilter("ignore")
    mesh = sw.init_device_mesh("cpu", (2, 2))
    mine = matrix() if torch.distributed.get_rank() == source * 3 else torch.zeros(4, 4)
    x = sw.distribute_tensor(KINDS[kind](mine), mesh, [Replicate()] * 2, src_data_rank=source)
    own = sw.distribute_tensor(KINDS[kind](matrix()), mesh, src_data_rank=None)
    y = DTensor.from_local(KINDS[kind](matrix()), mesh, run_check=True)
    try:
        DTensor.from_local(KINDS[kind](mine), mesh, run_check=True)
    except LayoutError as error:
        message = str(error)
    return [x.to_local(), own.full_tensor(), y.full_tensor()], message


@pytest.mark.processes
@pytest.mark.parametrize("source", [0, 1])
@pytest.mark.parametrize("kind", KINDS)
def test_the_tensor_of_the_source_is_distributed(workers, kind, source):
    for got, message in workers.run(distribute_from, kind, source):
        assert_same(got, [KINDS[kind](matrix())] * 3)
        assert "differs from the one at" in message


def test_the_tensor_of_the_source_is_distributed_in_simulation():
    with sw.simulate(2):
        mesh = sw.init_device_mesh("cpu", (2,))
        mine = sw.PerRank({0: torch.eye(3).to_sparse(), 1: torch.ones(3, 3).to_sparse()})
        for source in (0, 1):
            x = sw.distribute_tensor(mine, mesh, [Replicate()], src_data_rank=source)
            assert_same(full(x), mine.of_rank(source))
        with pytest.raises(LayoutError, match="differs from the one at"):
            DTensor.from_local(mine, mesh, [Replicate()], run_check=True)


def off_the_mesh():
    """A program on a mesh without ranks 2 and 3."""
    warnings.simplefilter("ignore")
    mesh = sw.DeviceMesh("cpu", [0, 1])
    x = sw.distribute_tensor(matrix().to_sparse(), mesh, [Replicate()])
    y = sw.distribute_tensor(tall(), mesh, [Shard(0)])
    out = torch.sparse.mm(x, y)
    w = sw.distribute_tensor(table(), mesh, [Shard(0)]).requires_grad_()
    nnf.embedding(sw.distribute_tensor(torch.tensor([1, 1, 9]), mesh), w, sparse=True).sum().backward()
    sparse = y.to_sparse()
    shown = [(type(t).__name__, tuple(t.shape)) for t in (out, w.grad, sparse, sparse * 2)]
    try:
        sparse._nnz()
    except LayoutError as error:
        return shown, str(error)
    return shown, [t.full_tensor() for t in (out, w.grad.to_dense(), (sparse * 2).to_dense())]


@pytest.mark.processes
def test_ranks_off_the_mesh_run_the_same_program(workers):
    want = [
        matrix() @ tall(),
        torch.zeros(10, 4).index_add(0, torch.tensor([1, 1, 9]), torch.ones(3, 4)),
        tall() * 2,
    ]
    for rank, (shown, got) in enumerate(workers.run(off_the_mesh)):
        assert shown == [
            ("DTensor", (4, 3)),
            ("SparseDTensor", (10, 4)),
            ("SparseDTensor", (4, 3)),
            ("SparseDTensor", (4, 3)),
        ]
        if rank < 2:
            assert_same(got, want)
        else:
            assert "not on the mesh" in got


@pytest.fixture
def mesh():
    with sw.simulate(4):
        yield sw.init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))


def test_a_sparse_tensor_must_be_replicated(mesh):
    x = sw.distribute_tensor(matrix(), mesh, [Shard(0)]).to_sparse_csr()
    assert x.placements == (Replicate(),)
    assert str(x.sharding) == "[4, 4]"
    assert x.redistribute(tp=Replicate()).to_local().ranks[3].layout is torch.sparse_csr
    for placement in (Shard(0), Partial()):
        with pytest.raises(LayoutError, match=r"(?s)sparse.*why: .*fix: .*to_dense"):
            x.redistribute(tp=placement)
        with pytest.raises(LayoutError, match=r"(?s)sparse.*why: .*fix: .*to_dense"):
            DTensor.from_local(matrix().to_sparse(), mesh, [placement])
        with pytest.raises(LayoutError, match=r"(?s)sparse.*why: .*fix: .*to_dense"):
            sw.distribute_tensor(matrix().to_sparse(), mesh, [placement])


def test_a_plain_sparse_tensor_beside_a_dtensor_is_an_error(mesh):
    y = sw.distribute_tensor(tall(), mesh, [Shard(0)])
    plain = matrix().to_sparse()
    with pytest.raises(LayoutError, match="mixed"):
        torch.sparse.mm(plain, y)
    with sw.policy(plain="replicate"):
        assert_same(full(torch.sparse.mm(plain, y)), matrix() @ tall())
        assert_same(full(torch.sparse.mm(matrix().to_sparse_csr(), y)), matrix() @ tall())


def test_adding_to_a_split_tensor_sends_nothing(mesh):
    w = sw.distribute_tensor(table(), mesh, [Shard(0)])
    x = sw.distribute_tensor(table().to_sparse(1), mesh)
    routes = []
    with counting() as ledger, trace_calls(lambda call: routes.append(call.route)):
        w.add_(x, alpha=-1)
    assert ledger.bytes == 0
    assert routes == ["sparse"]
    assert not w.full_tensor().ranks[0].any()


@pytest.mark.parametrize("kind", ["coo", "csr", "csc"])
def test_a_product_keeps_the_split_of_its_result(mesh, kind):
    a = sw.distribute_tensor(KINDS[kind](matrix()), mesh)
    for x, y in (
        (a, sw.distribute_tensor(tall(), mesh, [Shard(1)])),
        (sw.distribute_tensor(tall().t(), mesh, [Shard(0)]), a),
    ):
        with counting() as ledger:
            got = x @ y
        assert ledger.bytes == 0
        assert str(got.sharding) == ("[4, 3:tp]" if x is a else "[3:tp, 4]")
        assert_same(full(got), matrix() @ tall() if x is a else tall().t() @ matrix())
    y = sw.distribute_tensor(tall(), mesh, [Shard(1)])
    with counting() as ledger:
        got = torch.sparse.mm(a, y)
    assert ledger.bytes == 0
    assert_same(full(got), matrix() @ tall())


def test_a_mask_sends_only_the_selected_values(mesh):
    w = sw.distribute_tensor(table(), mesh, [Shard(0)])
    mask = sw.distribute_tensor(torch.eye(10, 4).to_sparse(1), mesh)
    nnz = mask._nnz()
    with counting() as ledger:
        got = w.sparse_mask(mask)
    assert 0 < ledger.bytes <= 2 * nnz * 4 * 4 * 4
    assert_same(full(got), table().sparse_mask(torch.eye(10, 4).to_sparse(1)))


@pytest.mark.parametrize("text", ["[10:tp, 4]", "[10, 4:tp]", "[2 5:tp, 4]", "[5 2:tp, 4]", "[10, 2 2:tp]"])
def test_blocks_of_a_sparse_tensor_are_those_of_the_dense_one(text):
    layout = parse_layout(text, Axes((3,), ("tp",)))[0]
    for dims in (1, 2):
        sparse = table().to_sparse(dims)
        for coord in range(3):
            got = cut_sparse(sparse, layout, (coord,))
            assert torch.equal(got.to_dense(), block_of(table(), layout, (coord,)))


@pytest.mark.parametrize("layout", ["R", "0", "1"])
def test_a_sparse_gradient_of_a_redistributed_weight_and_of_local_blocks(layout):
    at = torch.tensor([1, 3, 3])
    dense = table().requires_grad_()
    nnf.embedding(at, dense, sparse=True).pow(2).sum().backward()
    want = dense.grad.to_dense()
    with sw.simulate(2):
        mesh = sw.init_device_mesh("cpu", (2,))
        w = sw.distribute_tensor(table(), mesh, LAYOUTS[layout]).requires_grad_()
        index = sw.distribute_tensor(at, mesh)
        nnf.embedding(index, w.redistribute(placements=[Replicate()]), sparse=True).pow(2).sum().backward()
        assert_same(full(w.grad).to_dense(), want)
        moved = w.redistribute(placements=[Replicate()])
        out = nnf.embedding(index, moved, sparse=True).pow(2).sum()
        assert_same(full(torch.autograd.grad(out, w, create_graph=True)[0]).to_dense(), want)
        blocks = sw.distribute_tensor(table(), mesh, LAYOUTS[layout]).to_local().detach()
        blocks = sw.PerRank({r: b.clone().requires_grad_() for r, b in blocks._blocks.items()})
        w = DTensor.from_local(blocks, mesh, LAYOUTS[layout])
        nnf.embedding(index, w, sparse=True).pow(2).sum().backward()
        grad = DTensor.from_local(blocks.grad, mesh, LAYOUTS[layout])
        assert_same(full(grad).to_dense(), want)


def test_a_local_lookup_with_a_sparse_gradient():
    for placement in (Replicate(), Shard(1)):
        with sw.simulate(2):
            w = sw.distribute_tensor(table(), sw.init_device_mesh("cpu", (2,)), [placement]).requires_grad_()
            nnf.embedding(torch.tensor([1, 1]), w.to_local(), sparse=True).sum().backward()
            grad = full(w.grad)
            assert (grad.layout is torch.sparse_coo) == (placement == Replicate())
            assert grad.to_dense()[1].tolist() == [2] * 4


def test_dense_and_sparse_calls_have_different_routes(mesh):
    """The same op, shape and dtype alternate: the key of a route contains the spec."""
    dense = sw.distribute_tensor(matrix(), mesh)
    for _ in range(2):
        assert type(dense * dense) is DTensor
        assert type(dense.to_sparse() * dense.to_sparse()) is SparseDTensor
        assert type(dense.to_sparse_csr().sin()) is SparseDTensor
        assert type(dense.sin()) is DTensor
