"""Through `custom_generate`, greedy output is `generate`'s own: any architecture, batch, processor and end."""

import numpy as np
import pytest
import torch
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    MaxLengthCriteria,
    StoppingCriteria,
    StoppingCriteriaList,
    WatermarkingConfig,
)

from outrider import as_custom_generate
from outrider.drafters.model import ModelDrafter
from outrider.integrate.generate import generate
from outrider.integrate.kept import _KEPT
from outrider.lm.model import LanguageModel
from tests.world.zoo import VOCAB, tiny

pytestmark = pytest.mark.usefixtures("float64_stays_float64")

GREEDY = {"do_sample": False, "max_new_tokens": 24, "eos_token_id": None}
NGRAM = "ngram:prompt_lookup_min=1"

SETTINGS = {
    "plain": {},
    "repetition penalty": {"repetition_penalty": 1.3},
    "no repeated n-grams": {"no_repeat_ngram_size": 2},
    "bad words": {"bad_words_ids": [[5], [9, 30], [17, 4, 4]]},
    "suppressed tokens": {"suppress_tokens": list(range(3, 64, 2)), "begin_suppress_tokens": [11]},
    "sequence bias": {"sequence_bias": [[[9], -3.0], [[30, 7], 4.0]]},
    "a shortest length": {"min_new_tokens": 9, "eos_token_id": [7, 9, 11, 30]},
    "growing generation to end": {"exponential_decay_length_penalty": (4, 1.4), "eos_token_id": 9},
    "prompt's repetition penalty": {"encoder_repetition_penalty": 1.5, "encoder_no_repeat_ngram_size": 2},
    "forced end": {"forced_eos_token_id": 9},
    "watermark": {"watermarking_config": WatermarkingConfig(bias=2.5)},
    "several": {"repetition_penalty": 1.2, "no_repeat_ngram_size": 3, "suppress_tokens": [3], "min_length": 20},
    "allowed tokens of each row": {
        "prefix_allowed_tokens_fn": lambda row, said: [t for t in range(3, VOCAB) if (t + len(said) + row) % 3]
    },
}


def batch(*sizes: int, seed: int = 0) -> dict[str, torch.Tensor]:
    """Prompts of these lengths that repeat themselves, padded on the left."""
    random, width = np.random.default_rng(seed), max(sizes)
    ids, mask = torch.zeros(len(sizes), width, dtype=torch.long), torch.zeros(len(sizes), width, dtype=torch.long)
    for row, size in enumerate(sizes):
        few = random.integers(3, VOCAB, size=4)
        ids[row, width - size :] = torch.from_numpy(random.choice(few, size=size))
        mask[row, width - size :] = 1
    return {"input_ids": ids, "attention_mask": mask}


def noisy_twin(name: str, noise: float = 0.02, max_slots: int = 8) -> LanguageModel:
    """A draft model that agrees with the target often, not always."""
    model, random = tiny(name), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(noise * weight.std() * torch.randn(weight.shape, generator=random, dtype=weight.dtype))
    return LanguageModel(model, max_slots=max_slots)


def assert_same(model, inputs: dict[str, torch.Tensor], drafted, **arguments: object) -> torch.Tensor:
    """What plain `generate` gives, which the drafted one must give too."""
    plain = model.generate(**inputs, **arguments)
    ours = model.generate(**inputs, **arguments, custom_generate=drafted)
    assert torch.equal(plain, ours), (plain.tolist(), ours.tolist())
    assert plain.dtype == ours.dtype
    return plain


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma3", "falcon"])
def test_greedy_output_of_padded_batches_is_that_of_generate(name):
    model, drafters = tiny(name), (NGRAM, ModelDrafter(lm=noisy_twin(name)))
    for drafter in drafters:
        drafted = as_custom_generate(drafter=drafter)
        for sizes in ((9,), (9, 4, 14)):
            assert_same(model, batch(*sizes), drafted, **GREEDY)


def test_drafting_needs_fewer_forwards_than_it_gives_tokens():
    model = tiny("llama")
    drafted = as_custom_generate(drafter=ModelDrafter(lm=noisy_twin("llama")))
    assert_same(model, batch(9), drafted, **GREEDY)
    assert _KEPT[model][-1].engine.parts.target.num_forwards < GREEDY["max_new_tokens"] / 2


@pytest.mark.parametrize("setting", SETTINGS)
def test_every_logits_processor_of_generate_keeps_its_effect(setting):
    model, changed = tiny("llama"), False
    for drafter, inputs in ((NGRAM, batch(9, 4, 14)), (ModelDrafter(lm=noisy_twin("llama")), batch(12))):
        found = assert_same(model, inputs, as_custom_generate(drafter=drafter), **GREEDY | SETTINGS[setting])
        without = model.generate(**inputs, **GREEDY)
        changed = changed or found.shape != without.shape or not torch.equal(found, without)
    assert changed == (setting != "plain"), "a setting that changes nothing tests nothing"


