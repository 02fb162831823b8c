"""Every context restores the state around it: after normal exit, after exceptions, nested in any order."""

import contextlib

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import shardwise as sw
from shardwise.call.trace import trace_calls
from shardwise.comm import counting
from shardwise.debug import CommDebugMode
from shardwise.plan.settings import current_settings, override_settings
from shardwise.tensor.policy import implicit_replication

CONTEXTS = {
    "implicit error": lambda: sw.policy(implicit="error"),
    "implicit warn": lambda: sw.policy(implicit="warn"),
    "plain check": lambda: sw.policy(plain="check"),
    "both": lambda: sw.policy(implicit="allow", plain="replicate"),
    "implicit replication": implicit_replication,
    "costs": lambda: sw.costs(sw.CostModel(1.0, 1.0)),
    "other costs": lambda: sw.costs(sw.CostModel(2.0, 2.0)),
    "one device": sw.one_device,
    "trace": lambda: trace_calls(lambda call: None),
    "counting": counting,
    "comm mode": CommDebugMode,
    "fork_rng": sw.fork_rng,
}


class OutOfPlaceError(Exception):
    pass


def state():
    """What the contexts change, as a program can see it."""
    settings = current_settings()
    with sw.simulate(2):
        mesh = sw.init_device_mesh("cpu", (2,))
        x = sw.distribute_tensor(torch.ones(4), mesh, [sw.Shard(0)])
        try:
            refused = False
            x.cumsum(0)
        except sw.CommunicationError:
            refused = True
        try:
            plain = True
            x + torch.ones(4)
        except sw.PlainTensorError:
            plain = False
    decisions = settings.decisions
    return (
        settings.implicit,
        settings.plain,
        decisions.model,
        decisions.traced,
        refused,
        plain,
        sw.get_rng_state().tolist(),
    )


@pytest.mark.filterwarnings("ignore")
@given(st.lists(st.sampled_from(sorted(CONTEXTS)), max_size=5), st.integers(0, 5), st.booleans())
def test_contexts_restore_what_they_found(names, raise_at, seed_inside):
    seen = [state()]
    with contextlib.suppress(OutOfPlaceError), contextlib.ExitStack() as outer:
        for i, name in enumerate(names):
            before = state()
            with contextlib.suppress(OutOfPlaceError), CONTEXTS[name]():
                if i == raise_at:
                    raise OutOfPlaceError
            assert state() == before, name
            outer.enter_context(CONTEXTS[name]())
            seen.append(state())
        if raise_at > len(names):
            raise OutOfPlaceError
    assert state() == seen[0]


def test_a_context_that_ends_out_of_order_does_not_leak():
    """Generators may end contexts in another order than they began."""
    before = current_settings()

    def generator():
        with sw.policy(implicit="error"):
            yield

    g = generator()
    next(g)
    g.close()
    assert current_settings() is before


def test_a_thread_starts_with_the_default_settings_and_keeps_its_own():
    import threading

    seen = []

    def work():
        seen.append(current_settings().implicit)
        with sw.policy(implicit="warn"):
            seen.append(current_settings().implicit)

    with sw.policy(implicit="error"):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        seen.append(current_settings().implicit)
    assert seen == ["allow", "warn", "error"]


def test_what_is_not_given_stays():
    with (
        override_settings(implicit="error"),
        override_settings(plain="check"),
        sw.costs(sw.CostModel(3.0, 3.0)),
    ):
        settings = current_settings()
        assert (settings.implicit, settings.plain, settings.decisions.model.latency) == (
            "error",
            "check",
            3.0,
        )


def test_costs_takes_a_cost_model():
    with pytest.raises(TypeError, match=r"(?s)costs\(\) got 3\..*fix: "), sw.costs(3):
        pass
