"""The cost model: what a step costs, and that its figures decide which plan is taken."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.strategies import axes, layouts, shapes

from shardwise.layout import Axes, parse_layout
from shardwise.plan import AllGather, CostModel, Slice, plan_redistribute

ON = Axes((2, 2), ("dp", "tp"))
BY_COUNT = CostModel(latency=1.0, bandwidth=1e30)
BY_BYTES = CostModel(latency=0.0, bandwidth=1.0)


def layout(text, on=ON):
    return parse_layout(text, on)[0]


def plan(source, target, model, on=ON):
    return plan_redistribute(layout(source, on), layout(target, on), 4, model)


def steps_of(plan):
    return [(step.name, plan.source.axes.names_of(step.axes)) for step in plan.steps]


def seconds(plan, model):
    return sum(model.seconds(step, plan.itemsize) for step in plan.steps)


def test_a_single_number_applies_to_every_axis():
    assert CostModel(1e-5, 1e9).pace(ON, (0, 1)) == (1e-5, 1e9)
    assert CostModel(1, 2).pace(ON, (1,)) == (1, 2)


def test_a_step_over_several_axes_is_as_slow_as_the_slowest():
    model = CostModel(latency=(3.0, 1.0, 2.0), bandwidth={"a": 10.0, "b": 30.0, "c": 20.0})
    on = Axes((2, 2, 2), ("a", "b", "c"))
    assert [model.pace(on, (a,)) for a in range(3)] == [(3.0, 10.0), (1.0, 30.0), (2.0, 20.0)]
    assert model.pace(on, (1, 2)) == (2.0, 20.0)
    assert model.pace(on, (0, 1, 2)) == (3.0, 10.0)


def test_an_axis_without_a_number_is_as_slow_as_the_slowest():
    model = CostModel(latency=(3.0, 1.0), bandwidth={"dp": 10.0, "tp": 30.0})
    on = Axes((2, 2, 2), ("tp", "dp", "cp"))
    assert [model.pace(on, (a,)) for a in range(3)] == [(3.0, 30.0), (1.0, 10.0), (3.0, 10.0)]


@pytest.mark.parametrize(
    "figures", [{"latency": -1.0}, {"bandwidth": 0.0}, {"latency": ()}, {"bandwidth": {"a": -1.0}}]
)
def test_invalid_numbers_are_refused(figures):
    with pytest.raises(ValueError, match=r"(?s)CostModel got.*why.*fix"):
        CostModel(**figures)


def test_the_seconds_of_a_step_are_latency_plus_mean_bytes_per_rank():
    gather = AllGather(layout("[8:dp, 6]"), layout("[8, 6]"), (0,))
    assert gather.elements == 4 * 24  # each of four ranks receives the other half
    model = CostModel(latency=(0.5, 9.0), bandwidth=(12.0, 9.0))
    assert model.seconds(gather, itemsize=2) == 0.5 + 24 * 2 / 12.0


def test_local_steps_are_free():
    assert CostModel(1.0, 1.0).seconds(Slice(layout("[8]"), layout("[8:dp]")), 4) == 0.0


def test_models_are_values():
    assert CostModel((1.0, 2.0), 3.0) == CostModel((1.0, 2.0), 3.0)
    assert hash(CostModel()) == hash(CostModel())
    with pytest.raises(AttributeError):
        CostModel().latency = 1.0


def test_latency_favours_merged_collectives_and_bandwidth_separate_ones():
    # each rank sends 3/4 of the tensor over both axes at once or one after the other: the model decides
    merged = [("reduce-scatter", ("dp", "tp"))]
    assert steps_of(plan("[64, 64] P(dp,sum) P(tp,sum)", "[64:dp, 64:tp]", BY_COUNT)) == merged
    slow_dp = CostModel(latency=0.0, bandwidth=(1.0, 1e6))
    assert steps_of(plan("[64, 64] P(dp,sum) P(tp,sum)", "[64:dp, 64:tp]", slow_dp)) == [
        ("reduce-scatter", ("tp",)),
        ("reduce-scatter", ("dp",)),
    ]
    slow_tp = CostModel(latency=0.0, bandwidth=(1e6, 1.0))
    assert steps_of(plan("[64, 64] P(dp,sum) P(tp,sum)", "[64:dp, 64:tp]", slow_tp)) == [
        ("reduce-scatter", ("dp",)),
        ("reduce-scatter", ("tp",)),
    ]


def test_the_plan_depends_on_the_size_of_the_tensor():
    model = CostModel(latency=1e-5, bandwidth=(1e8, 1e11))
    small = plan("[16, 16] P(dp,sum) P(tp,sum)", "[16:dp, 16:tp]", model)
    large = plan("[4096, 4096] P(dp,sum) P(tp,sum)", "[4096:dp, 4096:tp]", model)
    assert (small.collectives, large.collectives) == (1, 2)


@given(st.data())
def test_no_plan_for_another_model_is_cheaper(data):
    on, shape = data.draw(axes(max_count=16)), data.draw(shapes(max_dims=3, max_size=512))
    # plain layouts: their plans need no more memory than source and target, which is a constraint of the search
    source, target = (data.draw(layouts(on, shape, plain=True)) for _ in range(2))
    figure = st.sampled_from([1e-6, 1e-4, 1e-2])
    each = st.tuples(*[figure] * len(on))
    model = CostModel(data.draw(figure | each), 1 / data.draw(st.sampled_from([1e-6, 1e-9])))
    ours = plan_redistribute(source, target, 4, model)
    for other in (BY_COUNT, BY_BYTES, CostModel()):
        theirs = plan_redistribute(source, target, 4, other)
        assert seconds(ours, model) <= seconds(theirs, model) * (1 + 1e-9)