@pytest.mark.parametrize("tree", ["gumbel:branching=3x2x1", "iid:num_paths=3", "dynamic:width=3,num_nodes=9"])
def test_trees_give_what_generate_gives_under_processors(tree):
    drafted = as_custom_generate(drafter=ModelDrafter(lm=noisy_twin("llama")), tree=tree, length="fixed:3")
    setting = GREEDY | {"max_new_tokens": 12, "repetition_penalty": 1.3, "no_repeat_ngram_size": 3}
    assert_same(tiny("llama"), batch(9, 4, 14), drafted, **setting)


class Forbids(LogitsProcessor):
    """Of the caller's own: forbids what the row's place and last token say, changing the scores in place."""

    def __call__(self, input_ids, scores):
        for row in range(len(scores)):
            scores[row, (input_ids[row, -1] + row + torch.arange(40)) % VOCAB] = -torch.inf
        return scores


def test_processors_of_the_callers_own_run_at_their_row():
    own = LogitsProcessorList([Forbids()])
    for sizes in ((12,), (9, 4, 14)):
        model, inputs = tiny("llama"), batch(*sizes)
        found = assert_same(model, inputs, as_custom_generate(drafter=NGRAM), **GREEDY, logits_processor=own)
        assert not torch.equal(found, model.generate(**inputs, **GREEDY))


def test_rows_end_at_end_tokens_and_are_padded_as_by_generate():
    model, inputs, drafted = (
        tiny("llama"),
        batch(9, 4, 14),
        as_custom_generate(drafter=ModelDrafter(lm=noisy_twin("llama"))),
    )
    said = model.generate(**inputs, **GREEDY)[:, 14:]
    for row, place in ((0, 2), (1, 5), (2, 11)):
        ends = GREEDY | {"eos_token_id": int(said[row, place])}
        found = assert_same(model, inputs, drafted, **ends, pad_token_id=1)
        assert found.shape[1] == 14 + 24 or (found == 1).any()
    alone = {"input_ids": inputs["input_ids"][2:]}
    found = assert_same(model, alone, drafted, **GREEDY | {"eos_token_id": [int(said[2, 5]), 63]})
    assert found.shape[1] < 14 + 24, "one row ends with its end token, and nothing follows"


