"""Allowed tokens and bad words: outputs keep to them under every drafter, and are those of plain decoding."""

import numpy as np
import pytest
import torch

import outrider
from outrider.constraints.words import AllOf, AllowedTokens, BadWords, bad_words
from outrider.core.inputs import InputError
from outrider.core.sampling import unpacked
from outrider.core.types import Sampling
from tests.world.models import engine
from tests.world.tokenizers import byte_level
from tests.world.zoo import VOCAB

PROMPT = [5, 6, 7, 5, 6, 7, 5]
GREEDY, DRAWN = Sampling(temperature=0, seed=0), Sampling(temperature=1, seed=3)


def stands_in(sequence: tuple[int, ...], tokens: list[int]) -> bool:
    return any(tuple(tokens[i : i + len(sequence)]) == sequence for i in range(len(tokens)))


@pytest.mark.parametrize("drafter", ["model", "ngram", "none"])
@pytest.mark.parametrize("setting", [GREEDY, DRAWN], ids=["greedy", "drawn"])
def test_only_allowed_tokens_come(drafter, setting):
    allowed = [5, 6, 9, 31]
    outputs = engine(drafter).generate(
        [PROMPT] * 4, max_new_tokens=30, sampling=setting, allowed_token_ids=allowed, n=2
    )
    assert {token for output in outputs for token in output.tokens} <= {*allowed}
    if drafter != "none":
        assert sum(output.num_draft_tokens for output in outputs)


@pytest.mark.parametrize("drafter", ["model", "ngram", "none"])
@pytest.mark.parametrize("setting", [GREEDY, DRAWN], ids=["greedy", "drawn"])
def test_bad_sequences_stay_out_and_nothing_else_changes(drafter, setting):
    free = engine("none").generate([PROMPT], max_new_tokens=40, sampling=setting)[0].tokens
    bad = ((free[2],), tuple(free[5:8]), (free[0], free[1]), (7, 7))
    rule = BadWords(sequences=bad, vocab_size=VOCAB)
    [output] = engine(drafter).generate([PROMPT], max_new_tokens=40, sampling=setting, constraint=rule)
    assert not any(stands_in(each, output.tokens) for each in bad)
    if setting is GREEDY:
        assert output.tokens == followed(bad)


def followed(bad: tuple[tuple[int, ...], ...]) -> list[int]:
    """Greedy decoding by hand, with the bad sequences kept out."""
    rule, tokens = engine("none"), []
    while len(tokens) < 40:
        [out] = rule.generate([[*PROMPT, *tokens]], max_new_tokens=1, sampling=GREEDY, logprobs=VOCAB)
        ranked = list(out.top_logprobs[0])
        tokens.append(next(t for t in ranked if not any(tuple([*tokens, t][-len(each) :]) == each for each in bad)))
    return tokens


def test_masks_of_a_tree_follow_each_branch():
    random = np.random.default_rng(1)
    bad = ((1,), (0, 2), (2, 2, 3), (3, 0))
    rule = BadWords(sequences=bad, vocab_size=4)
    for _ in range(50):
        output = random.integers(0, 4, size=random.integers(0, 6)).tolist()
        state = rule.open()
        for token in output:
            rule.commit(state, [token])
        assert len(state) <= 2
        parents = [-1, *(int(random.integers(0, i)) for i in range(1, 7))]
        tokens = [output[-1] if output else 9, *random.integers(0, 4, size=6).tolist()]
        masks = unpacked(rule.masks(state, tokens, parents), 4)
        for node in range(7):
            path, here = [], node
            while here > 0:
                path.insert(0, tokens[here])
                here = parents[here]
            text = [*output, *path]
            ends = [any(tuple([*text, t][-len(each) :]) == each for each in bad) for t in range(4)]
            assert (~masks[node]).tolist() == ends, (output, path)


def test_constraints_hold_together():
    rules = AllOf(constraints=(AllowedTokens.of([1, 2, 3], 40), BadWords(sequences=((2,), (3, 1)), vocab_size=40)))
    state = rules.open()
    rules.commit(state, [5, 3])
    masks = unpacked(rules.masks(state, [3, 1], [-1, 0]), 40)
    assert [row.nonzero().flatten().tolist() for row in masks] == [[3], [1, 3]]
    assert torch.equal(rules.masks(state, [3, 1], [-1, 0]), rules.masks(state, [3, 1], [-1, 0]))


def test_words_are_kept_out_in_text():
    busy = outrider.load(dtype="float32")
    [free] = busy.generate(["Once upon a time"], max_new_tokens=40, sampling=GREEDY)
    words = sorted({word.strip(".,") for word in free.text.split() if word.isalpha()})[:3]
    assert words
    [output] = busy.generate(["Once upon a time"], max_new_tokens=40, sampling=GREEDY, bad_words=words)
    rule = bad_words(words, busy.tokenizer, busy.parts.target.vocab_size)
    assert any(stands_in(each, free.tokens) for each in rule.sequences)
    assert not any(stands_in(each, output.tokens) for each in rule.sequences)


def test_wrong_words_and_tokens_are_refused():
    idle = engine("none")
    for options, words in (
        ({"bad_words": ["a"]}, "bad_words need the target's tokenizer"),
        ({"allowed_token_ids": []}, "allowed_token_ids must name at least one token"),
        ({"allowed_token_ids": [VOCAB]}, f"allowed_token_ids holds token id {VOCAB}"),
    ):
        with pytest.raises(InputError, match=words):
            idle.add(PROMPT, **options)
    with pytest.raises(InputError, match="bad_words must be texts that are not empty, got ' '"):
        bad_words([" "], byte_level(300), 300)
