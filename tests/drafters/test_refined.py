"""Blockwise heads whose drafts are refined: by a small language model, or by paths of an n-gram model."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch

from outrider import catalog
from outrider.assembly import why_not
from outrider.core.dice import PhiloxDice
from outrider.core.types import Draft, InputError, Request, Running, Sampling
from outrider.drafters.model import ModelDrafter
from outrider.drafters.protocol import Drafter, Observed
from outrider.engine.engine import Engine
from outrider.heads.parts.best_paths import best_paths
from outrider.lengths.fixed import FixedLength
from outrider.lm.model import LanguageModel
from outrider.lm.protocol import Segment
from outrider.lm.target_info import TargetInfo
from outrider.trees.chain import ChainTree
from outrider.trees.chained import is_chained
from outrider.trees.grow import grow
from tests.world.heads import head
from tests.world.models import llama, prompts, target
from tests.world.own_heads import rescored, with_paths
from tests.world.parts import parts_of
from tests.world.wrapped import Breaks, Wrapped
from tests.world.zoo import VOCAB

pytestmark = pytest.mark.usefixtures("float64_stays_float64")

GREEDY, DRAWN = Sampling(temperature=0.0, seed=0), Sampling(temperature=0.9, seed=3)
CELLS = {
    "rescored": ("chain", "block"),
    "paths": ("chain", "block"),
    "paths as a chosen tree": ("dynamic:width=3,num_nodes=12", "match"),
    "paths as a drawn tree": ("gumbel:branching=2x2x1", "traversal"),
}


def rescorer(slots: int) -> ModelDrafter:
    return ModelDrafter(lm=LanguageModel(llama(num_layers=1), max_slots=slots))


def drafter_of(kind: str, around: TargetInfo, **fields: object) -> Drafter:
    if kind == "rescored":
        return rescored(around, rescorer(around.max_slots), **fields)
    return with_paths(around, **fields)


def engine(kind: str, *, slots: int = 4, lm: LanguageModel | None = None, drafter: Drafter | None = None) -> Engine:
    model, (tree, rule) = lm or target(slots), CELLS[kind]
    parts = parts_of(model, drafter or drafter_of(kind, TargetInfo.of(model, None)), tree=tree, verifier=rule)
    return Engine(parts, max_slots=slots)


@pytest.mark.parametrize("kind", CELLS)
def test_greedy_output_of_ragged_batches_is_that_of_plain_decoding(kind):
    busy, these = engine(kind), prompts(1, 9, 70, 2, 14, 5)
    drafted = busy.generate(these, max_new_tokens=20, sampling=GREEDY)
    plain = busy.plain().generate(these, max_new_tokens=20, sampling=GREEDY)
    assert [out.tokens for out in drafted] == [out.tokens for out in plain]
    assert sum(out.num_draft_tokens for out in drafted) > 0
    if kind == "rescored":
        assert sum(out.num_accepted_tokens for out in drafted) > 0


def drafts(busy: Engine, these: Sequence[Sequence[int]]) -> dict[tuple[int, ...], object]:
    """Every guess at a root while these prompts run, by the text before it."""
    if not isinstance(busy.parts.drafter, Noted):
        busy.parts = replace(busy.parts, drafter=Noted(inner=busy.parts.drafter))
    busy.parts.drafter.found.clear()
    busy.generate(these, max_new_tokens=12, sampling=GREEDY)
    return dict(busy.parts.drafter.found)


@dataclass(frozen=True, kw_only=True)
class Noted(Wrapped):
    """Notes what a drafter guesses, by the text before it and the depth of its draft."""

    found: dict[tuple[int, ...], object] = field(default_factory=dict)

    def begin(self, states: Sequence[Running], depths: Sequence[int]):
        guess = self.inner.begin(states, depths)
        rows = guess.tokens.tolist() if guess.logits is None else guess.logits.clone()
        # The best paths of a shorter draft are others.
        for state, depth, row in zip(states, depths, rows, strict=True):
            self.found[*state.tokens, -depth] = row
        return guess


def same(one: dict, other: dict) -> None:
    shared = one.keys() & other.keys()
    assert len(shared) > 3
    for key in shared:
        if isinstance(one[key], int):
            assert one[key] == other[key]
        else:
            assert torch.allclose(one[key].exp(), other[key].exp(), atol=1e-9)


@pytest.mark.parametrize("kind", ["rescored", "paths"])
def test_a_draft_in_a_batch_is_that_of_the_request_alone_and_anew(kind):
    these = prompts(9, 30, 3, 80)
    together, alone, anew = drafts(engine(kind), these), {}, {}
    for prompt in these:
        alone |= drafts(engine(kind, slots=1), [prompt])
    for text in list(together)[::7]:
        anew |= drafts(engine(kind, slots=2), [list(text[:-1]), [3] * 200])
    same(together, alone)
    same(together, anew)


@pytest.mark.parametrize("kind", ["rescored", "paths"])
def test_a_prompt_that_goes_on_from_another_is_drafted_from_where_they_part(kind):
    busy, [prompt] = engine(kind), prompts(40)
    busy.parts = replace(busy.parts, drafter=Noted(inner=busy.parts.drafter))
    [first] = busy.generate([prompt], max_new_tokens=10, sampling=GREEDY)
    for shared, more in ((len(prompt) + 9, [5, 6]), (len(prompt) + 4, [7] * 9), (20, [8, 9, 8])):
        text = [*[*prompt, *first.tokens][:shared], *more]
        same(drafts(busy, [text]), drafts(engine(kind), [text]))
    assert busy.num_reused_tokens > 0


@pytest.mark.parametrize("kind", CELLS)
def test_a_step_taken_back_changes_no_output(kind):
    these, calm = prompts(30, 50), engine(kind)
    expected = [out.tokens for out in calm.generate(these, max_new_tokens=12, sampling=DRAWN)]
    calm.rest()
    inner = drafter_of(kind, TargetInfo.of(calm.parts.target, None))
    broken = engine(kind, lm=calm.parts.target, drafter=Breaks(inner=inner))
    assert [out.tokens for out in broken.generate(these, max_new_tokens=12, sampling=DRAWN)] == expected
    assert broken.parts.drafter.left[0] < 0


def drafted(drafter: Drafter, lm: LanguageModel, texts: Sequence[Sequence[int]], tree: object, gamma: int = 4) -> Draft:
    """The drafts behind some texts."""
    states = []
    for i, text in enumerate(texts):
        request = Request(id=str(i), prompt=tuple(text), max_new_tokens=99, sampling=GREEDY)
        state = Running(request=request, tokens=list(text), slot=lm.open(), drafter=drafter)
        state.drafter_state = drafter.open(request)
        seen = lm.extend([Segment(slot=state.slot, tokens=torch.tensor(text[:-1]))], taps=drafter.taps)
        lm.commit({state.slot: range(len(text) - 1)})
        observed = Observed(tokens=np.array(text[:-1]), offsets=np.array([0, len(text) - 1]), taps=seen.taps)
        drafter.observe([state], observed)
        states.append(state)
    length = FixedLength(num_speculative_tokens=gamma)
    dice = PhiloxDice(seeds=[0] * len(texts), steps=[0] * len(texts))
    made = grow(drafter, tree, length, states, [gamma] * len(states), dice, torch.device("cpu"))
    for state in states:
        drafter.close(state.drafter_state)
        lm.release(state.slot)
    return made


def paths_of(draft: Draft, request: int = 0) -> set[tuple[int, ...]]:
    """The tokens on the way to every leaf of a draft."""
    first, end = int(draft.offsets[request]), int(draft.offsets[request + 1])
    tokens, found = draft.tokens.tolist(), set()
    inner = set(draft.parents[first:end].tolist())
    for node in range(first, end):
        if node not in inner:
            path = []
            while draft.parents[node] >= 0:
                path.append(tokens[node])
                node = int(draft.parents[node])
            found.add(tuple(path[::-1]))
    return found


def chains(draft: Draft) -> list[tuple[int, ...]]:
    return [next(iter(paths_of(draft, i))) for i in range(draft.num_requests)]


def raw(lm: LanguageModel, texts: Sequence[Sequence[int]]) -> list[tuple[int, ...]]:
    """The heads' own greedy drafts."""
    return chains(drafted(head("blockwise", TargetInfo.of(lm, None)), lm, texts, ChainTree()))


