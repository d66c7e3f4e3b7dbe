"""PEARL: what it refuses, and how long it drafts."""

from dataclasses import replace

import pytest

import outrider
from outrider import InputError
from outrider.decoding.pearl import LONGEST, PearlDecoding, balanced_length
from outrider.drafters.model import ModelDrafter
from outrider.lengths.fixed import FixedLength
from outrider.refusals import Cell, refusal
from outrider.verifiers.token import TokenVerifier
from tests.decoding.pearl_engines import SIMULATED, TickingLM
from tests.world.tables import tables


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"tree": "gumbel:branching=2x2"}, "a tree has no one end to go on from; use tree 'chain', or decoding 'step'"),
        ({"length": "adaedl"}, "not as length 'adaedl' says; use length 'fixed', or decoding 'step'"),
        ({"length": "tetris"}, "not as length 'tetris' says; use length 'fixed'"),
        (
            {"verifier": "greedy_block"},
            "'greedy_block' carries rows from step to step, past them; use verifier 'block'",
        ),
        ({"decoding": "pearl:1"}, "num_speculative_tokens must be >= 2, got 1"),
        ({"decoding": "pearl:4", "length": "fixed:4"}, "give one of them"),
        ({"decoding": "perl"}, "unknown decoding 'perl'; did you mean 'pearl'?"),
        ({"decoding": "pearl:clock=wall"}, "unknown decoding 'pearl' field 'clock' 'wall'"),
    ],
)
def test_what_does_not_fit_is_refused_with_what_does(options, sentence):
    with pytest.raises(InputError) as refused:
        outrider.load(**{"decoding": "pearl"} | options)
    assert sentence in str(refused.value)


def test_a_drafter_that_reads_the_target_is_refused():
    reads = Cell(rows="sampled", structure="chain", verifier=TokenVerifier(), taps=True)
    assert refusal(reads) is None
    assert "hidden states" in refusal(replace(reads, decoding=PearlDecoding()))


def test_the_length_is_what_was_named_or_what_the_clock_says():
    assert outrider.load(decoding="pearl:3").parts.length == FixedLength(num_speculative_tokens=3)
    assert outrider.load(decoding="pearl", length="fixed:7").parts.length == FixedLength(num_speculative_tokens=7)
    measured = outrider.load(decoding=PearlDecoding()).parts.length
    assert 2 <= measured.num_speculative_tokens <= LONGEST


@pytest.mark.parametrize(
    ("target", "draft", "length"), [(9.0, 2.0, 5), (8.0, 2.0, 4), (1.0, 2.0, 2), (99.0, 1.0, LONGEST)]
)
def test_the_measured_length_is_how_often_the_drafter_fits_into_a_target_forward(target, draft, length):
    clock = [0.0]
    parts = tables(3, TokenVerifier(), 4, drafter=ModelDrafter(lm=TickingLM(1, draft, clock)), decoding=SIMULATED)
    parts = replace(parts, target=TickingLM(2, target, clock))
    assert balanced_length(parts, now=lambda: clock[0]) == length