class Until(StoppingCriteria):
    """EmbeddingAndHead a row whose newest tokens add up to a multiple of a number."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __call__(self, input_ids, scores, **_):
        return (input_ids[:, -2:].sum(1) % self.number) == 0


@pytest.mark.parametrize("number", [7, 1000])
def test_stopping_criteria_of_the_callers_own_end_rows_where_plain_decoding_ends(number):
    drafted = as_custom_generate(drafter=ModelDrafter(lm=noisy_twin("llama")))
    for sizes in ((12,), (9, 4, 14)):
        for eos in (None, 63):
            given = GREEDY | {"eos_token_id": eos, "stopping_criteria": StoppingCriteriaList([Until(number)])}
            found = assert_same(tiny("llama"), batch(*sizes), drafted, **given)
            assert (found.shape[1] == max(sizes) + 24) == (number == 1000), "rows end early, but for the last number"


class Nth(StoppingCriteria):
    """EmbeddingAndHead all rows but the first the n-th time that it is asked, and the first three times later."""

    def __init__(self, number: int) -> None:
        self.left = number

    def __call__(self, input_ids, scores, **_):
        self.left -= 1
        return torch.tensor([self.left <= -3] + [self.left <= 0] * (len(input_ids) - 1))


ACROSS = {
    "the first row ends all": lambda: lambda ids, scores: bool(ids[0, -1] % 4 == 0),
    "any row ends all": lambda: lambda ids, scores: bool((ids[:, -1] % 8 == 0).any()),
    "a sum over rows": lambda: lambda ids, scores: ids[:, -1] + ids[:, -1].sum() > 150,
    "a count of calls": lambda: Nth(5),
}


@pytest.mark.parametrize("slots", [None, 2], ids=["at once", "two slots"])
@pytest.mark.parametrize("how", ACROSS)
def test_criteria_that_look_across_rows_or_remember_are_asked_as_by_generate(how, slots):
    model, inputs = tiny("llama"), batch(9, 4, 14)
    drafted = as_custom_generate(drafter=ModelDrafter(lm=noisy_twin("llama")), max_slots=slots)
    for eos in (None, 63):
        given = GREEDY | {"eos_token_id": eos, "pad_token_id": 1}
        plain = model.generate(**inputs, **given, stopping_criteria=[ACROSS[how]()])
        ours = model.generate(**inputs, **given, stopping_criteria=[ACROSS[how]()], custom_generate=drafted)
        assert torch.equal(plain, ours), (plain.tolist(), ours.tolist())
        assert plain.shape[1] < 14 + 24


def test_a_criterion_is_given_the_scores_of_generate():
    model, inputs, given = tiny("llama"), batch(9, 4, 14), GREEDY | {"repetition_penalty": 1.3}
    seen: list[list[torch.Tensor]] = []

    def ends(ids, scores):
        seen[-1].append(scores[-1])
        return scores[-1].argmax(1) % 3 == 0

    given |= {"stopping_criteria": [ends], "return_dict_in_generate": True, "output_scores": True}
    sequences = []
    for how in ({}, {"custom_generate": as_custom_generate(drafter=NGRAM)}):
        seen.append([])
        sequences.append(model.generate(**inputs, **given, **how).sequences)
    assert torch.equal(*sequences)
    assert 14 < sequences[0].shape[1] < 14 + 24
    for plain, ours in zip(*seen, strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-9, atol=1e-9)


def test_prompts_of_short_integers_become_long_ones_as_by_generate():
    inputs = {"input_ids": batch(9)["input_ids"].int()}
    assert assert_same(tiny("llama"), inputs, as_custom_generate(drafter=NGRAM), **GREEDY).dtype == torch.int64


def test_what_generate_ignores_is_ignored():
    model, drafted = tiny("llama"), as_custom_generate(drafter=NGRAM)
    for given in ({"output_hidden_states": True}, {"use_cache": False}, {"cache_implementation": "dynamic"}):
        assert_same(model, batch(9, 4), drafted, **GREEDY | given)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["static", "sliding_window", "offloaded"])
def test_kinds_of_cache_that_a_checkpoint_names_change_nothing(kind):
    if kind == "offloaded" and torch.version.cuda is not None and not torch.cuda.is_available():
        pytest.skip("transformers itself has no such cache here: this torch is built for a GPU, and there is none")
    model = tiny("llama")
    plain = model.generate(**batch(9, 4), **GREEDY)
    model.generation_config.cache_implementation = kind
    drafted = model.generate(**batch(9, 4), **GREEDY, custom_generate=as_custom_generate(drafter=NGRAM))
    assert torch.equal(drafted, plain)
    assert torch.equal(generate(**batch(9, 4), **GREEDY, model=model, drafter=NGRAM), plain)


def test_a_criterion_that_answers_with_one_truth_ends_the_row():
    given = GREEDY | {"stopping_criteria": StoppingCriteriaList([lambda ids, scores: ids.shape[1] >= 12])}
    assert assert_same(tiny("llama"), batch(9), as_custom_generate(drafter=NGRAM), **given).shape[1] == 12


def test_longest_lengths_and_times_end_where_plain_decoding_ends():
    model, drafted = tiny("llama"), as_custom_generate(drafter=NGRAM)
    for given in ({"max_length": 17}, {"max_new_tokens": 1}, {"max_new_tokens": 9, "max_time": -1.0}):
        assert_same(model, batch(9, 4, 14), drafted, do_sample=False, **given)
    criteria = StoppingCriteriaList([MaxLengthCriteria(16)])
    assert assert_same(model, batch(9, 14), drafted, **GREEDY, stopping_criteria=criteria).shape[1] == 16


def test_several_sequences_of_one_prompt_are_rows():
    model, inputs, drafted = tiny("llama"), batch(9, 4), as_custom_generate(drafter=NGRAM)
    assert assert_same(
        model, inputs, drafted, **GREEDY | {"do_sample": True, "top_k": 1, "num_return_sequences": 3}
    ).shape == (6, 33)
    drawn = model.generate(**inputs, do_sample=True, num_return_sequences=3, custom_generate=drafted, max_new_tokens=9)
    assert len({tuple(row) for row in drawn[:3].tolist()}) == 3


def test_the_returned_scores_and_logits_are_those_of_generate():
    model, inputs, drafted = tiny("llama"), batch(9, 4, 14), as_custom_generate(drafter=NGRAM)
    said = model.generate(**inputs, **GREEDY)
    given = GREEDY | {
        "return_dict_in_generate": True,
        "output_scores": True,
        "output_logits": True,
        "repetition_penalty": 1.3,
        "eos_token_id": int(said[1, 14 + 4]),
    }
    plain, ours = model.generate(**inputs, **given), model.generate(**inputs, **given, custom_generate=drafted)
    assert torch.equal(plain.sequences, ours.sequences)
    new = plain.sequences[:, 14:]
    assert len(ours.scores) == len(ours.logits) == new.shape[1]
    for step in range(new.shape[1]):
        on = ~(new[:, :step] == given["eos_token_id"]).any(1)
        torch.testing.assert_close(ours.scores[step][on], plain.scores[step][on], rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(ours.logits[step][on], plain.logits[step][on], rtol=1e-9, atol=1e-9)
        assert (ours.scores[step][~on] == 0).all()
    bare = model.generate(**inputs, **GREEDY, return_dict_in_generate=True, custom_generate=drafted)
    assert bare.scores is None
    assert torch.equal(bare.sequences, said)
