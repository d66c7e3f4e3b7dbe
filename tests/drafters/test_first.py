"""Several drafters for one request: the law by enumeration, greedy texts, what is read late, what is chosen and why."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import pytest
import torch

import outrider
from outrider import catalog
from outrider.assembly import why_not
from outrider.core.types import InputError, Request, Running, Sampling, ShortList, Step, Timing
from outrider.decoding.pearl import PearlDecoding
from outrider.decoding.progress import begin, end, mark, prefill, rewind
from outrider.decoding.protocol import Parts
from outrider.drafters.first import FORWARD, DraftWorth, FirstDrafter, FirstOf
from outrider.drafters.model import BACKLOG, ModelDrafter, ModelPath
from outrider.drafters.ngram import NgramDrafter
from outrider.drafters.none import NoDrafter
from outrider.drafters.protocol import Drafter
from outrider.drafters.suffix import SuffixDrafter
from outrider.embedded import EMBEDDED_DRAFT, EMBEDDED_TARGET
from outrider.engine.engine import Engine
from outrider.lengths.acceptance import Counts
from outrider.lengths.costs import CostTable, StepCost
from outrider.lengths.experience import Experience
from outrider.lengths.goodput import GoodputLength
from outrider.lm.tabular import TabularLM, random_rows
from outrider.lm.target_info import TargetInfo
from outrider.plan.table import _key_of_table
from outrider.proof.enumerate import joint_law
from outrider.proof.rule import law_error
from outrider.trees.chain import ChainTree
from outrider.trees.gumbel import GumbelTree
from outrider.trees.iid import IidTree
from outrider.trees.protocol import Tree
from outrider.trees.top_plus_one import TopPlusOneTree
from outrider.verifiers.traits import CHAINS, KINDS
from tests.world.biased import RecoversFromTheTarget
from tests.world.heads import head
from tests.world.models import drafter_of, target
from tests.world.parts import parts_of
from tests.world.several import GREEDY, TEXTS, Recording, check_prediction, check_text_behind_the_context, plain
from tests.world.tables import tables
from tests.world.verifiers import LOSSLESS, verifier

pytestmark = pytest.mark.usefixtures("float64_stays_float64")
BOUND = 1e-12
COPYING: dict[str, Drafter] = {"ngram": NgramDrafter(), "suffix": SuffixDrafter()}
TREES: dict[str, Tree] = {
    "chain": ChainTree(),
    "iid": IidTree(num_paths=2),
    "iid without repeats": IidTree(num_paths=2, dedup=True),
    "gumbel": GumbelTree(branching=(2, 1)),
    "top_plus_one": TopPlusOneTree(width=2),
    "dynamic": catalog.make("tree", "dynamic:width=2,num_nodes=4"),
}
CELLS = [
    pytest.param(tree, rule, id=f"{name}-{rule}")
    for name, tree in TREES.items()
    for rule, make in LOSSLESS.items()
    if (make.kinds >= CHAINS if name == "chain" else {KINDS[tree.structure], "chosen chain"} <= make.kinds)
    and not make.needs_pure_rows
]


@dataclass(frozen=True, kw_only=True)
class Noting(FirstDrafter):
    """Notes which drafter drafts for each request, step by step; None where none does."""

    steps: list[list[int | None]] = field(default_factory=list, compare=False)

    def choose(self, states: Sequence[Running], rooms: Sequence[int], costs: CostTable | None) -> list[Running]:
        chosen = super().choose(states, rooms, costs)
        drafters = [view.drafter for view in chosen]
        self.steps.append([None if each is self else self.drafters.index(each) for each in drafters])
        return chosen

    @property
    def used(self) -> set[int | None]:
        return {number for numbers in self.steps for number in numbers}


def on_tables(vocab: int, copying: Drafter, seed: int = 100) -> Noting:
    return Noting(drafters=(copying, ModelDrafter(lm=TabularLM(random_rows(vocab, seed), vocab))))


def over_llama(copying: Drafter | None = None, slots: int = 8, context: int | None = None) -> Noting:
    return Noting(drafters=(copying or SuffixDrafter(min_match=1), drafter_of("model", slots, context)))


def running(drafter: Drafter, *tokens: int, **more: object) -> Running:
    request = Request(id="r", prompt=tokens, max_new_tokens=99, **{"sampling": Sampling(), **more})
    return Running(request=request, tokens=list(tokens), slot=0, drafter=drafter, drafter_state=drafter.open(request))


def chosen(drafter: FirstDrafter, state: Running, room: int = 4, costs: CostTable | None = None) -> int:
    return drafter.drafters.index(drafter.choose([state], [room], costs)[0].drafter)


def learn(drafter: FirstDrafter, state: Running, accepted: int, drafted: int = 4, times: int = 1) -> None:
    """What steps tell of the drafts that were chosen last, of so many tokens each."""
    number = state.drafter_state.kind[0]
    for _ in range(times):
        step = Step(
            request="r",
            num_draft_tokens=drafted,
            num_accepted_tokens=accepted,
            tokens=(0,),
            timing=Timing(),
            num_requests=1,
            bonus=accepted == drafted,
        )
        drafter.learn(state, drafter.seen_by(number, state), step)


@pytest.mark.parametrize("copying", COPYING)
@pytest.mark.parametrize(("tree", "rule"), CELLS)
def test_steps_that_copy_and_steps_that_draft_keep_the_law_together(tree, rule, copying):
    drafter = on_tables(2, COPYING[copying])
    parts = tables(2, verifier(rule), 2, seed=3, drafter=drafter, tree=tree)
    assert why_not(parts) is None
    [found] = joint_law(parts, [[0, 1, 0, 0, 1]], num_steps=2)
    assert drafter.used == {0, 1}
    assert found.error < BOUND
    assert found.accepted > 0


@pytest.mark.parametrize("copying", COPYING)
@pytest.mark.parametrize("rule", ["token", "block", "coupled"])
def test_chains_keep_the_law_over_three_tokens_and_three_steps(rule, copying):
    drafter = on_tables(3, COPYING[copying])
    [found] = joint_law(tables(3, verifier(rule), 1, seed=5, drafter=drafter), [[0, 1, 2, 0, 1]], num_steps=3)
    assert drafter.used == {0, 1}
    assert found.error < BOUND


@pytest.mark.parametrize(("tree", "rule"), CELLS)
def test_requests_of_a_batch_that_copy_and_draft_in_one_step_keep_their_laws(tree, rule):
    drafter = on_tables(2, NgramDrafter())
    parts = tables(2, verifier(rule), 2, seed=4, drafter=drafter, tree=tree)
    for found in joint_law(parts, [[0, 1, 0, 0, 1], [0, 0, 1]]):
        assert found.error < BOUND
    assert [0, 1] in drafter.steps


def test_a_batch_keeps_its_law_where_the_draft_model_has_a_short_list():
    few = ShortList.of(torch.arange(2), 3)
    short = ModelDrafter(lm=TabularLM(random_rows(2, seed=9), 2), short_list=few)
    drafter = Noting(drafters=(NgramDrafter(), short))
    for rule in ("token", "block", "recursive"):
        parts = tables(3, verifier(rule), 2, seed=4, drafter=drafter)
        for found in joint_law(parts, [[0, 1, 2, 0, 1], [0, 0, 1]]):
            assert found.error < BOUND
        assert [0, 1] in drafter.steps


def test_a_biased_rule_is_caught_behind_it():
    drafter = on_tables(2, NgramDrafter())
    parts = tables(2, RecoversFromTheTarget(), 2, seed=3, drafter=drafter)
    assert joint_law(parts, [[0, 1, 0, 0, 1]], num_steps=2)[0].error > 1e-3


@pytest.mark.parametrize("length", [2, GoodputLength(most=2)], ids=["fixed", "goodput"])
@pytest.mark.parametrize("tree", ["chain", "gumbel"])
def test_prove_enumerates_both_kinds_of_steps(tree, length):
    if tree != "chain" and not isinstance(length, int):
        pytest.skip("goodput is for chains")
    for copying in COPYING.values():
        drafter = on_tables(2, copying)
        parts = tables(2, verifier("recursive"), length, drafter=drafter, tree=TREES[tree])
        assert law_error(parts) < BOUND


@pytest.mark.parametrize("tree", ["chain", "gumbel:branching=2x1x1", "dynamic:width=2,num_nodes=6"])
@pytest.mark.parametrize("copying", [NgramDrafter(prompt_lookup_min=1), SuffixDrafter(min_match=1)], ids=[*COPYING])
def test_greedy_texts_of_ragged_batches_are_those_of_the_target_alone(copying, tree):
    drafter = over_llama(copying)
    rule = {"chain": "block", "gumbel": "traversal", "dynamic": "match"}[tree.partition(":")[0]]
    busy = Engine(parts_of(target(), drafter, tree=tree, verifier=rule), max_slots=4)
    made = busy.generate(TEXTS, max_new_tokens=24, sampling=GREEDY)
    assert [out.tokens for out in made] == plain(TEXTS, 24)
    assert {0, 1} <= drafter.used
    assert any({0, 1} <= set(numbers) for numbers in drafter.steps)
    assert sum(out.num_accepted_tokens for out in made) > 0


def test_the_draft_model_runs_in_the_steps_alone_in_which_it_is_asked():
    drafter, forwards = over_llama(), []
    model = drafter.drafters[1].lm
    busy = Engine(parts_of(target(), drafter, length=3), max_slots=2)
    busy.add([5, 6, 7, 5, 6, 7, 5], max_new_tokens=40, sampling=GREEDY, ignore_eos=True)
    while busy.busy:
        before, steps = model.num_forwards, len(drafter.steps)
        busy.step()
        forwards += [(numbers, model.num_forwards - before) for numbers in drafter.steps[steps:]]
    drafting = [count for numbers, count in forwards if 1 in numbers]
    copying = [count for numbers, count in forwards if 1 not in numbers]
    assert drafting
    assert copying
    assert not any(copying)
    # One forward for each draft token; what was missed is a part of the first, or one more where there is much of it.
    assert all(1 <= count <= 4 for count in drafting)
    assert sum(count == 4 for count in drafting) <= 2


def test_guesses_after_a_pause_are_those_without_one():
    alone, late = (Recording(lm=drafter_of("model").lm) for _ in range(2))
    several = Noting(drafters=(SuffixDrafter(min_match=1), late))
    for drafter in (alone, several):
        busy = Engine(parts_of(target(), drafter, verifier="match", length=1), max_slots=4)
        busy.generate(TEXTS, max_new_tokens=24, sampling=GREEDY, ignore_eos=True)
    both = alone.guesses.keys() & late.guesses.keys()
    paused = [text for text in both if text[:-1] not in late.guesses and text[:-2] not in late.guesses]
    assert len(paused) > 3
    for text in both:
        torch.testing.assert_close(late.guesses[text], alone.guesses[text], rtol=0, atol=1e-12)


def test_a_long_pause_is_read_in_one_forward_before_the_drafts_own():
    drafter = over_llama()
    model = drafter.drafters[1].lm
    state = running(drafter, *range(3, 3 + 2 * BACKLOG))
    view = drafter.seen_by(1, state)
    before = model.num_forwards
    drafter.drafters[1].begin([view], [1])
    assert model.num_forwards - before == 2
    state.tokens += range(3, 3 + BACKLOG - 1)
    drafter.drafters[1].begin([drafter.seen_by(1, state)], [1])
    assert model.num_forwards - before == 3


def test_a_longer_match_promises_more():
    drafter = on_tables(9, SuffixDrafter(min_match=1))
    assert chosen(drafter, running(drafter, 1, 2, 3, 4, 5, 1, 2, 3, 4)) == 0
    assert chosen(drafter, running(drafter, 1, 2, 3, 1)) == 1
    assert chosen(drafter, running(drafter, 1, 2, 3, 4)) == 1


def test_a_match_at_the_end_of_the_text_promises_few_tokens():
    drafter = on_tables(9, NgramDrafter(prompt_lookup_max=8))
    # Eight tokens match, and one follows.
    assert chosen(drafter, running(drafter, *[7] * 9), costs=table(0.001)) == 1
    assert chosen(drafter, running(drafter, *[7, 1, 2, 3] * 4), costs=table(0.001)) == 0


def test_what_drafts_were_worth_to_the_request_changes_the_choice():
    drafter = on_tables(9, SuffixDrafter())
    match, none = (1, 2, 3, 4, 5, 1, 2, 3, 4), (1, 2, 3, 4)
    state = running(drafter, *match)
    assert chosen(drafter, state) == 0
    learn(drafter, state, accepted=0, times=8)
    assert chosen(drafter, state) == 1
    # The draft model fails as well, and another kind of match is not yet known to.
    learn(drafter, state, accepted=0, times=20)
    assert chosen(drafter, state) == 0
    other = running(drafter, *none)
    assert chosen(drafter, other) == 1
    learn(drafter, other, accepted=4, times=20)
    other.tokens += match
    assert chosen(drafter, other) == 1


def test_steps_that_fully_accept_test_no_token_more():
    assert DraftWorth().after(4, 4).rate(0.6) > DraftWorth().after(5, 4).rate(0.6) > 0.6
    drafter = on_tables(9, SuffixDrafter())
    state = running(drafter, 1, 2, 3, 4)
    drafter.choose([state], [4], None)
    learn(drafter, state, accepted=4)
    assert state.drafter_state.worth == {(1, 0): DraftWorth(tested=4, accepted=4)}
    learn(drafter, state, accepted=0, drafted=0)
    assert state.drafter_state.worth == {(1, 0): DraftWorth(tested=4, accepted=4)}
    assert drafter.choose([state], [0], None) == [state]


def table(drafter: float, kept: bool = True, catch_up: float = 0.0) -> CostTable:
    """Costs of a target whose forwards take one second, and of a drafter that takes so many for each token."""
    rows = [StepCost(requests=b, length=n, target=1.0, drafter=drafter * n) for b in (1, 2) for n in (0, 1, 2, 3, 4, 8)]
    return CostTable(rows=tuple(rows), kept=kept, catch_up=catch_up)


def test_a_dear_drafter_leaves_more_to_copies():
    drafter = on_tables(9, SuffixDrafter(min_match=1))
    state = running(drafter, 1, 2, 3, 1)
    assert [chosen(drafter, state, costs=table(cost)) for cost in (0.01, 0.5)] == [1, 0]
    # Without a match there is nothing to copy, however dear the drafter is.
    assert chosen(drafter, running(drafter, 1, 2, 3, 4), costs=table(9.0)) == 1


def test_what_the_drafter_must_read_first_is_a_cost():
    drafter = on_tables(9, SuffixDrafter(min_match=1))
    state = running(drafter, *range(3, 9), 1, 2, 1)
    assert [chosen(drafter, state, costs=table(0.01, catch_up=late)) for late in (0.0, 1.0)] == [1, 0]
    state.drafter_state = replace(state.drafter_state, num_read=len(state.tokens) - 1)
    assert chosen(drafter, state, costs=table(0.01, catch_up=0.1)) == 1


def test_a_request_that_repeats_its_text_sees_itself_and_kept_costs_alone():
    drafter = on_tables(9, SuffixDrafter(min_match=1))
    state = running(drafter, 1, 2, 3, 1, repeats=True)
    assert chosen(drafter, state, costs=table(0.5)) == 0
    assert chosen(drafter, state, costs=table(0.5, kept=False)) == 1
    crowd = CostTable(
        rows=tuple(
            StepCost(requests=b, length=n, target=1.0, drafter=(0.01 if b == 1 else 9.0) * n)
            for b in (1, 2)
            for n in (0, 4)
        ),
        kept=True,
    )
    one, other = (running(drafter, 1, 2, 3, 1, repeats=seeded) for seeded in (True, False))
    views = drafter.choose([one, other], [4, 4], crowd)
    assert [drafter.drafters.index(view.drafter) for view in views] == [1, 0]
    assert FORWARD > 0.01


def test_a_seed_gives_the_same_text_alone_and_in_a_batch():
    settings = [Sampling(temperature=1.0, seed=seed) for seed in range(len(TEXTS))]

    def texts(some: Sequence[int]) -> list[list[int]]:
        busy = Engine(parts_of(target(), over_llama(), verifier="block", length=3), max_slots=4)
        busy.generate(TEXTS[:2], max_new_tokens=9, sampling=GREEDY)
        made = busy.generate([TEXTS[i] for i in some], max_new_tokens=20, sampling=[settings[i] for i in some])
        return [out.tokens for out in made]

    together = texts(range(len(TEXTS)))
    assert [texts([i])[0] for i in range(len(TEXTS))] == together


def test_a_step_that_is_undone_is_forgotten():
    drafter = over_llama()
    parts = parts_of(target(), drafter, length=2)
    state = begin(parts, Request(id="r", prompt=(5, 6, 7, 5, 6, 7, 5), max_new_tokens=40, sampling=GREEDY))
    prefill(parts, state)
    parts.decoding.step(parts, [state])
    before, worth, number = mark(state), dict(state.drafter_state.worth), len(drafter.steps)
    parts.decoding.step(parts, [state])
    tokens = list(state.tokens)
    assert state.drafter_state.worth != worth
    rewind(parts, state, before)
    assert state.drafter_state.worth == worth
    parts.decoding.step(parts, [state])
    assert state.tokens == tokens
    assert drafter.steps[number] == drafter.steps[number + 1]
    end(parts, state)


def test_prompts_that_begin_alike_go_on_with_what_every_drafter_keeps():
    drafter = over_llama(slots=3)
    busy = Engine(parts_of(target(3), drafter), max_slots=3)
    start = TEXTS[2]
    [one] = busy.generate([start], max_new_tokens=12, sampling=GREEDY)
    longer = [[*start, *one.tokens, 4, 5], [*start, *one.tokens[:4], 9]]
    made = busy.generate(longer, max_new_tokens=12, sampling=GREEDY)
    assert any(out.reused_tokens for out in made)
    assert [out.tokens for out in made] == plain(longer, 12)
    busy.rest()
    model = drafter.drafters[1].lm
    assert len([model.open() for _ in range(3)]) == 3


def test_a_request_that_is_copied_or_cancelled_leaves_no_slot_behind():
    drafter = over_llama(slots=3)
    busy = Engine(parts_of(target(3), drafter), max_slots=3)
    ids = [busy.add(TEXTS[2], max_new_tokens=40, sampling=GREEDY) for _ in range(3)]
    for _ in range(3):
        busy.step()
    for id in ids:
        busy.cancel(id)
    busy.rest()
    model = drafter.drafters[1].lm
    assert len([model.open() for _ in range(3)]) == 3


def test_copies_go_on_where_the_context_of_the_draft_model_ends():
    check_text_behind_the_context(over_llama(context=24), "token")


def test_a_prediction_of_the_client_is_copied_and_counted():
    check_prediction(over_llama(SuffixDrafter()), "token")


PAIR = (SuffixDrafter(min_match=3), ModelPath(path="there/small", dtype="float32"))


@pytest.mark.parametrize(
    "written",
    [
        "first:suffix:min_match=3,model:path=there/small,dtype=float32",
        "first:suffix:3,model:there/small,dtype=float32",
        {"first": ["suffix:min_match=3", "model:path=there/small,dtype=float32"]},
        {"first": PAIR},
    ],
    ids=["text", "values without keys", "texts", "objects"],
)
def test_it_is_written_as_a_text_or_as_a_list(written):
    made = catalog.make("drafter", written)
    assert made == FirstOf(drafters=PAIR)
    assert catalog.name_of(made) == "first"


@pytest.mark.parametrize(
    ("written", "sentence"),
    [
        ("first", "first needs two drafters or more, as in first:suffix,model:path=DIR, got 0"),
        ("first:suffix", "got 1"),
        ("first:model:path=a,model:path=b", "drafter 1 of first must copy, so it is ngram or suffix"),
        ("first:none,model:path=a", "drafter 1 of first must copy"),
        ("first:ngram,suffix", "the last drafter of first must be a draft model or a head"),
        ("first:ngram,none", "the last drafter of first must be a draft model or a head"),
        ("first:ngram,mdel:path=a", "unknown drafter 'mdel'; did you mean 'model'"),
        ("first:mdel,suffix", "unknown drafter 'mdel'; did you mean 'model'"),
        ({"frist": ["suffix"]}, "unknown drafter 'frist'; did you mean 'first'"),
        ({"suffix": ["ngram"]}, "a drafter is a text, or one of first, union and a list"),
        ({"first": "suffix"}, "a drafter is a text, or one of first, union and a list"),
        ({"first": ["suffix", 3]}, "the last drafter of first must be a draft model or a head"),
    ],
)
def test_what_is_no_list_of_drafters_is_refused(written, sentence):
    with pytest.raises(InputError) as error:
        catalog.make("drafter", written)
    assert sentence in str(error.value)


def cell(tree: str, rule: str, **more: object) -> str | None:
    return why_not(replace(parts_of(target(), over_llama(), tree=tree, verifier=rule, length=2), **more))


def test_it_is_refused_where_the_law_would_not_hold():
    assert "rows depend on more than the tokens" in cell("chain", "greedy_block")
    assert "use one drafter" in cell("chain", "block", decoding=PearlDecoding(num_speculative_tokens=2))
    assert "does not keep the target's law" in cell("gumbel:branching=2x1", "block")
    assert "does not keep the target's law" in cell("dynamic", "recursive")
    for tree, rule in (("gumbel:branching=2x1", "recursive"), ("iid", "multipath"), ("dynamic", "match")):
        assert cell(tree, rule) is None
    assert "is for chains" in cell("gumbel:branching=2x1", "recursive", length=GoodputLength())
    assert cell("chain", "block", length=GoodputLength()) is None
    assert "chosen chain" not in (cell("chain", "block") or "")


def test_a_target_and_a_text_are_enough():
    texts, options = ["The sun is warm. The sun is"], {"length": "fixed:3", "max_slots": 2, "dtype": "float64"}
    said = []
    for drafter in ("none", f"first:suffix,model:path={EMBEDDED_DRAFT}", {"first": ["suffix", f"{EMBEDDED_DRAFT}"]}):
        engine = outrider.load(EMBEDDED_TARGET, drafter=drafter, **options)
        [output] = engine.generate(texts, max_new_tokens=24, sampling=Sampling(temperature=0))
        said.append(output.tokens)
    assert said[0] == said[1] == said[2]
    assert output.num_accepted_tokens > 0
    assert catalog.name_of(engine.parts.drafter) == "first"


def test_a_missing_checkpoint_is_told_before_the_target_is_read(tmp_path):
    with pytest.raises(InputError, match="nowhere"):
        outrider.load(str(tmp_path / "no target"), drafter=f"first:suffix,model:path={tmp_path}/nowhere")


def test_costs_are_those_of_steps_in_which_the_last_drafter_drafts():
    model = drafter_of("model")
    several = FirstDrafter(drafters=(SuffixDrafter(), model))
    keys = [_key_of_table(parts_of(target(), drafter), 1) for drafter in (model, several)]
    assert keys[0] == keys[1]


def test_the_costs_of_an_engine_reach_the_choice():
    drafter = on_tables(9, SuffixDrafter(min_match=1))
    seen = []

    @dataclass(frozen=True, kw_only=True)
    class Hearing(FirstDrafter):
        def choose(self, states, rooms, costs):
            seen.append(costs)
            return super().choose(states, rooms, costs)

    costs = table(0.1)
    hearing = Hearing(drafters=drafter.drafters)
    parts: Parts = replace(tables(9, verifier("token"), drafter=hearing), experience=Experience(costs))
    joint_law(replace(parts, length=GoodputLength(most=1)), [[1, 2]], num_steps=1)
    assert seen
    assert all(each is costs for each in seen)


def load(costs: CostTable) -> tuple[Engine, Noting]:
    """An engine that chooses its lengths by these costs."""
    drafter = over_llama()
    parts = parts_of(target(), drafter, verifier="block", length=GoodputLength(), experience=Experience(costs))
    return Engine(parts, max_slots=4), drafter


PERIODIC = [[5, 6, 7, 8] * 5, [9, 8, 9, 8, 9, 8, 9]]


def test_a_drafter_that_never_pays_rests_while_copies_are_made():
    busy, drafter = load(table(5.0))
    made = busy.generate(PERIODIC, max_new_tokens=24, sampling=GREEDY, ignore_eos=True)
    assert sum(out.num_draft_tokens for out in made) > 0
    assert drafter.drafters[1].lm.num_forwards == 0
    alone = Engine(parts_of(target(), NoDrafter()), max_slots=4)
    texts = alone.generate(PERIODIC, max_new_tokens=24, sampling=GREEDY, ignore_eos=True)
    assert [out.tokens for out in made] == [out.tokens for out in texts]


def test_the_last_drafter_drafts_where_copies_have_been_worth_nothing():
    busy, drafter = load(table(0.1))
    of_copies = busy.parts.experience.of_copies
    of_copies.greedy = Counts(tested=(300.0,) * 9, accepted=(300.0, *[1.0] * 8))
    busy.generate(PERIODIC, max_new_tokens=8, sampling=GREEDY, ignore_eos=True)
    assert 0 in drafter.used
    assert drafter.drafters[1].lm.num_forwards > 0
    # What it brought is not taken for what copies bring.
    assert sum(of_copies.greedy.tested) < 2700
    assert busy.parts.experience.greedy.tested[0] > 0


def test_acceptance_of_copies_and_of_drafts_is_learnt_apart():
    busy, drafter = load(table(0.1))
    made = busy.generate([*PERIODIC, *TEXTS], max_new_tokens=24, sampling=GREEDY, ignore_eos=True)
    assert {0, 1} <= drafter.used
    experience = busy.parts.experience
    counts = experience.greedy, experience.of_copies.greedy
    assert all(each.tested for each in counts)
    accepted = sum(out.num_accepted_tokens for out in made)
    assert sum(sum(each.accepted[1:]) for each in counts) == pytest.approx(accepted, rel=0.3)


SOME_HEADS = ("medusa", "eagle3", "poss", "jakiro", "dflash", "dspark", "mtp")
"""Heads of each idea: on the last state, features continued, specialists and experts, blocks, layers of the target."""


@pytest.mark.parametrize("kind", SOME_HEADS)
def test_a_head_sees_every_step_and_drafts_what_the_target_says(kind):
    model = target()
    drafter = Noting(drafters=(SuffixDrafter(min_match=1), head(kind, TargetInfo.of(model, None))))
    for tree, rule in (("chain", "block"), ("dynamic:width=2,num_nodes=6", "match")):
        drafter.steps.clear()
        busy = Engine(parts_of(model, drafter, tree=tree, verifier=rule), max_slots=4)
        made = busy.generate(TEXTS, max_new_tokens=20, sampling=GREEDY)
        busy.rest()
        assert [out.tokens for out in made] == plain(TEXTS, 20), tree
        assert {0, 1} <= drafter.used, tree
        assert any({0, 1} <= set(numbers) for numbers in drafter.steps), tree


@pytest.mark.parametrize("tree", ["chain", "gumbel"])
@pytest.mark.parametrize("kind", ["medusa", "eagle3", "dflash"])
def test_a_head_keeps_the_law_behind_copies(kind, tree):
    drafter = FirstDrafter(drafters=(NgramDrafter(), head(kind, TargetInfo.of(target(), None))))
    assert law_error(tables(2, verifier("recursive"), 2, drafter=drafter, tree=TREES[tree])) < BOUND
