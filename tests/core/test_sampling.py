"""Rows are what transformers' processors give, one setting at a time and all together, in mixed batches too."""

import itertools
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from jaxtyping import Bool, Float
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from outrider.core.nucleus import FIRST_LOOK, WIDE
from outrider.core.sampling import to_rows
from outrider.core.texts import Before
from outrider.core.types import InputError, Sampling

PROMPT, OUTPUT = [3, 9, 9, 4], [5, 9, 5, 5]


def logits_of(seed: int, n: int = 4, vocab: int = 50) -> Float[Tensor, "n vocab"]:
    return torch.randn(n, vocab, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) * 3


def ours(logits: Float[Tensor, "n vocab"], *samplings: Sampling) -> Float[Tensor, "n vocab"]:
    """Rows under one setting, or under one per row."""
    owners = np.arange(len(logits)) if len(samplings) > 1 else np.zeros(len(logits), dtype=np.int64)
    return to_rows(logits, owners, samplings, lambda: Before.of([PROMPT] * len(logits), [OUTPUT] * len(logits)))


def theirs(logits: Float[Tensor, "n vocab"], *processors: object) -> Float[Tensor, "n vocab"]:
    ids = torch.tensor([[*PROMPT, *OUTPUT]] * len(logits))
    return LogitsProcessorList(processors)(ids, logits.clone()).softmax(-1)


def assert_close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


@settings(deadline=None)
@given(seed=st.integers(0, 10**6), temperature=st.floats(0.05, 20))
def test_temperature_is_transformers_own(seed, temperature):
    logits = logits_of(seed)
    assert_close(ours(logits, Sampling(temperature=temperature)), theirs(logits, TemperatureLogitsWarper(temperature)))


@settings(deadline=None)
@given(seed=st.integers(0, 10**6), top_k=st.integers(1, 60))
def test_top_k_is_transformers_own(seed, top_k):
    logits = logits_of(seed)
    assert_close(ours(logits, Sampling(top_k=top_k)), theirs(logits, TopKLogitsWarper(top_k)))


@settings(deadline=None)
@given(seed=st.integers(0, 10**6), top_p=st.floats(0.01, 0.999))
def test_top_p_is_transformers_own(seed, top_p):
    logits = logits_of(seed)
    assert_close(ours(logits, Sampling(top_p=top_p)), theirs(logits, TopPLogitsWarper(top_p)))


@settings(deadline=None)
@given(seed=st.integers(0, 10**6), min_p=st.floats(0, 1))
def test_min_p_is_transformers_own(seed, min_p):
    logits = logits_of(seed)
    assert_close(ours(logits, Sampling(min_p=min_p)), theirs(logits, MinPLogitsWarper(min_p)))


@settings(deadline=None)
@given(seed=st.integers(0, 10**6), penalty=st.floats(0.2, 5))
def test_repetition_penalty_is_transformers_own(seed, penalty):
    logits = logits_of(seed)
    expected = theirs(logits, RepetitionPenaltyLogitsProcessor(penalty))
    assert_close(ours(logits, Sampling(repetition_penalty=penalty)), expected)


@settings(deadline=None)
@given(
    seed=st.integers(0, 10**6),
    penalty=st.floats(0.5, 2),
    temperature=st.floats(0.2, 3),
    top_k=st.integers(1, 50),
    top_p=st.floats(0.05, 0.99),
    min_p=st.floats(0, 0.5),
)
def test_all_together_are_applied_in_transformers_order(seed, penalty, temperature, top_k, top_p, min_p):
    logits = logits_of(seed)
    setting = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, repetition_penalty=penalty)
    expected = theirs(
        logits,
        RepetitionPenaltyLogitsProcessor(penalty),
        TemperatureLogitsWarper(temperature),
        TopKLogitsWarper(top_k),
        TopPLogitsWarper(top_p),
        MinPLogitsWarper(min_p),
    )
    assert_close(ours(logits, setting), expected)


def test_frequency_and_presence_count_the_output_alone():
    logits = logits_of(1)
    counts = torch.zeros(50, dtype=torch.float64)
    for token, times in Counter(OUTPUT).items():
        counts[token] = times
    expected = (logits - 0.7 * counts - 0.4 * (counts > 0)).softmax(-1)
    assert_close(ours(logits, Sampling(frequency_penalty=0.7, presence_penalty=0.4)), expected)
    assert counts[3] == 0, "a token of the prompt alone is not counted"


def test_bias_is_added_before_the_temperature():
    logits = logits_of(2)
    expected = logits.clone()
    expected[:, 7] += 1.5
    expected[:, 8] -= 2.5
    assert_close(ours(logits, Sampling(temperature=0.5, logit_bias={7: 1.5, 8: -2.5})), (expected / 0.5).softmax(-1))


def test_a_processor_is_given_prompt_and_output():
    logits = logits_of(3)
    bad = NoBadWordsLogitsProcessor([[OUTPUT[-2], OUTPUT[-1], 11], [12]])
    rows = ours(logits, Sampling(processors=[bad]))
    assert_close(rows, theirs(logits, bad))
    assert rows[:, [11, 12]].sum() == 0


