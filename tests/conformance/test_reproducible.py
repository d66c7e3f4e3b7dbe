"""With verifier `coupled` a text depends on seed and target alone: not on drafters, lengths, trees and batches."""

from functools import cache

import numpy as np
import pytest

from outrider.core.types import Sampling
from outrider.drafters.first import FirstDrafter
from outrider.drafters.model import ModelDrafter
from outrider.drafters.ngram import NgramDrafter
from outrider.drafters.none import NoDrafter
from outrider.drafters.protocol import Drafter
from outrider.drafters.suffix import SuffixDrafter
from outrider.engine.engine import Engine
from outrider.lengths.heuristic import HeuristicLength
from outrider.lm.model import LanguageModel
from outrider.lm.target_info import TargetInfo
from tests.world.heads import HEADS, LAYERS, head
from tests.world.models import llama
from tests.world.parts import parts_of
from tests.world.steering import steered_drafter
from tests.world.zoo import VOCAB

DRAFTERS = ("none", "ngram", "suffix", "model", "steered", "first", *HEADS, *LAYERS)
POINTS = ("none", "ngram", "suffix")
LENGTHS = (1, 3, 6)
TREES = ("gumbel:branching=3x2x1", "dynamic:width=3,num_nodes=8")
OF_POSITIONS = ("lattice:num_nodes=6", "dynamic:width=3,num_nodes=8")
"""Trees over rows that are known by position."""
SETTINGS = [
    Sampling(temperature=1.0),
    Sampling(temperature=0.7, top_k=12),
    Sampling(temperature=1.3, top_p=0.8),
    Sampling(temperature=1.0, frequency_penalty=0.4, repetition_penalty=1.2),
    Sampling(temperature=0.0),
]


def target(slots: int) -> LanguageModel:
    return LanguageModel(llama().float(), max_slots=slots)


def drafter_of(name: str, model: LanguageModel, slots: int) -> Drafter:
    if name == "model":
        return ModelDrafter(lm=LanguageModel(llama(num_layers=1).float(), max_slots=slots))
    if name == "steered":
        return steered_drafter(model, max_slots=slots)
    if name == "first":
        return FirstDrafter(drafters=(SuffixDrafter(min_match=1), drafter_of("model", model, slots)))
    plain = {"none": NoDrafter(), "ngram": NgramDrafter(prompt_lookup_min=1), "suffix": SuffixDrafter(min_match=1)}
    return plain[name] if name in plain else head(name, TargetInfo.of(model, None))


def engine(drafter: str, tree: str = "chain", length: object = 3, slots: int = 8, verifier: str = "coupled") -> Engine:
    model = target(slots)
    parts = parts_of(model, drafter_of(drafter, model, slots), tree=tree, verifier=verifier, length=length)
    return Engine(parts, max_slots=slots)


def texts(made: Engine, num_tokens: int = 10, first: int = 8) -> list[list[int]]:
    """The first of eight outputs, under every setting, each with a seed of its own."""
    dice = np.random.default_rng(0)
    prompts = [dice.integers(3, VOCAB, size=size).tolist() for size in (5, 1, 20, 9, 13, 2, 7, 30)]
    settings = [SETTINGS[i % len(SETTINGS)] for i in range(len(prompts))]
    seeded = [Sampling(**{**vars(each), "seed": 40 + i}) for i, each in enumerate(settings)]
    outputs = made.generate(prompts[:first], sampling=seeded[:first], max_new_tokens=num_tokens)
    return [output.tokens for output in outputs]


@cache
def plain() -> list[list[int]]:
    """What is said without drafts."""
    return texts(engine("none"))


def test_plain_decoding_says_it_alone_and_in_a_batch():
    assert texts(engine("none", slots=1), first=5) == plain()[:5]
    assert texts(engine("model").plain()) == plain()


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_the_text_is_that_of_plain_decoding_with_any_drafter_length_tree_and_batch(drafter):
    trees = OF_POSITIONS if drafter not in POINTS and engine(drafter).parts.drafter.rows == "marginal" else TREES
    cells = [("chain", length) for length in LENGTHS]
    cells += [(tree, 3) for tree in trees] if drafter not in POINTS else []
    counts: list[int] = []
    for i, (tree, length) in enumerate(cells):
        made = engine(drafter, tree, length)
        made.watch = lambda cycle: counts.append(len(cycle.draft.tokens) - cycle.draft.num_requests)
        assert texts(made) == plain(), (tree, length)
        if i % 2:
            assert texts(engine(drafter, tree, length, slots=1), first=2) == plain()[:2], (tree, length)
    assert (sum(counts) > 0) == (drafter != "none")


@pytest.mark.parametrize(
    "tree", ["iid:num_paths=3", "beam:width=3", "top_plus_one:width=2", "fixed:children=3x1x0x2", "opt"]
)
def test_the_text_is_that_of_plain_decoding_with_every_other_tree(tree):
    assert texts(engine("model", tree)) == plain()


def test_a_length_that_adapts_changes_nothing():
    assert texts(engine("model", length=HeuristicLength(num_speculative_tokens=2))) == plain()


def test_a_shorter_text_is_the_beginning_of_a_longer_one():
    assert texts(engine("model"), 7) == [tokens[:7] for tokens in plain()]


def test_a_text_goes_on_where_it_was_cut():
    made, seeded = engine("model"), Sampling(seed=3)
    [whole] = made.generate([[5, 9, 4]], sampling=seeded, max_new_tokens=12)
    [rest] = made.generate([[5, 9, 4, *whole.tokens[:5]]], sampling=seeded, max_new_tokens=7)
    assert whole.tokens[5:] == rest.tokens


def test_another_seed_says_another_text_and_other_verifiers_say_what_the_drafter_changes():
    made = engine("model")
    [one, other] = made.generate([[5, 9, 4]] * 2, sampling=[Sampling(seed=1), Sampling(seed=2)], max_new_tokens=16)
    assert one.tokens != other.tokens
    assert texts(engine("model", verifier="match")) != texts(engine("model", length=1, verifier="match"))


def test_draft_tokens_agree_more_often_than_independent_ones():
    accepted = {}
    for verifier in ("coupled", "match"):
        outputs = engine("model", verifier=verifier).generate(
            [[5, 9, 4]] * 8, sampling=[Sampling(seed=i) for i in range(8)], max_new_tokens=48
        )
        drafted = sum(output.num_draft_tokens for output in outputs)
        accepted[verifier] = sum(output.num_accepted_tokens for output in outputs) / drafted
    assert accepted["coupled"] > 1.3 * accepted["match"] > 0, accepted
