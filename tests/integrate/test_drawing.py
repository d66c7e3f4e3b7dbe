"""Through `custom_generate`, sampled output has the law of `generate`, and follows torch's global seed."""

import itertools

import pytest
import torch
from jaxtyping import Float
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from outrider import as_custom_generate
from outrider.drafters.model import Model
from outrider.proof.statistics import chi_square
from tests.integrate.test_generate import NGRAM, batch, noisy_twin
from tests.zoo import tiny

pytestmark = pytest.mark.usefixtures("float64_stays_float64")

SETTING = {"do_sample": True, "temperature": 0.6, "top_k": 3, "top_p": 0.97, "repetition_penalty": 1.2}
PIPELINE = LogitsProcessorList(
    [
        RepetitionPenaltyLogitsProcessor(1.2),
        TemperatureLogitsWarper(0.6),
        TopKLogitsWarper(3),
        TopPLogitsWarper(0.97),
    ]
)
LENGTH, DRAWS = 3, 250


def next_row(model, ids: list[int], pipeline: LogitsProcessorList) -> Float[Tensor, " vocab"]:
    """What `generate` draws the next token from: its processors over the model's own logits."""
    text = torch.tensor([ids])
    with torch.no_grad():
        return pipeline(text, model(text, use_cache=False).logits[:, -1])[0].softmax(-1)


def law(model, prompt: list[int], pipeline: LogitsProcessorList) -> dict[tuple[int, ...], float]:
    """The probability of every output of `LENGTH` tokens."""
    found = {(): 1.0}
    for _ in range(LENGTH):
        longer = {}
        for said, chance in found.items():
            row = next_row(model, [*prompt, *said], pipeline)
            longer |= {(*said, t): chance * float(row[t]) for t in row.nonzero().flatten().tolist()}
        found = longer
    return found


def p_value(said: list[tuple[int, ...]], expected: dict[tuple[int, ...], float]) -> float:
    """Of a chi-square test; what is expected fewer than five times shares a category."""
    assert set(said) <= set(expected), set(said) - set(expected)
    often = [sequence for sequence, chance in expected.items() if chance * len(said) >= 5]
    observed = [said.count(sequence) for sequence in often]
    wanted = [expected[sequence] * len(said) for sequence in often]
    if (rest := len(said) - sum(wanted)) > 1e-9 * len(said):
        observed, wanted = [*observed, len(said) - sum(observed)], [*wanted, rest]
    assert len(observed) > 5
    return chi_square(observed, wanted).p_value


@pytest.mark.parametrize(
    "parts",
    [{}, {"tree": "gumbel:branching=2x2", "length": "fixed:2"}],
    ids=["chain", "tree"],
)
def test_drawn_sequences_have_the_law_of_generates_own_processors(parts):
    model, inputs = tiny("llama"), batch(5)
    drafted = as_custom_generate(drafter=Model(lm=noisy_twin("llama", noise=0.3, max_slots=64)), max_slots=64, **parts)
    torch.manual_seed(1)
    out = model.generate(
        **inputs,
        **SETTING,
        max_new_tokens=LENGTH,
        eos_token_id=None,
        num_return_sequences=DRAWS,
        custom_generate=drafted,
    )
    said = [tuple(row) for row in out[:, 5:].tolist()]
    prompt = inputs["input_ids"][0].tolist()
    assert p_value(said, law(model, prompt, PIPELINE)) > 1e-3
    colder = LogitsProcessorList([PIPELINE[0], TemperatureLogitsWarper(0.6**2), *PIPELINE[2:]])
    wrong = law(model, prompt, colder)
    assert not set(said) <= set(wrong) or p_value(said, wrong) < 1e-4, "temperature applied twice would pass"


def test_the_global_seed_decides_what_is_drawn_and_moves_on():
    model, inputs, drafted = tiny("llama"), batch(9, 4, 14), as_custom_generate(drafter=NGRAM)

    def draw():
        return model.generate(
            **inputs, do_sample=True, max_new_tokens=12, eos_token_id=None, custom_generate=drafted
        ).tolist()

    torch.manual_seed(5)
    first, second = draw(), draw()
    torch.manual_seed(5)
    again = draw()
    torch.manual_seed(6)
    other = draw()
    assert first == again
    assert all(a != b for a, b in itertools.combinations((first, second, other), 2))


def test_greedy_decoding_leaves_the_global_generator_alone():
    model, before = tiny("llama"), torch.get_rng_state()
    model.generate(**batch(9), do_sample=False, max_new_tokens=9, custom_generate=as_custom_generate(drafter=NGRAM))
    assert torch.equal(before, torch.get_rng_state())
