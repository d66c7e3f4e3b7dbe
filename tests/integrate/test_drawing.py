"""Through `custom_generate`, sampled output has the law of `generate`, and follows torch's global seed."""

import itertools

import numpy as np
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
    WatermarkingConfig,
)

from outrider import as_custom_generate
from outrider.core.sampling import to_rows
from outrider.core.texts import Before
from outrider.drafters.model import ModelDrafter
from outrider.integrate.batch import GenerateBatch
from outrider.integrate.refusals import padding_of
from outrider.proof.statistics import chi_square
from tests.integrate.test_generate import NGRAM, batch, noisy_twin
from tests.world.zoo import VOCAB, tiny

pytestmark = pytest.mark.usefixtures("float64_stays_float64")

SETTING = {"do_sample": True, "temperature": 0.6, "top_k": 3, "top_p": 0.97, "repetition_penalty": 1.2}
PIPELINE = LogitsProcessorList(
    [RepetitionPenaltyLogitsProcessor(1.2), TemperatureLogitsWarper(0.6), TopKLogitsWarper(3), TopPLogitsWarper(0.97)]
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


@pytest.mark.parametrize("parts", [{}, {"tree": "gumbel:branching=2x2", "length": "fixed:2"}], ids=["chain", "tree"])
def test_drawn_sequences_have_the_law_of_generates_own_processors(parts):
    model, inputs = tiny("llama"), batch(5)
    drafted = as_custom_generate(
        drafter=ModelDrafter(lm=noisy_twin("llama", noise=0.3, max_slots=64)), max_slots=64, **parts
    )
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


WARPERS = {
    "temperature": {"temperature": 0.4},
    "top_k": {"top_k": 3},
    "top_p": {"top_p": 0.7},
    "min_p": {"min_p": 0.2},
    "top_h": {"top_h": 0.5},
    "typical_p": {"typical_p": 0.6},
    "epsilon_cutoff": {"epsilon_cutoff": 0.05},
    "eta_cutoff": {"eta_cutoff": 0.2},
    "repetition_penalty": {"repetition_penalty": 1.6},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 2},
    "encoder_repetition_penalty": {"encoder_repetition_penalty": 1.6},
    "watermarking_config": {"watermarking_config": WatermarkingConfig(bias=3.0)},
    "self-hashing watermark": {
        "watermarking_config": WatermarkingConfig(bias=3.0, seeding_scheme="selfhash", context_width=2)
    },
    "exponential_decay_length_penalty": {"exponential_decay_length_penalty": (0, 3.0), "eos_token_id": 9},
    "several": {"temperature": 0.7, "top_p": 0.8, "typical_p": 0.9, "renormalize_logits": True, "suppress_tokens": [5]},
}


@pytest.mark.parametrize("warper", WARPERS)
def test_tokens_are_drawn_from_the_rows_of_generates_own_processors(warper):
    """Rows after two more tokens of each prompt, as a node at depth two has them."""
    model, inputs, more = tiny("llama"), batch(9, 4, 14), [[5, 9], [30, 31], [5, 5]]
    made: list[GenerateBatch] = []

    def keep(_, input_ids, logits_processor, stopping_criteria, generation_config, **rest):
        made.append(
            GenerateBatch(
                input_ids=input_ids,
                padding=padding_of(input_ids, rest["attention_mask"]),
                processors=tuple(logits_processor),
                criteria=list(stopping_criteria),
                same_device=True,
                config=generation_config,
            )
        )
        return input_ids

    setting = {"do_sample": True, "top_k": 0, "eos_token_id": None, "max_new_tokens": 8} | WARPERS[warper]
    model.generate(**inputs, **setting, custom_generate=keep)
    requests = [made[0].request(row, seed=0) for row in range(3)]
    logits = 2.0 * torch.randn(3, VOCAB, dtype=torch.float64)
    rows = to_rows(
        logits,
        np.arange(3),
        [request.sampling for request in requests],
        lambda: Before.of([request.prompt for request in requests], more),
    )
    scores = made[0].processors and LogitsProcessorList(made[0].processors)(
        torch.cat([inputs["input_ids"], torch.tensor(more)], 1), logits.clone()
    )
    torch.testing.assert_close(rows, scores.softmax(-1), rtol=1e-9, atol=1e-12)
    assert not torch.allclose(rows, logits.softmax(-1), atol=1e-3), "a setting that changes nothing tests nothing"


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
