"""Greedy identity in float64 with transformers' own generate, per architecture: chains, and trees with verifiers."""

from dataclasses import dataclass
from functools import cache

import pytest
import torch
from transformers import PreTrainedModel

from outrider import catalog
from outrider.core.types import Draft, Sampling, Verdict
from outrider.drafters.first import FirstDrafter
from outrider.drafters.model import ModelDrafter
from outrider.drafters.ngram import NgramDrafter
from outrider.drafters.suffix import SuffixDrafter
from outrider.engine.engine import Engine
from outrider.lengths.adaedl import AdaedlLength
from outrider.lengths.costs import CostTable
from outrider.lengths.experience import Experience
from outrider.lengths.fixed import FixedLength
from outrider.lengths.goodput import GoodputLength
from outrider.lengths.heuristic import HeuristicLength
from outrider.lengths.svip import SvipLength
from outrider.lengths.tetris import TetrisLength
from outrider.lm.model import LanguageModel
from outrider.verifiers.block import BlockVerifier
from outrider.verifiers.greedy_block import GreedyBlockVerifier
from outrider.verifiers.match import MatchVerifier
from outrider.verifiers.protocol import Verifier
from outrider.verifiers.token import TokenVerifier
from outrider.verifiers.traits import KINDS
from tests.clocks import made_up
from tests.world.models import prompts
from tests.world.packed import packed
from tests.world.parts import parts_of
from tests.world.verifiers import judges_of, verifier
from tests.world.zoo import ARCHITECTURES, tiny

pytestmark = pytest.mark.usefixtures("float64_stays_float64")
GREEDY = Sampling(temperature=0.0, seed=0)
NUM_TOKENS = 28
PACKED = "packed llama"


def model_of(name: str) -> PreTrainedModel:
    """A tiny model of an architecture, or one with packed weights."""
    return packed(tiny("llama")) if name == PACKED else tiny(name)


@cache
def expected(name: str) -> list[list[int]]:
    """What transformers' own loop says after each prompt."""
    model, outputs = model_of(name), []
    for prompt in prompts(13, 5, 21):
        ids = torch.tensor([prompt])
        said = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=NUM_TOKENS, eos_token_id=None
        )
        outputs.append(said[0, len(prompt) :].tolist())
    return outputs


def noisy_twin(name: str, noise: float = 0.02) -> LanguageModel:
    """A draft model that agrees with the target often, not always: its weights with some noise."""
    model = model_of(name)
    random = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(noise * weight.std() * torch.randn(weight.shape, generator=random, dtype=weight.dtype))
    return LanguageModel(model, max_slots=3)


@dataclass(frozen=True, kw_only=True)
class Together:
    """Verifiers that must decide the same, so that one run is the run of each; notes drafts that branch and what of
    them is accepted.
    """

    rules: dict[str, Verifier]
    seen: list[tuple[bool, int]]

    def verify(self, draft: Draft, target_rows, dice) -> Verdict:
        verdicts = {name: rule.verify(draft, target_rows, dice) for name, rule in self.rules.items()}
        said = {name: emitted(draft, verdict) for name, verdict in verdicts.items()}
        first, *_ = verdicts
        assert all(tokens == said[first] for tokens in said.values()), said
        self.seen.append((draft.branches, int(verdicts[first].num_accepted.sum())))
        return verdicts[first]


def emitted(draft: Draft, verdict: Verdict) -> list[list[int]]:
    """The tokens that a verdict lets each request emit."""
    paths = [path[:count] for path, count in zip(verdict.paths, verdict.num_accepted.tolist(), strict=True)]
    accepted = [draft.tokens[torch.from_numpy(path)].tolist() for path in paths]
    return [[*tokens, following] for tokens, following in zip(accepted, verdict.next_tokens.tolist(), strict=True)]