def test_a_rescorer_that_does_not_count_leaves_the_heads_draft():
    lm, texts = target(8), prompts(9, 30, 14, 21, 6)
    around = TargetInfo.of(lm, None)
    expected = raw(lm, texts)
    assert chains(drafted(rescored(around, rescorer(8), lam=0.0), lm, texts, ChainTree())) == expected
    assert chains(drafted(rescored(around, rescorer(8), top_k=1), lm, texts, ChainTree())) == expected
    assert chains(drafted(rescored(around, rescorer(8), lam=0.9), lm, texts, ChainTree())) != expected


def test_a_rescorer_that_counts_alone_drafts_what_it_would_draft():
    lm, texts = target(8), prompts(9, 30, 14)
    drafter = rescored(TargetInfo.of(lm, None), rescorer(8), lam=1.0, top_k=VOCAB)
    assert chains(drafted(drafter, lm, texts, ChainTree())) == chains(drafted(rescorer(8), lm, texts, ChainTree()))


def test_each_token_is_the_best_of_the_heads_likeliest_by_the_mixed_logits():
    lm, [text], lam, few = target(2), prompts(20), 0.6, 3
    around = TargetInfo.of(lm, None)
    [chain] = chains(drafted(rescored(around, rescorer(2), lam=lam, top_k=few), lm, [text], ChainTree()))
    model = llama(num_layers=1)
    [rows] = head_rows(lm, [text])
    for depth, token in enumerate(chain):
        with torch.no_grad():
            theirs = model(torch.tensor([[*text, *chain[:depth]]]), use_cache=False).logits[0, -1]
        best = rows[depth].topk(few).indices
        mixed = (1 - lam) * rows[depth] + lam * theirs
        assert token == int(best[mixed[best].argmax()])


