"""Figures of served requests keep their identities, and are what their formulas say."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider import InputError
from outrider.bench.side_by_side import metrics
from outrider.bench.side_by_side.metrics import Objectives
from outrider.bench.side_by_side.served import Served, ServedStep


def served(*steps: tuple[int, int], arrived: float = 0.0, every: float = 1.0) -> Served:
    """A request whose steps drafted and accepted so many tokens, one step every so many seconds."""
    made = tuple(
        ServedStep(drafted=drafted, accepted=accepted, emitted=accepted + 1, at=arrived + every * (i + 1))
        for i, (drafted, accepted) in enumerate(steps)
    )
    tokens = sum(step.emitted for step in made)
    return Served(
        id="a",
        conversation="a",
        category="",
        turn=0,
        prompt_tokens=3,
        num_tokens=tokens,
        arrived=arrived,
        first=made[0].at,
        ended=made[-1].at,
        steps=made,
    )


steps = st.integers(0, 5).flatmap(lambda drafted: st.tuples(st.just(drafted), st.integers(0, drafted)))
drafts = st.lists(st.lists(steps, min_size=1, max_size=8), min_size=1, max_size=5)
"""Of some requests, what each step drafted and accepted."""


@given(drafts)
def test_acceptance_length_is_one_more_than_the_sum_of_marginal_rates(drafts):
    made = [served(*each) for each in drafts]
    length = metrics.acceptance_length(made)
    if length is None:
        assert metrics.drafting(made) == []
    else:
        assert math.isclose(1 + sum(metrics.marginal_acceptance(made)), length)


@given(drafts)
def test_the_histogram_counts_every_drafting_step_once(drafts):
    made = [served(*each) for each in drafts]
    assert sum(metrics.acceptance_histogram(made)) == len(metrics.drafting(made))


@given(st.integers(1, 5), st.data())
def test_marginal_rates_are_products_of_conditional_ones_where_drafts_are_of_one_length(length, data):
    accepted = data.draw(st.lists(st.integers(0, length), min_size=1, max_size=12))
    made = [served(*((length, each) for each in accepted))]
    marginal = metrics.marginal_acceptance(made)
    product = 1.0
    for rate, conditional in zip(marginal, metrics.conditional_acceptance(made), strict=False):
        product *= conditional
        assert math.isclose(rate, product)
    assert metrics.marginal_among_drafted(made)[: len(marginal)] == marginal


@given(drafts)
def test_marginal_rates_do_not_increase_and_lie_below_those_among_drafted(drafts):
    made = [served(*each) for each in drafts]
    marginal, among = metrics.marginal_acceptance(made), metrics.marginal_among_drafted(made)
    assert marginal == sorted(marginal, reverse=True)
    assert all(low <= high for low, high in zip(marginal, among, strict=False))


def test_pooled_figures_weigh_steps_and_means_weigh_requests():
    long, short = served((4, 4), (4, 4), (4, 4)), served((4, 0))
    assert metrics.acceptance_length([long, short]) == 1 + 12 / 4
    assert metrics.mean_acceptance_length([long, short]) == (5 + 1) / 2
    assert metrics.acceptance_rate([long, short]) == 12 / 16
    assert metrics.mean_acceptance_rate([long, short]) == 0.5
    assert metrics.accepted_per_verified([long, short]) == (12 + 4) / (16 + 4)


def test_plain_steps_count_in_block_efficiency_alone():
    made = [served((3, 3), (0, 0))]
    assert metrics.acceptance_length(made) == 4
    assert metrics.block_efficiency(made) == 5 / 2
    assert metrics.nodes_per_step(made) == 3


def test_steps_with_short_drafts_lower_the_marginal_rate_and_not_the_conditional_one():
    made = [served((3, 3), (1, 1))]
    assert metrics.marginal_acceptance(made) == [1.0, 0.5, 0.5]
    assert metrics.conditional_acceptance(made) == metrics.marginal_among_drafted(made) == [1.0, 1.0, 1.0]


def test_requests_without_drafts_have_no_acceptance():
    made = [served((0, 0), (0, 0))]
    for figure in (metrics.acceptance_length, metrics.mean_acceptance_length, metrics.acceptance_rate):
        assert figure(made) is None
    assert metrics.accepted_per_verified(made) is None
    assert metrics.acceptance_histogram(made) == metrics.conditional_acceptance(made) == []


def test_latencies_are_between_the_times_that_they_name():
    made = [served((3, 1), (3, 2), arrived=5.0, every=2.0)]
    assert metrics.time_to_first_token(made) == [2.0]
    # Five tokens, of which the first chunk has two.
    assert metrics.time_per_output_token(made) == [2.0 / 4]
    assert metrics.inter_chunk_latency(made) == [2.0]
    assert metrics.end_to_end(made) == [4.0]
    assert metrics.output_throughput(made, 10.0) == 0.5
    assert metrics.request_throughput(made, 10.0) == 0.1


def test_goodput_counts_requests_that_keep_all_objectives():
    fast, slow = served((0, 0), (0, 0), every=0.1), served((0, 0), (0, 0), every=1.0)
    assert metrics.goodput([fast, slow], 2.0, Objectives(ttft=200, tpot=200)) == 0.5
    assert metrics.goodput([fast, slow], 2.0, Objectives(ttft=50, tpot=200)) == 0.0
    # An answer of one token has no time per further token.
    assert Objectives(tpot=1.0).met(served((0, 0)))
    untold = Served(**{**vars(fast), "first": None})
    assert not Objectives(ttft=1e6).met(untold)
    assert Objectives(e2el=1000).met(untold)
    with pytest.raises(InputError, match=r"did you mean 'ttft'"):
        Objectives.parse(["tft:3"])
    with pytest.raises(InputError, match=r"as in tpot:200, got 'tpot:fast'"):
        Objectives.parse(["tpot:fast"])


@given(drafts)
def test_a_request_is_read_as_it_was_written(drafts):
    made = [served(*each) for each in drafts]
    assert [Served.read(each.written()) for each in made] == made