CHAINS = {
    "model-block": (None, BlockVerifier(), FixedLength(num_speculative_tokens=4)),
    "model-token-heuristic": (None, TokenVerifier(), HeuristicLength(num_speculative_tokens=3)),
    "ngram-match": (NgramDrafter(prompt_lookup_min=1), MatchVerifier(), FixedLength(num_speculative_tokens=5)),
    "suffix-block": (SuffixDrafter(min_match=1), BlockVerifier(), FixedLength(num_speculative_tokens=6)),
    "model-greedy-block": (None, GreedyBlockVerifier(), FixedLength(num_speculative_tokens=3)),
    "model-block-adaedl": (None, BlockVerifier(), AdaedlLength(num_speculative_tokens=6)),
    "model-token-svip": (None, TokenVerifier(), SvipLength(num_speculative_tokens=6)),
    "model-block-tetris": (None, BlockVerifier(), TetrisLength(num_speculative_tokens=2, extra=2)),
    "model-block-goodput": (None, BlockVerifier(), GoodputLength()),
    "first-block": ("first", BlockVerifier(), FixedLength(num_speculative_tokens=4)),
    "first-match-goodput": ("first", MatchVerifier(), GoodputLength()),
}


@pytest.mark.parametrize("name", [*ARCHITECTURES, PACKED])
def test_chains_give_what_generate_gives(name):
    model, outputs = model_of(name), expected(name)
    assert len(set(map(tuple, outputs))) > 1
    for label, (drafter, rule, length) in CHAINS.items():
        target = LanguageModel(model, max_slots=3)
        guesser = ModelDrafter(lm=noisy_twin(name)) if drafter in (None, "first") else drafter
        parts = parts_of(
            target,
            FirstDrafter(drafters=(SuffixDrafter(min_match=1), guesser)) if drafter == "first" else guesser,
            verifier=rule,
            length=length,
            experience=Experience(CostTable.of_formula(made_up)),
        )
        made = Engine(parts, max_slots=3).generate(prompts(13, 5, 21), max_new_tokens=NUM_TOKENS, sampling=GREEDY)
        assert [output.tokens for output in made] == outputs, label
        if drafter in (None, "first"):
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


@pytest.mark.parametrize("name", [*ARCHITECTURES, PACKED])
def test_every_tree_with_every_verifier_gives_what_generate_gives(name):
    model, count = model_of(name), 16
    outputs = [output[:count] for output in expected(name)]
    target, drafter = LanguageModel(model, max_slots=3), ModelDrafter(lm=noisy_twin(name))
    for label, text in TREES.items():
        tree = catalog.make("tree", text)
        rules = {name: verifier(name) for name in judges_of(KINDS[tree.structure])}
        assert rules
        together = Together(rules=rules, seen=[])
        length = FixedLength(num_speculative_tokens=3)
        parts = parts_of(target, drafter, tree=tree, verifier=together, length=length)
        engine = Engine(parts, max_slots=3)
        made = engine.generate(prompts(13, 5, 21), max_new_tokens=count, sampling=GREEDY)
        engine.rest()
        assert [output.tokens for output in made] == outputs, label
        assert any(branches for branches, _ in together.seen), label
        assert sum(accepted for _, accepted in together.seen) > 0, label


@pytest.mark.parametrize("name", ["llama", PACKED])
def test_trees_of_copies_give_what_generate_gives(name):
    outputs = expected(name)
    for drafter in (NgramDrafter(prompt_lookup_min=1), SuffixDrafter(min_match=1)):
        for tree in ("dynamic:num_nodes=12", "opt:num_nodes=8,threshold=0.1"):
            together = Together(rules={name: verifier(name) for name in judges_of("chosen tree")}, seen=[])
            target = LanguageModel(model_of(name), max_slots=3)
            engine = Engine(parts_of(target, drafter, tree=tree, verifier=together, length=6), max_slots=3)
            # The prompts repeat themselves, and so do their outputs.
            made = engine.generate(prompts(13, 5, 21), max_new_tokens=NUM_TOKENS, sampling=GREEDY)
            assert [output.tokens for output in made] == outputs, (drafter, tree)
            assert any(branches for branches, _ in together.seen), (drafter, tree)
