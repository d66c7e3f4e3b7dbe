"""Greedy identity in float64 with transformers' own generate, per architecture: chains, and trees with verifiers."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch

from outrider import catalog
from outrider.decode import Parts
from outrider.drafters.model import Model
from outrider.drafters.ngram import Ngram
from outrider.drafters.suffix import Suffix
from outrider.engine import Engine
from outrider.lengths.adaedl import Adaedl
from outrider.lengths.fixed import Fixed
from outrider.lengths.heuristic import Heuristic
from outrider.lengths.svip import Svip
from outrider.lengths.tetris import Tetris
from outrider.lm.model import LanguageModel
from outrider.proof.matrix import KINDS, LOSSLESS
from outrider.trees.chain import Chain
from outrider.types import Draft, Sampling, Verdict
from outrider.verifiers.block import Block
from outrider.verifiers.greedy_block import GreedyBlock
from outrider.verifiers.match import Match
from outrider.verifiers.protocol import Verifier
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
class Watched:
    """A verifier, noting whether each draft branched and how much of it was accepted."""

    rule: Verifier
    seen: list[tuple[bool, int]]

    def verify(self, draft: Draft, target_rows, dice) -> Verdict:
        verdict = self.rule.verify(draft, target_rows, dice)
        self.seen.append((draft.branches, int(verdict.num_accepted.sum())))
        return verdict


CHAINS = {
    "model-block": (None, Block(), Fixed(num_speculative_tokens=4)),
    "model-token-heuristic": (None, Token(), Heuristic(num_speculative_tokens=3)),
    "ngram-match": (Ngram(prompt_lookup_min=1), Match(), Fixed(num_speculative_tokens=5)),
    "suffix-block": (Suffix(min_match=1), Block(), Fixed(num_speculative_tokens=6)),
    "model-greedy-block": (None, GreedyBlock(), Fixed(num_speculative_tokens=3)),
    "model-block-adaedl": (None, Block(), Adaedl(num_speculative_tokens=6)),
    "model-token-svip": (None, Token(), Svip(num_speculative_tokens=6)),
    "model-block-tetris": (None, Block(), Tetris(num_speculative_tokens=2, extra=2)),
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


TREES = {
    "iid": "iid:num_paths=3",
    "iid_dedup": "iid:num_paths=3,dedup=true",
    "gumbel": "gumbel:branching=3x2x1",
    "beam": "beam:width=3",
    "top_plus_one": "top_plus_one:width=2",
    "dynamic": "dynamic:width=3,num_nodes=9",
    "lattice": "lattice:num_nodes=9",
    "fixed": "fixed:children=2x2x0x1",
    "fixed_chosen": "fixed:children=2x2x0x1,chosen=true",
    "opt": "opt:num_nodes=8,threshold=0.1",
}


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_tree_with_every_verifier_gives_what_generate_gives(name):
    model, count = tiny(name), 16
    outputs = [expected(model, prompt)[:count] for prompt in prompts()]
    target, drafter = LanguageModel(model, max_slots=3), Model(lm=noisy_twin(name))
    for label, text in TREES.items():
        tree = catalog.make("tree", text)
        rules = [rule for rule, kinds in LOSSLESS.items() if KINDS[tree.structure] in kinds]
        assert rules
        for rule in rules:
            watched = Watched(rule=catalog.make("verifier", rule), seen=[])
            length = Fixed(num_speculative_tokens=3)
            parts = Parts(target=target, drafter=drafter, tree=tree, verifier=watched, length=length)
            engine = Engine(parts, max_slots=3)
            made = engine.generate(prompts(), max_new_tokens=count, sampling=GREEDY)
            engine.rest()
            assert [output.tokens for output in made] == outputs, (label, rule)
            assert any(branches for branches, _ in watched.seen), (label, rule)
            assert sum(accepted for _, accepted in watched.seen) > 0, (label, rule)
