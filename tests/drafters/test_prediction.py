"""A predicted text: drafts copy it, the output stays what it is, and what was copied is counted."""

import pytest

from outrider.core.types import InputError, Sampling
from outrider.drafters.ngram import NgramDrafter
from outrider.drafters.prediction import PredictedText
from outrider.drafters.protocol import Drafter
from outrider.drafters.suffix import SuffixDrafter
from outrider.engine.engine import Engine
from tests.world.models import engine

PROMPT = [3, 9, 4]
GREEDY = Sampling(temperature=0, seed=0)


def over(drafter: Drafter) -> Engine:
    """An engine with another drafter than those that the tests share."""
    made = engine("ngram")
    made.swap(drafter)
    return made


@pytest.mark.parametrize("drafter", [NgramDrafter(), SuffixDrafter()])
def test_a_right_prediction_is_accepted_whole_and_saves_steps(drafter: Drafter) -> None:
    made = over(drafter)
    [plain] = made.generate([PROMPT], max_new_tokens=30, sampling=GREEDY)
    [out] = made.generate([PROMPT], max_new_tokens=30, sampling=GREEDY, prediction=plain.tokens)
    assert out.tokens == plain.tokens
    assert out.num_steps < 30 / 2
    assert out.accepted_prediction_tokens == out.num_accepted_tokens == out.num_draft_tokens
    assert (out.rejected_prediction_tokens, plain.accepted_prediction_tokens) == (0, 0)


@pytest.mark.parametrize("drafter", [NgramDrafter(prompt_lookup_min=4), SuffixDrafter(min_match=40)])
def test_a_prediction_with_a_difference_is_followed_again_behind_it(drafter: Drafter) -> None:
    made = over(drafter)
    [plain] = made.generate([PROMPT], max_new_tokens=30, sampling=GREEDY)
    wrong = [*plain.tokens[:10], (plain.tokens[10] + 1) % 40, *plain.tokens[11:]]
    [out] = made.generate([PROMPT], max_new_tokens=30, sampling=GREEDY, prediction=wrong)
    assert out.tokens == plain.tokens
    assert out.rejected_prediction_tokens > 0
    assert out.accepted_prediction_tokens > 10
    assert out.accepted_prediction_tokens + out.rejected_prediction_tokens == out.num_draft_tokens


def test_a_prediction_that_the_output_leaves_is_looked_for_again() -> None:
    prediction = PredictedText(tokens=(1, 2, 3, 4, 1, 2, 5), first=2, seen=2)
    assert prediction.begin([8, 9]) == 1
    assert prediction.begin([8, 9, 7]) == -1
    assert prediction.begin([8, 9, 7, 1, 2]) == 3
    assert prediction.begin([8, 9, 7, 1, 2, 3, 4, 6, 1, 2]) == 5
    assert prediction.further(1) == -1


def test_other_drafters_do_not_read_predictions() -> None:
    made = engine("model")
    [plain] = made.generate([PROMPT], max_new_tokens=10, sampling=GREEDY)
    [out] = made.generate([PROMPT], max_new_tokens=10, sampling=GREEDY, prediction=plain.tokens)
    assert (out.tokens, out.accepted_prediction_tokens, out.rejected_prediction_tokens) == (plain.tokens, 0, 0)


def test_a_prediction_of_unknown_tokens_is_refused() -> None:
    with pytest.raises(InputError, match="the prediction names token ids outside"):
        engine("ngram").generate([PROMPT], max_new_tokens=4, prediction=[10**6])
