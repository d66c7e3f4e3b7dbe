"""Copies and a drawn chain in one tree: the law by enumeration, greedy texts, what each drafter learns, refusals."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch

import outrider
from outrider import catalog
from outrider.assembly import structure_of, why_not
from outrider.core.types import Draft, InputError, Running, Sampling, ShortList
from outrider.decoding.pearl import PearlDecoding
from outrider.drafters.first import FirstDrafter, FirstOf
from outrider.drafters.model import ModelDrafter, ModelPath
from outrider.drafters.ngram import NgramDrafter
from outrider.drafters.protocol import Drafter
from outrider.drafters.suffix import SuffixDrafter
from outrider.drafters.union import UnionDrafter, UnionOf
from outrider.embedded import EMBEDDED_DRAFT, EMBEDDED_TARGET
from outrider.engine.engine import Engine
from outrider.lengths.goodput import GoodputLength
from outrider.lm.model import LanguageModel
from outrider.lm.tabular import TabularLM, random_rows
from outrider.lm.target_info import TargetInfo
from outrider.proof.enumerate import joint_law, law
from outrider.proof.rule import law_error
from outrider.trees.chain import ChainTree
from outrider.trees.union import united
from outrider.verifiers.protocol import Verifier
from tests.world.drafts import chains
from tests.world.heads import head
from tests.world.models import drafter_of, target
from tests.world.parts import parts_of
from tests.world.several import GREEDY, TEXTS, Recording, check_prediction, check_text_behind_the_context, plain
from tests.world.tables import tables
from tests.world.verifiers import judges_of, verifier

pytestmark = pytest.mark.usefixtures("float64_stays_float64")
BOUND = 1e-12
BIASED = 1e-3
RULES = judges_of("union of chains")
TEXT = [0, 1, 2, 0, 1]


@dataclass(frozen=True, kw_only=True)
class Noting(UnionDrafter):
    """Notes the drafts, step by step."""

    drafts: list[Draft] = field(default_factory=list, compare=False)

    def unite(self, states: Sequence[Running], drafts: Sequence[Draft]) -> Draft:
        self.drafts.append(super().unite(states, drafts))
        return self.drafts[-1]


def on_tables(vocab: int, *copying: Drafter, seed: int = 101) -> Noting:
    return Noting(drafters=(*copying, ModelDrafter(lm=TabularLM(random_rows(vocab, seed), vocab))))


def over_llama(*copying: Drafter, slots: int = 8, context: int | None = None) -> Noting:
    copies = copying or (SuffixDrafter(min_match=1),)
    return Noting(drafters=(*copies, drafter_of("model", slots, context)))


def tree(draft: Draft, request: int = 0) -> dict[tuple[int, ...], list[int]]:
    """The tokens of the children of each node, in their order, by the tokens on the way to it."""
    paths: dict[int, tuple[int, ...]] = {}
    for node in range(int(draft.offsets[request]), int(draft.offsets[request + 1])):
        parent = int(draft.parents[node])
        paths[node] = (*paths[parent], int(draft.tokens[node])) if parent >= 0 else ()
    links = {node: draft.links[draft.first_child[node] : draft.first_child[node + 1]] for node in paths}
    return {paths[node]: draft.tokens[torch.from_numpy(links[node])].tolist() for node in paths if len(links[node])}


def test_a_token_that_both_have_is_one_node_and_a_drawn_child_stands_first():
    rows = torch.full((3, 9), 1 / 9)
    union = united([chains([[1, 2, 3]], None), chains([[1, 5]], None)], chains([[1, 4, 3]], rows))
    assert tree(union.draft) == {(): [1], (1,): [4, 2, 5], (1, 4): [3], (1, 2): [3]}
    assert union.draft.structure == "union"
    # The drawn tokens keep their numbers, and each drafter finds its own.
    assert union.draft.numbers.tolist() == [0, 1, 2, 3, 4, 5, 6]
    assert union.numbers == [[{0: 0, 1: 1, 4: 2, 5: 3}], [{0: 0, 1: 1, 6: 2}], [{0: 0, 1: 1, 2: 2, 3: 3}]]
    # The rows belong to the drawn nodes alone.
    assert union.draft.row_of.tolist() == [0, 1, 2, -1, -1, -1, -1]


def test_drafts_of_a_batch_are_joined_request_by_request():
    union = united([chains([[1, 2], [], [6]], None)], chains([[3], [4, 5], []], torch.full((3, 9), 1 / 9)))
    trees = [tree(union.draft, request) for request in range(3)]
    assert trees == [{(): [3, 1], (1,): [2]}, {(): [4], (4,): [5]}, {(): [6]}]
    assert union.draft.offsets.tolist() == [0, 4, 7, 9]
    assert (union.draft.parents < np.arange(9)).all()


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(
    ("vocab", "depth", "copying"),
    [
        (3, 3, (SuffixDrafter(),)),
        (4, 2, (NgramDrafter(prompt_lookup_min=1), SuffixDrafter())),
        (5, 1, (NgramDrafter(),)),
    ],
    ids=["suffix", "ngram and suffix", "ngram"],
)
def test_a_step_keeps_the_law(rule, vocab, depth, copying):
    drafter = on_tables(vocab, *copying)
    parts = tables(vocab, verifier(rule), depth, seed=7, drafter=drafter)
    assert why_not(parts) is None
    found = law(parts, TEXT, 1)
    assert found.error < BOUND
    assert any(draft.branches for draft in drafter.drafts)
    # The drawn chain is worth what it is worth alone, and a copy is worth more than nothing.
    assert found.accepted > law(replace(parts, drafter=drafter.drafters[-1]), TEXT, 1).accepted + 1e-3


@pytest.mark.parametrize("rule", RULES)
def test_steps_of_a_batch_keep_their_laws(rule):
    drafter = on_tables(2, NgramDrafter())
    parts = tables(2, verifier(rule), 2, seed=4, drafter=drafter)
    for found in joint_law(parts, [[0, 1, 0, 0, 1], [0, 0, 1]]):
        assert found.error < BOUND
    [found] = joint_law(parts, [[0, 1, 0, 0, 1]], num_steps=2)
    assert found.error < BOUND


@pytest.mark.parametrize("rule", RULES)
def test_a_short_list_keeps_the_law(rule):
    few = ShortList.of(torch.arange(2), 3)
    short = ModelDrafter(lm=TabularLM(random_rows(2, seed=9), 2), short_list=few)
    # The copy is the token that the draft model cannot draw.
    parts = tables(3, verifier(rule), 2, seed=4, drafter=UnionDrafter(drafters=(NgramDrafter(), short)))
    assert law(parts, [0, 1, 2, 0, 1], 1).error < BOUND


@pytest.mark.parametrize("rule", RULES)
def test_the_law_holds_at_other_temperatures_and_behind_filters(rule):
    parts = tables(4, verifier(rule), 2, seed=7, drafter=on_tables(4, NgramDrafter()))
    for sampling in (Sampling(temperature=0.4), Sampling(top_k=2), Sampling(temperature=0.0)):
        assert law(parts, TEXT, 1, sampling).error < BOUND


@pytest.mark.parametrize("rule", ["recursive", "traversal"])
def test_copies_beside_a_chosen_tree_are_chosen_too(rule):
    drafter = on_tables(4, NgramDrafter())
    dynamic = catalog.make("tree", "dynamic:width=2,num_nodes=4")
    parts = tables(4, verifier("match"), 2, seed=7, drafter=drafter, tree=dynamic)
    assert why_not(parts) is None
    assert law(parts, TEXT, 1).error < BOUND
    assert {draft.structure for draft in drafter.drafts} == {"deterministic"}
    assert "chosen tree" in why_not(replace(parts, verifier=verifier(rule)))


@dataclass(frozen=True, kw_only=True)
class Mislabelled:
    """A rule that takes copies for draws."""

    rule: Verifier
    structure: str

    def verify(self, draft, target_rows, dice):
        return self.rule.verify(replace(draft, structure=self.structure), target_rows, dice)


@pytest.mark.parametrize("structure", ["without_replacement", "iid"])
def test_a_rule_that_takes_copies_for_draws_is_caught(structure):
    rule = Mislabelled(rule=verifier("recursive"), structure=structure)
    assert law(tables(4, rule, 2, seed=7, drafter=on_tables(4, NgramDrafter())), TEXT, 1).error > BIASED


def test_recursive_accepts_the_most_that_any_rule_can_at_one_node():
    target_row, draft_row = random_rows(4, 7), random_rows(4, 101)
    p, q = target_row(tuple(TEXT)), draft_row(tuple(TEXT))
    parts = tables(4, verifier("recursive"), 1, seed=7, drafter=on_tables(4, NgramDrafter()))
    copy = 2
    most = p[copy] + np.minimum(p, q)[np.arange(4) != copy].sum()
    assert law(parts, TEXT, 1).accepted == pytest.approx(most, abs=1e-12)
    # The copy first would leave less for the drawn token.
    assert most > p[copy] + np.minimum(p, (1 - p[copy]) * q)[np.arange(4) != copy].sum() + 1e-3


def test_prove_enumerates_it():
    for rule in ("recursive", "traversal"):
        assert law_error(tables(2, verifier(rule), 2, drafter=on_tables(2, SuffixDrafter()))) < BOUND
    over_first = FirstDrafter(drafters=(NgramDrafter(), on_tables(2, NgramDrafter())))
    assert law_error(tables(2, verifier("traversal"), 2, drafter=over_first)) < BOUND


@pytest.mark.parametrize(
    ("written", "rule"), [("chain", "traversal"), ("chain", "recursive"), ("dynamic:width=2,num_nodes=6", "match")]
)
def test_greedy_texts_of_ragged_batches_are_those_of_the_target_alone(written, rule):
    drafter = over_llama(NgramDrafter(prompt_lookup_min=1), SuffixDrafter(min_match=1))
    busy = Engine(parts_of(target(), drafter, tree=written, verifier=rule), max_slots=4)
    made = busy.generate(TEXTS, max_new_tokens=24, sampling=GREEDY)
    busy.rest()
    assert [out.tokens for out in made] == plain(TEXTS, 24)
    assert any(draft.branches for draft in drafter.drafts)
    assert sum(out.num_accepted_tokens for out in made) > 0


def test_a_batch_of_greedy_and_drawn_requests_gives_each_its_own():
    settings = [GREEDY if i % 2 else Sampling(temperature=1.0, seed=i) for i in range(len(TEXTS))]

    def texts(some: Sequence[int]) -> list[list[int]]:
        busy = Engine(parts_of(target(), over_llama(), verifier="traversal", length=3), max_slots=5)
        made = busy.generate([TEXTS[i] for i in some], max_new_tokens=20, sampling=[settings[i] for i in some])
        return [out.tokens for out in made]

    together = texts(range(len(TEXTS)))
    assert [texts([i])[0] for i in range(len(TEXTS))] == together
    assert together[1] == plain(TEXTS[1:2], 20)[0]


def test_the_draft_model_reads_what_was_copied_in_its_next_forward():
    alone, beside = (Recording(lm=drafter_of("model").lm) for _ in range(2))
    forwards = []
    for drafter in (alone, UnionDrafter(drafters=(SuffixDrafter(min_match=1), beside))):
        busy = Engine(parts_of(target(), drafter, verifier="match", length=3), max_slots=1)
        out = busy.generate(TEXTS[3:], max_new_tokens=24, sampling=GREEDY, ignore_eos=True)
        forwards.append((sum(each.num_steps for each in out), (alone, beside)[len(forwards)].lm.num_forwards))
    both = alone.guesses.keys() & beside.guesses.keys()
    assert len(both) > 3
    for text in both:
        torch.testing.assert_close(beside.guesses[text], alone.guesses[text], rtol=0, atol=1e-12)
    # Fewer steps, and no more than a forward for each token that it drafts.
    assert forwards[1][0] < forwards[0][0]
    assert forwards[1][1] <= 3 * forwards[1][0]


def test_copies_go_on_where_the_context_of_the_draft_model_ends():
    check_text_behind_the_context(over_llama(context=24), "traversal")


def test_a_prediction_of_the_client_is_copied_and_counted():
    check_prediction(over_llama(SuffixDrafter()), "traversal")


def test_requests_with_and_without_a_union_run_in_one_batch():
    union = over_llama()
    others = [drafter_of("model"), NgramDrafter(prompt_lookup_min=1)]
    busy = Engine(parts_of(target(), union, verifier="traversal"), max_slots=5)
    busy.route = lambda request: [union, *others][len(request.prompt) % 3]
    made = busy.generate(TEXTS, max_new_tokens=24, sampling=GREEDY)
    assert [out.tokens for out in made] == plain(TEXTS, 24)
    assert len({len(text) % 3 for text in TEXTS}) > 1


def test_first_may_copy_alone_or_draft_a_union():
    union = over_llama()
    busy = Engine(
        parts_of(target(), FirstDrafter(drafters=(SuffixDrafter(min_match=1), union)), verifier="traversal"),
        max_slots=4,
    )
    assert why_not(busy.parts) is None
    made = busy.generate(TEXTS, max_new_tokens=24, sampling=GREEDY)
    assert [out.tokens for out in made] == plain(TEXTS, 24)
    assert union.drafts


SOME_HEADS = ("medusa", "eagle3", "dflash", "mtp")
"""Heads of each idea: on the last state, features continued, blocks, layers of the target."""


@pytest.mark.parametrize("kind", SOME_HEADS)
def test_a_head_sees_every_step_and_the_text_is_the_targets(kind):
    model = target()
    drafter = Noting(drafters=(SuffixDrafter(min_match=1), head(kind, TargetInfo.of(model, None))))
    for written, rule in (("chain", "traversal"), ("dynamic:width=2,num_nodes=6", "match")):
        drafter.drafts.clear()
        busy = Engine(parts_of(model, drafter, tree=written, verifier=rule), max_slots=4)
        made = busy.generate(TEXTS, max_new_tokens=20, sampling=GREEDY)
        busy.rest()
        assert [out.tokens for out in made] == plain(TEXTS, 20), written
        assert any(draft.branches for draft in drafter.drafts), written


@pytest.mark.parametrize("kind", ["medusa", "eagle3"])
def test_a_head_keeps_the_law_beside_copies(kind):
    drafter = UnionDrafter(drafters=(NgramDrafter(), head(kind, TargetInfo.of(target(), None))))
    assert law_error(tables(2, verifier("traversal"), 2, drafter=drafter)) < BOUND


PAIR = (SuffixDrafter(min_match=3), ModelPath(path="there/small", dtype="float32"))


@pytest.mark.parametrize(
    "written",
    [
        "union:suffix:min_match=3,model:path=there/small,dtype=float32",
        {"union": ["suffix:min_match=3", "model:path=there/small,dtype=float32"]},
        {"union": PAIR},
    ],
    ids=["text", "texts", "objects"],
)
def test_it_is_written_as_first_is(written):
    made = catalog.make("drafter", written)
    assert made == UnionOf(drafters=PAIR)
    assert catalog.name_of(made) == "union"


def test_a_component_that_holds_others_takes_all_behind_it():
    made = catalog.make("drafter", "first:ngram,union:suffix:min_match=3,model:path=there/small,dtype=float32")
    assert made == FirstOf(drafters=(NgramDrafter(), UnionOf(drafters=PAIR)))
    assert made == catalog.make("drafter", {"first": ["ngram", {"union": PAIR}]})


@pytest.mark.parametrize(
    ("written", "sentence"),
    [
        ("union:suffix", "union needs two drafters or more, as in union:suffix,model:path=DIR, got 1"),
        ("union:model:path=a,model:path=b", "drafter 1 of union must copy, so it is ngram or suffix"),
        ("union:ngram,suffix", "the last drafter of union must be a draft model or a head"),
        ("union:ngram,first:suffix,model:path=a", "the last drafter of union must be a draft model or a head"),
        ("union:ngram,union:suffix,model:path=a", "the last drafter of union must be a draft model or a head"),
    ],
)
def test_what_makes_no_union_is_refused(written, sentence):
    with pytest.raises(InputError) as error:
        catalog.make("drafter", written)
    assert sentence in str(error.value)


def cell(tree: str, rule: str, **more: object) -> str | None:
    return why_not(replace(parts_of(target(), over_llama(), tree=tree, verifier=rule, length=2), **more))


def test_it_is_refused_where_the_law_would_not_hold():
    for rule in ("token", "block", "greedy_block", "kseq", "multipath", "top_plus_one"):
        reason = cell("chain", rule)
        assert "does not keep the target's law on a union of chains; use verifier 'match'" in reason
        assert "'traversal'" in reason
    assert "have several ends" in cell("chain", "traversal", decoding=PearlDecoding(num_speculative_tokens=2))
    assert "use length 'fixed' with drafter 'union'" in cell("chain", "traversal", length=GoodputLength())
    assert "use tree 'chain' or 'dynamic'" in cell("gumbel:branching=2x1", "recursive")
    assert "use tree 'chain' or 'dynamic'" in cell("iid", "recursive")


def test_a_target_that_takes_no_trees_is_refused():
    class Chains(LanguageModel):
        chains_only = "keeps a state that cannot branch"

    parts = parts_of(target(), over_llama(), verifier="traversal")
    parts.target.__class__ = Chains
    assert why_not(parts) == "the target keeps a state that cannot branch"
    assert why_not(replace(parts, drafter=parts.drafter.drafters[-1])) is None


def test_a_target_and_a_text_are_enough():
    texts, options = ["The sun is warm. The sun is"], {"max_slots": 2, "dtype": "float64"}
    said = []
    for drafter in ("none", f"union:suffix,model:path={EMBEDDED_DRAFT}", f"union:ngram,{EMBEDDED_DRAFT}"):
        engine = outrider.load(EMBEDDED_TARGET, drafter=drafter, **options)
        [output] = engine.generate(texts, max_new_tokens=24, sampling=Sampling(temperature=0))
        said.append(output.tokens)
    assert said[0] == said[1] == said[2]
    assert output.num_accepted_tokens > 0
    # Neither a verifier nor a length was named.
    assert catalog.name_of(engine.parts.drafter) == "union"
    assert catalog.name_of(engine.parts.verifier) == "traversal"
    assert catalog.name_of(engine.parts.length) == "fixed"
    assert structure_of(engine.parts.drafter, ChainTree()) == "union"