def head_rows(lm: LanguageModel, texts: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    """The logits of all heads behind some texts."""
    heads = head("blockwise", TargetInfo.of(lm, None)).head
    found = []
    for text in texts:
        with torch.no_grad():
            states = lm.model.model(torch.tensor([list(text)]), use_cache=False).last_hidden_state[0, -2]
            found.append(torch.stack([heads.logits(heads(states, i), i) for i in range(4)]))
    return found


def test_one_path_without_an_ngram_model_is_the_heads_draft():
    lm, texts = target(8), prompts(9, 30, 14, 21, 6)
    around = TargetInfo.of(lm, None)
    for tree in (ChainTree(), catalog.make("tree", "dynamic:width=1,num_nodes=9")):
        found = drafted(with_paths(around, paths=1, mu=0.0), lm, texts, tree)
        assert chains(found) == raw(lm, texts)
    # With many paths, the best of them is still the heads' own.
    many = with_paths(around, paths=16, mu=0.0, top_k=4)
    tree = catalog.make("tree", "dynamic:width=16,num_nodes=99")
    found = drafted(many, lm, texts, tree)
    for i, chain in enumerate(raw(lm, texts)):
        assert chain in paths_of(found, i)
        assert len(paths_of(found, i)) == 16


def test_a_wide_tree_of_chosen_tokens_is_all_paths_and_nothing_else():
    lm, [text] = target(2), prompts(20)
    drafter = with_paths(TargetInfo.of(lm, None), paths=6, mu=0.7, top_k=4)
    found = drafted(drafter, lm, [text], catalog.make("tree", "dynamic:width=6,num_nodes=99"))
    [rows] = head_rows(lm, [text])
    best = rows.log_softmax(-1).topk(4, -1)
    expected = best_paths(
        best.indices.numpy(), best.values.numpy(), count=6, beam=64, context=text, model=drafter.model, mu=0.7
    )
    assert paths_of(found) == {tuple(path) for path in expected.tokens.tolist()}
    fewer = drafted(
        with_paths(TargetInfo.of(lm, None), paths=6, mu=0.0, top_k=4),
        lm,
        [text],
        catalog.make("tree", "dynamic:width=6,num_nodes=99"),
    )
    assert paths_of(fewer) != paths_of(found)


def test_chains_in_one_go_are_those_of_the_growth_loop():
    lm, texts = target(8), prompts(9, 30, 14)
    around = TargetInfo.of(lm, None)
    made = with_paths(around, paths=8)
    assert is_chained(made, ChainTree(), FixedLength(), [])
    assert not is_chained(rescored(around, rescorer(8)), ChainTree(), FixedLength(), [])

    @dataclass(frozen=True, kw_only=True)
    class Asked(FixedLength):
        known_ahead = False

    busy = [engine("paths", lm=target(4), drafter=None) for _ in range(2)]
    busy[1].parts = replace(busy[1].parts, length=Asked(num_speculative_tokens=3))
    one, other = ([out.tokens for out in each.generate(texts, max_new_tokens=16, sampling=DRAWN)] for each in busy)
    assert one == other


def test_a_processor_that_forbids_all_paths_gets_other_drafts():
    busy, these = engine("paths"), prompts(9, 20)

    class Even:
        """Lets even tokens through."""

        def __call__(self, input_ids, scores):
            return scores.masked_fill(torch.arange(scores.shape[-1]) % 2 == 1, -torch.inf)

    sampling = Sampling(temperature=0.8, seed=1, processors=[Even()])
    made = busy.generate(these, max_new_tokens=16, sampling=sampling)
    assert all(token % 2 == 0 for out in made for token in out.tokens)
    assert sum(out.num_draft_tokens for out in made) > 0


def test_trees_behind_a_rescorer_are_refused():
    busy = engine("rescored")
    branching = replace(busy.parts, tree=catalog.make("tree", "dynamic"), verifier=catalog.make("verifier", "match"))
    assert "a branching tree needs distributions" in why_not(branching)
    assert why_not(busy.parts) is None
    with pytest.raises(InputError, match="leave out rescorer or paths"):
        catalog.make("drafter", "blockwise:path=a,rescorer=b,paths=2")