def test_processors_that_read_no_tokens_are_asked_once_for_all_rows_and_give_the_same():
    class Counted(TopPLogitsWarper):
        """Not transformers' own, so it is asked row by row."""

    logits, penalty = logits_of(9), RepetitionPenaltyLogitsProcessor(1.4)
    warpers = [TemperatureLogitsWarper(0.7), TopKLogitsWarper(20), TopPLogitsWarper(0.9)]
    for end in (warpers, [*warpers[:2], Counted(0.9)], [warpers[0], penalty, *warpers[1:]]):
        expected = theirs(logits, penalty, *end)
        assert_close(ours(logits, Sampling(processors=[penalty, *end])), expected)
        mixed = [Sampling(processors=[penalty, *end]) for _ in range(3)]
        assert_close(ours(logits, *mixed, Sampling(processors=end[-1:]))[:3], expected[:3])
    shapes = []
    Counted.__call__ = lambda self, ids, scores: shapes.append((ids.shape, scores.shape)) or scores
    ours(logits, Sampling(processors=[Counted(0.9)]))
    assert shapes == [((1, 8), (1, 50))] * 4


def test_a_processor_may_change_its_scores_in_place():
    def first_goes(ids, scores):
        scores[:, 0] = -torch.inf
        return scores

    logits = logits_of(10)
    before = logits.clone()
    rows = ours(logits, Sampling(processors=[first_goes]))
    assert torch.equal(logits, before)
    assert (rows[:, 0] == 0).all()


def test_no_setting_changes_the_raw_logits_in_place():
    logits = logits_of(4)
    before = logits.clone()

    def rude(ids: Tensor, scores: Tensor) -> Tensor:
        scores[:, 0] = -torch.inf
        return scores

    ours(logits, Sampling(processors=[rude], logit_bias={1: 3.0}, repetition_penalty=2.0, top_k=3, top_p=0.5))
    assert torch.equal(logits, before)


def test_greedy_is_one_hot_at_the_first_largest_adjusted_logit():
    logits = torch.tensor([[1.0, 4.0, 4.0, 2.0]])
    assert ours(logits, Sampling(temperature=0)).tolist() == [[0, 1, 0, 0]]
    assert ours(logits, Sampling(temperature=0, logit_bias={3: 2.5})).tolist() == [[0, 0, 0, 1]]


@settings(deadline=None)
@given(seed=st.integers(0, 10**6))
def test_a_row_of_a_mixed_batch_is_the_row_alone(seed):
    logits = logits_of(seed, n=7)
    settings = [
        Sampling(temperature=0),
        Sampling(),
        Sampling(temperature=0.3, top_k=5),
        Sampling(top_p=0.4),
        Sampling(min_p=0.2, repetition_penalty=1.7),
        Sampling(temperature=0, frequency_penalty=3.0),
        Sampling(temperature=2.0, top_k=20, top_p=0.9, logit_bias={1: 2.0}),
    ]
    together = ours(logits, *settings)
    for i, setting in enumerate(settings):
        assert_close(together[i : i + 1], ours(logits[i : i + 1], setting))


@pytest.mark.parametrize("top_p", [0.1, 0.5, 0.9, 0.999])
@pytest.mark.parametrize("scale", [0.01, 1.0, 6.0])
def test_top_p_beyond_the_first_look_is_transformers_own(top_p, scale):
    logits = logits_of(5, vocab=8 * FIRST_LOOK) / 3 * scale
    rows = ours(logits, Sampling(top_p=top_p))
    assert_close(rows, theirs(logits, TopPLogitsWarper(top_p)))
    if scale == 0.01 and top_p > 0.2:
        kept = (rows > 0).sum(-1)
        assert (kept > FIRST_LOOK).all(), kept


