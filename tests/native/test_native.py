"""The extension runs direct calls, and nothing else: results, errors and state are those of Python."""

import gc
import shutil
import threading

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import shardwise as sw
from shardwise.call.writes import watched
from shardwise.compile import fake_mesh
from shardwise.debug import CommDebugMode
from shardwise.plan.settings import forget_decisions
from shardwise.tensor.inference import inference_tensors

pytestmark = pytest.mark.skipif(
    shutil.which("g++") is None, reason="the extension is compiled when it is used"
)


@pytest.fixture(scope="module")
def native():
    native = pytest.importorskip("shardwise.native", reason="torch.utils.cpp_extension needs setuptools")
    was_enabled = native.is_enabled()
    native.enable()
    yield native
    if not was_enabled:
        native.disable()


@pytest.fixture(autouse=True)
def _as_in_a_new_process():
    """Without moved views and inference tensors of other tests, beside which the extension does not take part."""
    gc.collect()
    views, tensors = dict(watched), set(inference_tensors)
    watched.clear()
    inference_tensors.clear()
    yield
    watched.update({key: memory for key, memory in views.items() if memory() is not None})
    inference_tensors.update(tensors)


@pytest.fixture
def mesh(native):
    with fake_mesh((4,), ("tp",)) as mesh:
        yield mesh


def split(mesh, *shape, dim=0):
    return sw.DTensor.from_local(torch.randn(shape), mesh, [sw.Shard(dim)])


def calls_of(native, run):
    """The result of the third of three calls, and how many ops of it the extension ran."""
    run(), run()
    before = native.number_of_calls()
    return run(), native.number_of_calls() - before


DIRECT = {
    "add": lambda x, y: x + y,
    "scaled": lambda x, y: torch.add(x, y, alpha=0.5),
    "number": lambda x, y: x * 2.5,
    "whole number": lambda x, y: x * 2,
    "text": lambda x, y: torch.nn.functional.gelu(x, approximate="tanh"),
    "view": lambda x, y: x.view(-1),
    "transposed": lambda x, y: x.t(),
    "unsqueezed": lambda x, y: x.unsqueeze(0),
    "slice": lambda x, y: x[:, 1:3],
    "cast": lambda x, y: x.double(),
    "sum": lambda x, y: x.sum(1, keepdim=True),
    "softmax": lambda x, y: x.softmax(1),
    "like": lambda x, y: torch.zeros_like(x),
    "several": lambda x, y: x.max(1),
    "list of results": lambda x, y: x.split(2, 1),
    "list of operands": lambda x, y: torch.cat([x, y], 1),
    "where": lambda x, y: torch.where(x > 0, x, y),
    "norm": lambda x, y: torch.nn.functional.layer_norm(x, (6,)),
}


@pytest.mark.parametrize("name", DIRECT)
def test_direct_calls_have_the_results_of_python(name, mesh, native):
    torch.manual_seed(0)
    x, y = split(mesh, 4, 6), split(mesh, 4, 6)
    found, count = calls_of(native, lambda: DIRECT[name](x, y))
    assert count > 0
    native.disable()
    expected = DIRECT[name](x, y)
    native.enable()
    leaves = found if isinstance(found, tuple) else (found,)
    for a, b in zip(leaves, expected if isinstance(expected, tuple) else (expected,), strict=True):
        assert type(a) is sw.DTensor
        assert a._spec is b._spec
        assert torch.equal(a.to_local(), b.to_local())


def test_writes_return_their_target_and_count(mesh, native):
    x, y = split(mesh, 4, 6), split(mesh, 4, 6)
    expected = x.to_local() + 3 * y.to_local()
    before = x._version
    out, count = calls_of(native, lambda: x.add_(y))
    assert out is x
    assert count == 1
    assert x._version == before + 3
    torch.testing.assert_close(x.to_local(), expected)


def test_gradients(mesh, native):
    w, x = split(mesh, 4, 6).requires_grad_(), split(mesh, 4, 6)

    def step():
        w.grad = None
        (w * x).tanh().sum(1).backward(torch.ones_like(x.sum(1)))
        return w.grad

    grad, count = calls_of(native, step)
    assert count > 4
    local = w.detach().to_local().requires_grad_()
    (local * x.to_local()).tanh().sum().backward()
    torch.testing.assert_close(grad.to_local(), local.grad)


def test_a_view_that_strides_do_not_allow_is_left_to_python(mesh, native):
    x = split(mesh, 4, 6)
    out, _ = calls_of(native, lambda: x.view(-1))
    assert out.shape == (96,)
    with pytest.raises(RuntimeError, match="view"):
        x.t().view(-1)
    assert x.t().reshape(-1).shape == (96,)


def test_errors_are_those_of_python(mesh, native):
    x, y = split(mesh, 4, 6), split(mesh, 4, 5)
    messages = []
    for enabled in (True, False):
        native.enable() if enabled else native.disable()
        for _ in range(3):
            with pytest.raises(RuntimeError) as caught:
                x + y
            messages.append(str(caught.value))
    native.enable()
    assert len(set(messages)) == 1
    with pytest.raises(sw.PlainTensorError):
        x + torch.ones(16, 6)


def test_modes_see_every_op(mesh, native):
    class Names(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.names = []

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.names.append(str(func))
            return func(*args, **(kwargs or {}))

    x = split(mesh, 4, 6)
    x + x, x + x
    with Names() as mode:
        x + x
    assert mode.names == ["aten.add.Tensor"]
    with CommDebugMode() as comm:
        x.sum().full_tensor()
    assert comm.get_total_counts() == 1


def test_policies_and_inference_mode_are_python(mesh, native):
    x = split(mesh, 4, 6)
    x + x, x + x
    before = native.number_of_calls()
    with sw.policy(implicit="error"):
        x + x
    with torch.inference_mode():
        assert (x + x).is_inference()
    assert native.number_of_calls() == before


def test_decisions_that_are_dropped_are_made_anew(mesh, native):
    x = split(mesh, 4, 6)
    _, count = calls_of(native, lambda: x + x)
    assert count == 1
    forget_decisions()
    before = native.number_of_calls()
    x + x
    assert native.number_of_calls() == before
    _, count = calls_of(native, lambda: x + x)
    assert count == 1


def test_specs_stay_theirs(mesh, native):
    """Layouts that are created and dropped do not get the recipes of others at the same address."""
    for size in range(1, 200):
        x = sw.DTensor.from_local(torch.ones(size, 2), mesh, [sw.Shard(0)])
        for _ in range(3):
            out = x * 2.0
            assert out.shape == (4 * size, 2)
        del x, out
        if size % 50 == 0:
            gc.collect()


def test_threads(mesh, native):
    x, failures = split(mesh, 4, 6), []
    expected = (x + x).to_local()

    def work():
        for _ in range(300):
            if not torch.equal((x + x).to_local(), expected):
                failures.append(1)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for t in threads:
        t.start()
    for _ in range(20):
        forget_decisions()
    for t in threads:
        t.join()
    assert failures == []


def test_simulated_ranks_are_python(native):
    with sw.simulate(2):
        mesh = sw.init_device_mesh("cpu", (2,))
        x = sw.distribute_tensor(torch.arange(6.0), mesh, [sw.Shard(0)])
        before = native.number_of_calls()
        for _ in range(3):
            y = x + x
        assert native.number_of_calls() == before
        assert y.full_tensor().ranks[1].tolist() == [0, 2, 4, 6, 8, 10]
