"""Drafters that read the target's hidden states, toys and those of the catalog: engines over them say what plain
decoding says.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import pytest
import torch

from outrider import catalog
from outrider.core.types import Running, Sampling, ShortList
from outrider.drafters.protocol import Drafter
from outrider.drafters.traits import Traits
from outrider.engine.engine import Engine
from outrider.lengths.fixed import FixedLength
from outrider.lm.model import LanguageModel
from outrider.lm.open import as_lm
from outrider.lm.protocol import LM
from outrider.lm.target_info import TargetInfo
from tests.world.heads import HEADS, LAYERS, TOYS, head, toy
from tests.world.models import prompts, target
from tests.world.parts import parts_of
from tests.world.recurrent_zoo import tiny_recurrent
from tests.world.wrapped import Breaks, Wrapped
from tests.world.zoo import VOCAB

pytestmark = pytest.mark.usefixtures("float64_stays_float64")

KINDS = (*TOYS, *HEADS, *LAYERS)
GREEDY = Sampling(temperature=0.0, seed=0)
DRAWN = Sampling(temperature=0.9, seed=3)
CELLS = (("chain", "block"), ("gumbel:branching=2x2x1", "traversal"), ("dynamic:width=3,num_nodes=8", "match"))


def engine(
    kind: str, tree: str = "chain", verifier: str = "block", *, slots: int = 4, drafter: Drafter | None = None, lm=None
) -> Engine:
    model = lm or target(slots)
    own = drafter or head(kind, TargetInfo.of(model, None))
    parts = parts_of(model, own, tree=tree, verifier=verifier)
    return Engine(parts, max_slots=slots)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("tree", "verifier"), CELLS)
def test_greedy_output_of_ragged_batches_is_that_of_plain_decoding(kind, tree, verifier):
    busy = engine(kind, tree, verifier)
    if busy.parts.drafter.rows == "marginal" and tree.startswith("gumbel"):
        busy = engine(kind, "lattice:num_nodes=6", "match")
    these = prompts(1, 9, 70, 2, 14, 5)
    drafted = busy.generate(these, max_new_tokens=20, sampling=GREEDY)
    plain = busy.plain().generate(these, max_new_tokens=20, sampling=GREEDY)
    assert [out.tokens for out in drafted] == [out.tokens for out in plain]
    assert sum(out.num_draft_tokens for out in drafted) > 0


@dataclass(frozen=True, kw_only=True)
class Recorded(Wrapped):
    """Notes what a drafter guesses at the root, by the text before it."""

    guesses: dict[tuple[int, ...], torch.Tensor] = field(default_factory=dict)

    def begin(self, states: Sequence[Running], depths: Sequence[int]):
        guess = self.inner.begin(states, depths)
        for state, row in zip(states, guess.logits, strict=True):
            self.guesses[tuple(state.tokens)] = row.clone()
        return guess


def guesses(busy: Engine, these: Sequence[Sequence[int]], most: int = 12) -> dict[tuple[int, ...], torch.Tensor]:
    """Every guess at a root while these prompts run, by the text before it."""
    if not isinstance(busy.parts.drafter, Recorded):
        busy.parts = replace(busy.parts, drafter=Recorded(inner=busy.parts.drafter))
    busy.parts.drafter.guesses.clear()
    busy.generate(these, max_new_tokens=most, sampling=GREEDY)
    return dict(busy.parts.drafter.guesses)


def difference(one: dict[tuple[int, ...], torch.Tensor], other: dict[tuple[int, ...], torch.Tensor]) -> float:
    """The largest difference of guesses behind the same texts, of which there are some."""
    shared = one.keys() & other.keys()
    assert len(shared) > 3
    # A head that picks among some tokens rules out the others, in both alike.
    pairs = [(one[key], other[key]) for key in shared]
    assert all(torch.equal(a.isinf(), b.isinf()) for a, b in pairs)
    return max(float((a - b)[~a.isinf()].abs().max()) for a, b in pairs)


@pytest.mark.parametrize("kind", KINDS)
def test_a_head_in_a_batch_guesses_what_it_guesses_alone_and_anew(kind):
    these = prompts(9, 30, 3, 80)
    together, alone, anew = guesses(engine(kind), these), {}, {}
    for prompt in these:
        alone |= guesses(engine(kind, slots=1), [prompt])
    for text in list(together)[::7]:
        # Beside another prompt, a text is digested before its first step, and guessed from there.
        anew |= guesses(engine(kind, slots=2), [list(text), [3] * 200], most=4)
    assert difference(together, alone) < 1e-9
    assert difference(together, anew) < 1e-9


@pytest.mark.parametrize("kind", KINDS)
def test_a_prompt_that_goes_on_from_another_is_digested_and_guessed_from_where_they_part(kind):
    busy = engine(kind)
    [prompt] = prompts(40)
    busy.parts = replace(busy.parts, drafter=Recorded(inner=busy.parts.drafter))
    [first] = busy.generate([prompt], max_new_tokens=10, sampling=GREEDY)
    for shared, more in ((len(prompt) + 9, [5, 6]), (len(prompt) + 4, [7] * 9), (20, [8, 9, 8])):
        text = [*[*prompt, *first.tokens][:shared], *more]
        assert difference(guesses(busy, [text]), guesses(engine(kind), [text])) < 1e-9
    assert busy.num_reused_tokens >= 40 + 9 + 40 + 3 + 20 - 3 * LAYERS.get(kind, 1)


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_head_needs_to_see_again_is_one_position_per_layer_of_predictions_at_most(kind):
    busy = engine(kind)
    drafter, [prompt] = busy.parts.drafter, prompts(70)
    busy.generate([prompt], max_new_tokens=5, sampling=GREEDY)
    warm = busy._schedule.prefixes.oldest
    digested = busy.parts.target.length(warm.slot)
    for length in range(digested + 1):
        assert length - LAYERS.get(kind, 1) <= drafter.needs(warm.drafter_state, length) <= length


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_taken_back_shows_the_head_no_more_than_it_lacks(kind):
    these = prompts(30, 50)
    calm = engine(kind)
    expected = [out.tokens for out in calm.generate(these, max_new_tokens=12, sampling=DRAWN)]
    drafter = head(kind, TargetInfo.of(calm.parts.target, None))
    broken = engine(kind, lm=calm.parts.target, drafter=Breaks(inner=drafter))
    calm.rest()
    before, shown = calm.parts.target.num_forwards, []
    broken.watch = lambda cycle: shown.append(len(cycle.states))
    made = broken.generate(these, max_new_tokens=12, sampling=DRAWN)
    assert [out.tokens for out in made] == expected
    assert broken.parts.drafter.left == [4 - len(shown) - 1] or broken.parts.drafter.left[0] < 0
    # A forward for the prompts that were digested, one per step, and one per request for what must be shown again.
    assert calm.parts.target.num_forwards - before <= len(shown) + 4


@pytest.mark.parametrize("kind", KINDS)
def test_a_drafter_is_swapped_for_new_requests_while_others_keep_theirs(kind):
    these = prompts(9, 14)
    one = engine(kind)
    expected = [one.generate([prompt], max_new_tokens=16, sampling=DRAWN)[0] for prompt in these]
    other = toy("block" if kind == "own features" else "own features", TargetInfo.of(one.parts.target, None))
    one.rest()
    ids = [one.add(these[0], max_new_tokens=16, sampling=DRAWN)]
    one.step()
    one.swap(other)
    ids.append(one.add(these[1], max_new_tokens=16, sampling=GREEDY))
    outputs = {}
    while one.busy:
        outputs |= {update.id: update.output for update in one.step() if update.output is not None}
    plain = one.plain().generate([these[1]], max_new_tokens=16, sampling=GREEDY)[0]
    assert outputs[ids[0]].tokens == expected[0].tokens
    assert outputs[ids[0]].num_accepted_tokens == expected[0].num_accepted_tokens
    assert outputs[ids[1]].tokens == plain.tokens
    assert outputs[ids[1]].num_draft_tokens > 0


@pytest.mark.parametrize("kind", TOYS)
def test_a_short_list_of_tokens_drafts_these_alone_and_changes_no_output(kind):
    model = target(4)
    few = ShortList.of(torch.arange(3, VOCAB, 2), VOCAB)
    own = toy(kind, TargetInfo.of(model, None))
    own.lm.module.vocab_size = len(few.ids)
    own.lm.vocab_size = len(few.ids)
    whole = own.lm.module.logits
    own.lm.module.logits = lambda hidden: whole(hidden)[..., few.ids]
    busy = engine(kind, lm=model, drafter=replace(own, short_list=few))
    drafted: set[int] = set()
    busy.watch = lambda cycle: drafted.update(cycle.draft.tokens[torch.from_numpy(cycle.draft.parents >= 0)].tolist())
    for setting in (GREEDY, replace(GREEDY, repetition_penalty=1.4), DRAWN):
        made = busy.generate(prompts(5, 9), max_new_tokens=16, sampling=setting)
        assert all(out.num_draft_tokens for out in made)
        if setting.temperature == 0:
            plain = busy.plain().generate(prompts(5, 9), max_new_tokens=16, sampling=setting)
            assert [out.tokens for out in made] == [out.tokens for out in plain]
    assert drafted
    assert drafted <= set(few.ids.tolist())


@pytest.mark.parametrize("kind", KINDS)
def test_a_head_states_what_it_reads_and_keeps(kind):
    drafter, row = head(kind, TargetInfo.of(target(1), None)), catalog.rows("drafter").get(kind)
    traits = Traits.of(type(drafter) if row is None else row.kind)
    assert traits.reads_hidden_states
    assert traits.keeps_cache == any(isinstance(value, LM) for value in vars(drafter).values())
    assert not traits.context_pure
    assert traits.rows == drafter.rows != "point"
    assert traits.trainer == (kind if getattr(row and row.kind, "options", None) else None)


def test_a_class_that_drafts_nothing_has_no_traits():
    with pytest.raises(TypeError, match="FixedLength must derive from Drafter"):
        Traits.of(FixedLength)


def test_a_head_that_reads_a_recurrent_target_drafts_for_it():
    lm = as_lm(tiny_recurrent("qwen3_next"), max_slots=3)
    busy = engine("own features", lm=lm, slots=3)
    these = prompts(1, 9, 20)
    drafted = busy.generate(these, max_new_tokens=16, sampling=GREEDY)
    plain = busy.plain().generate(these, max_new_tokens=16, sampling=GREEDY)
    assert [out.tokens for out in drafted] == [out.tokens for out in plain]
    assert sum(out.num_draft_tokens for out in drafted) > 0


@pytest.mark.parametrize("kind", KINDS)
def test_a_prompt_costs_a_head_no_forward_of_the_target_of_its_own(kind):
    busy = engine(kind)
    lm = busy.parts.target
    assert isinstance(lm, LanguageModel)
    before = lm.num_forwards
    [out] = busy.generate(prompts(30), max_new_tokens=12, sampling=GREEDY)
    assert lm.num_forwards - before == out.num_steps