def drawn_row(kind: str, seed: int, vocab: int, dtype: torch.dtype) -> Float[Tensor, "3 vocab"]:
    """Logits whose rows are nearly flat, peaked, full of ties, or full of tokens that cannot come."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(3, vocab, dtype=torch.float64, generator=generator)
    if kind == "peaked":
        rank = torch.randperm(vocab, generator=generator) + 1
        noise = noise * 0.3 - 1.75 * rank.double().log()
    elif kind == "tied":
        noise = (noise * 2).round() / 2
    elif kind == "with zeros":
        noise = noise.masked_fill(torch.rand(3, vocab, generator=generator) < 0.9, -torch.inf)
        noise[:, seed % vocab] = 0.0
    elif kind == "equal":
        noise = torch.zeros_like(noise)
    return noise.to(dtype)


def kept_by_definition(row: Float[Tensor, " vocab"], top_p: float) -> Bool[np.ndarray, " vocab"]:
    """The smallest set of most likely tokens that reaches the share of the row's mass, and all that tie with its last;
    by a full sort.
    """
    best = np.sort(row.double().numpy())[::-1]
    running = np.array(list(itertools.accumulate(best.tolist())))
    running /= running[-1]
    # Masses of narrow rows are added up in float32.
    assume((abs(running - top_p) > (1e-6 if row.dtype == torch.float32 else 1e-9)).all())
    reached = np.flatnonzero(running >= top_p)
    floor = best[reached[0]] if len(reached) else 0.0
    return row.double().numpy() >= floor


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("vocab", [FIRST_LOOK + 1, WIDE, WIDE + 13])
@pytest.mark.parametrize("kind", ["random", "peaked", "tied", "with zeros", "equal"])
@settings(deadline=None, max_examples=5)
@given(seed=st.integers(0, 10**6), top_p=st.floats(0.01, 0.99))
def test_top_p_of_a_wide_row_keeps_what_a_full_sort_keeps(kind, vocab, dtype, seed, top_p):
    logits = drawn_row(kind, seed, vocab, dtype)
    whole, rows = ours(logits, Sampling(temperature=0.8)), ours(logits, Sampling(temperature=0.8, top_p=top_p))
    for before, after in zip(whole, rows, strict=True):
        kept = torch.from_numpy(kept_by_definition(before, top_p))
        expected = torch.where(kept, before, 0.0).double()
        assert torch.equal(after > 0, kept & (before > 0)), (int((after > 0).sum()), int(kept.sum()))
        torch.testing.assert_close(after.double(), expected / expected.sum(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("top_p", [1 - 1e-16, 1 - 1e-8])
def test_top_p_that_rounding_cannot_reach_keeps_everything_or_nearly(top_p):
    rows = ours(drawn_row("random", 1, WIDE, torch.float32), Sampling(top_p=top_p))
    assert ((rows > 0).sum(-1) >= WIDE - 2).all()


def test_half_a_mass_that_the_first_token_reaches_alone_is_that_token():
    for vocab in (8, FIRST_LOOK + 1, WIDE):
        logits = torch.full((1, vocab), -torch.inf, dtype=torch.float64)
        logits[0, [1, 3, 5]] = torch.tensor([0.5, 0.25, 0.25], dtype=torch.float64).log()
        assert ours(logits, Sampling(top_p=0.5)).nonzero().tolist() == [[0, 1]]
        assert ours(logits, Sampling(top_p=0.51)).nonzero().tolist() == [[0, 1], [0, 3], [0, 5]], "ties are kept"


def test_a_row_that_is_not_a_number_spoils_no_other():
    logits = drawn_row("random", 2, WIDE, torch.float32)
    broken = logits.clone()
    broken[1] = torch.nan
    rows = ours(broken, Sampling(top_p=0.9))
    assert torch.equal(rows[[0, 2]], ours(logits, Sampling(top_p=0.9))[[0, 2]])
    assert rows[1].isnan().all()


def test_rows_do_not_depend_on_how_many_are_filtered_at_once(monkeypatch):
    logits = drawn_row("random", 3, WIDE, torch.float32)
    setting = Sampling(temperature=0.7, top_k=9000, top_p=0.9, min_p=1e-4)
    together = ours(logits, setting)
    monkeypatch.setattr("outrider.core.sampling.AT_ONCE", {"cpu": 2 * WIDE})
    assert torch.equal(ours(logits, setting), together)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_rows_sum_to_one_in_float32_or_better(dtype):
    rows = ours(logits_of(6).to(dtype), Sampling(temperature=0.7, top_k=9, top_p=0.8, min_p=0.01))
    assert rows.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    torch.testing.assert_close(rows.sum(-1), torch.ones(4, dtype=rows.dtype))


@pytest.mark.parametrize("temperature", [1e-4, 1e-38, 1e-50, 1e-320])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_tiny_temperature_is_nearly_greedy_and_never_nan(dtype, temperature):
    logits = logits_of(7).to(dtype)
    rows = ours(logits, Sampling(temperature=temperature))
    torch.testing.assert_close(rows, ours(logits, Sampling(temperature=0)))


@pytest.mark.parametrize(
    ("setting", "sentence"),
    [
        ({"temperature": -1.0}, r"temperature must be >= 0 \(0 means greedy\), got -1.0"),
        ({"top_k": -1}, "top_k must be >= 0"),
        ({"top_p": 0.0}, r"top_p must be in \(0, 1\], got 0.0"),
        ({"top_p": 1.5}, r"top_p must be in \(0, 1\], got 1.5"),
        ({"min_p": 2.0}, r"min_p must be in \[0, 1\], got 2.0"),
        ({"repetition_penalty": 0.0}, "repetition_penalty must be > 0"),
        ({"seed": -1}, "seed must be >= 0, got -1"),
        ({"temperature": float("nan")}, "temperature must be >= 0"),
    ],
)
def test_settings_out_of_range_say_so(setting, sentence):
    with pytest.raises(InputError, match=sentence):
        Sampling(**setting)
