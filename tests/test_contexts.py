"""Every context restores the outer state: after a normal exit, after exceptions, and nested in any order."""

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


class ContextError(Exception):
    pass


def state():
    """Everything that the contexts change."""
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
def test_contexts_restore_the_outer_state(names, raise_at, seed_inside):
    seen = [state()]
    with contextlib.suppress(ContextError), contextlib.ExitStack() as outer:
        for i, name in enumerate(names):
            before = state()
            with contextlib.suppress(ContextError), CONTEXTS[name]():
                if seed_inside and name == "fork_rng":
                    sw.manual_seed(7 + i)
                if i == raise_at:
                    raise ContextError
            assert state() == before, name
            outer.enter_context(CONTEXTS[name]())
            seen.append(state())
        if raise_at > len(names):
            raise ContextError
    assert state() == seen[0]


def test_a_context_in_a_generator_that_is_closed_does_not_leak():
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


def test_nested_overrides_keep_the_settings_that_are_not_given():
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


def test_costs_of_something_else_than_a_cost_model_is_an_error():
    with pytest.raises(TypeError, match=r"(?s)costs\(\) got 3\..*fix: "), sw.costs(3):
        pass
