"""Greedy identity in float64 with transformers' own generate, per architecture: chains and hand-made trees."""

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from outrider.decode import Parts
from outrider.drafters.model import Model
from outrider.drafters.ngram import Ngram
from outrider.drafters.suffix import Suffix
from outrider.engine import Engine
from outrider.lengths.fixed import Fixed
from outrider.lengths.heuristic import Heuristic
from outrider.lm.model import LanguageModel
from outrider.trees.chain import Chain
from outrider.trees.protocol import Children, Level, Whole
from outrider.types import Draft, Sampling, Verdict
from outrider.verifiers.block import Block
from outrider.verifiers.match import Match
from outrider.verifiers.token import Token
from tests.zoo import ARCHITECTURES, VOCAB, tiny

pytestmark = pytest.mark.usefixtures("float64_stays_float64")
GREEDY = Sampling(temperature=0.0, seed=0)
NUM_TOKENS = 48


def prompts() -> list[list[int]]:
    random = np.random.default_rng(0)
    return [random.integers(3, VOCAB, size=n).tolist() for n in (13, 5, 21)]


def expected(model, prompt: list[int]) -> list[int]:
    ids = torch.tensor([prompt])
    said = model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=NUM_TOKENS, eos_token_id=None
    )
    return said[0, len(prompt) :].tolist()


def noisy_twin(name: str, noise: float = 0.02) -> LanguageModel:
    """A draft model that agrees with the target often, not always: its weights with some noise."""
    model = tiny(name)
    random = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(noise * weight.std() * torch.randn(weight.shape, generator=random, dtype=weight.dtype))
    return LanguageModel(model, max_slots=3)


@dataclass(frozen=True, kw_only=True)
class HandMade(Whole):
    """A branching tree: the drafter's two likeliest tokens at even depths, one at odd ones; all chosen, not drawn."""

    @property
    def structure(self):
        return "deterministic"

    def choose(self, level: Level, dice) -> Children:
        count = 2 if level.depth % 2 == 0 else 1
        best = level.scores.topk(count).indices
        parents = np.repeat(np.arange(len(best)), count)
        return Children(
            owners=level.owners[parents],
            parents=level.nodes[parents],
            tokens=best.flatten(),
            expand=np.ones(len(parents), dtype=bool),
        )


@dataclass(frozen=True, kw_only=True)
class Watched:
    """Match, noting whether each draft branched and how much of it was accepted."""

    seen: list[tuple[bool, int]]

    def verify(self, draft: Draft, target_rows, dice) -> Verdict:
        chosen = replace(draft, rows=None, row_of=np.full_like(draft.row_of, -1))
        verdict = Match().verify(chosen, target_rows, dice)
        self.seen.append((draft.branches, int(verdict.num_accepted.sum())))
        return verdict


CHAINS = {
    "model-block": (None, Block(), Fixed(num_speculative_tokens=4)),
    "model-token-heuristic": (None, Token(), Heuristic(num_speculative_tokens=3)),
    "ngram-match": (Ngram(prompt_lookup_min=1), Match(), Fixed(num_speculative_tokens=5)),
    "suffix-block": (Suffix(min_match=1), Block(), Fixed(num_speculative_tokens=6)),
}


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_chains_give_what_generate_gives(name):
    model = tiny(name)
    outputs = [expected(model, prompt) for prompt in prompts()]
    assert len(set(map(tuple, outputs))) > 1
    for label, (drafter, verifier, length) in CHAINS.items():
        target = LanguageModel(model, max_slots=3)
        parts = Parts(
            target=target,
            drafter=drafter or Model(lm=noisy_twin(name)),
            tree=Chain(),
            verifier=verifier,
            length=length,
        )
        made = Engine(parts, max_slots=3).generate(prompts(), max_new_tokens=NUM_TOKENS, sampling=GREEDY)
        assert [output.tokens for output in made] == outputs, label
        if drafter is None:
            assert sum(output.num_accepted_tokens for output in made) > 0, label


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_branching_trees_give_what_generate_gives(name):
    model = tiny(name)
    watched = Watched(seen=[])
    parts = Parts(
        target=LanguageModel(model, max_slots=3),
        drafter=Model(lm=noisy_twin(name)),
        tree=HandMade(),
        verifier=watched,
        length=Fixed(num_speculative_tokens=4),
    )
    made = Engine(parts, max_slots=3).generate(prompts(), max_new_tokens=NUM_TOKENS, sampling=GREEDY)
    assert [output.tokens for output in made] == [expected(model, prompt) for prompt in prompts()]
    assert any(branches for branches, _ in watched.seen)
    assert sum(accepted for _, accepted in watched.seen) > 0
