"""A draft model that is steered by the target's hidden states."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import pytest
import torch
from transformers import AutoModelForCausalLM

import outrider
from outrider import catalog
from outrider.core.types import InputError, Request, Running, Sampling
from outrider.drafters.model import ModelDrafter
from outrider.drafters.protocol import Drafter
from outrider.drafters.steered import SteeredDrafter, SteeredPath
from outrider.drafters.steering import Steering, write_steering
from outrider.drafters.traits import Traits
from outrider.engine.engine import Engine
from outrider.lm.hf.taps import tapped
from outrider.lm.model import LanguageModel
from outrider.lm.steered import SteeredLM, steered
from outrider.lm.tabular import TABLE_FEATURES, TabularLM, random_features, random_rows
from outrider.lm.target_info import TargetInfo
from outrider.proof.rule import law_error
from outrider.proof.runs import law_of_runs
from tests.world.models import llama, prompts, target
from tests.world.parts import parts_of
from tests.world.steering import steered_drafter
from tests.world.tables import tables
from tests.world.verifiers import verifier
from tests.world.wrapped import Breaks, Wrapped

pytestmark = pytest.mark.usefixtures("float64_stays_float64")
GREEDY = Sampling(temperature=0.0, seed=0)
DRAWN = Sampling(temperature=0.9, seed=3)
CELLS = (("chain", "block"), ("gumbel:branching=2x2x1", "traversal"), ("dynamic:width=3,num_nodes=8", "match"))


def engine(
    drafter: Drafter | None = None,
    tree: str = "chain",
    verifier: str = "block",
    *,
    slots: int = 4,
    gamma: int = 3,
    lm=None,
) -> Engine:
    model = lm or target(slots)
    parts = parts_of(
        model, drafter or steered_drafter(model, max_slots=slots), tree=tree, verifier=verifier, length=gamma
    )
    return Engine(parts, max_slots=slots)


@dataclass(frozen=True, kw_only=True)
class Recorded(Wrapped):
    """Notes what a drafter guesses, by the text before the anchor and the number of the guess in the draft."""

    guesses: dict[tuple[int, ...], list[torch.Tensor]] = field(default_factory=dict)

    def begin(self, states: Sequence[Running], depths: Sequence[int]):
        guess = self.inner.begin(states, depths)
        for state, row in zip(states, guess.logits, strict=True):
            self.guesses[tuple(state.tokens)] = [row.clone()]
        return guess

    def chain(self, states: Sequence[Running], counts: Sequence[int]):
        follow, left = self.inner.chain(states, counts), list(counts)

        def step(tokens):
            logits = follow(tokens)
            alive = [i for i, count in enumerate(left) if count > 0]
            for i, row in zip(alive, logits, strict=True):
                left[i] -= 1
                self.guesses[tuple(states[i].tokens)].append(row.clone())
            return logits

        return step


def guesses(
    busy: Engine, these: Sequence[Sequence[int]], tokens: int = 12
) -> dict[tuple[int, ...], list[torch.Tensor]]:
    """All guesses while these prompts run."""
    if not isinstance(busy.parts.drafter, Recorded):
        busy.parts = replace(busy.parts, drafter=Recorded(inner=busy.parts.drafter))
    busy.parts.drafter.guesses.clear()
    busy.generate(these, max_new_tokens=tokens, sampling=GREEDY)
    return dict(busy.parts.drafter.guesses)


def difference(one: dict, other: dict) -> float:
    """The largest difference of guesses behind the same texts, of which there are some."""
    shared = one.keys() & other.keys()
    assert len(shared) > 3
    pairs = [(a, b) for key in shared for a, b in zip(one[key], other[key], strict=True)]
    return max(float((a - b).abs().max()) for a, b in pairs)


@pytest.mark.parametrize(("tree", "verifier"), CELLS)
def test_greedy_output_of_ragged_batches_is_that_of_plain_decoding(tree, verifier):
    busy = engine(None, tree, verifier)
    these = prompts(1, 9, 70, 2, 14, 5)
    drafted = busy.generate(these, max_new_tokens=20, sampling=GREEDY)
    plain = busy.plain().generate(these, max_new_tokens=20, sampling=GREEDY)
    assert [out.tokens for out in drafted] == [out.tokens for out in plain]
    assert sum(out.num_accepted_tokens for out in drafted) > 0


@dataclass(frozen=True, kw_only=True)
class Unsteered(SteeredDrafter):
    """Drafts at the same steps, with the draft model as it is."""

    def _features(self, states):
        return None

    def _newest_features(self, state, count):
        return None


def test_at_the_start_of_training_every_guess_is_the_draft_models_own_bit_for_bit():
    model = target(12)
    own = steered_drafter(model, strength=0.0)
    bare = Unsteered(lm=SteeredLM(own.lm.model, max_slots=8), steering=own.steering)
    plain = ModelDrafter(lm=LanguageModel(own.lm.model, max_slots=8))
    these = prompts(9, 30, 3)
    ours, theirs, others = (guesses(engine(drafter, lm=model), these) for drafter in (own, bare, plain))
    assert ours.keys() == theirs.keys()
    for text, rows in ours.items():
        assert all(torch.equal(a, b) for a, b in zip(rows, theirs[text], strict=True))
    # A plain draft model drafts from the first step on, so its forwards are cut otherwise.
    assert difference(ours, others) < 1e-9


def test_vectors_change_the_guesses():
    model = target(4)
    these = prompts(9, 30)
    strong, none = (guesses(engine(steered_drafter(model, strength=s), lm=model), these) for s in (0.3, 0.0))
    assert difference(strong, none) > 1e-2


@pytest.mark.parametrize("gamma", [1, 3])
def test_a_guess_is_the_draft_models_with_the_vectors_of_the_step_in_which_each_token_was_read(gamma):
    model, [prompt] = target(1), prompts(20)
    busy = engine(steered_drafter(model, num_layers=2), lm=model, slots=1, gamma=gamma)
    drafter, seen = busy.parts.drafter, guesses(busy, [prompt])
    anchors, llama_model = sorted(len(text) - 1 for text in seen), llama()
    whole = max(seen, key=len)
    with torch.no_grad(), tapped(llama_model.model.layers, drafter.taps) as taps:
        llama_model(torch.tensor([whole]), use_cache=False)
    with torch.no_grad():
        vectors = drafter.steering(drafter.steering.concatenate(taps))[0]
    for text, rows in seen.items():
        anchor = len(text) - 1
        added = torch.zeros(len(text), vectors.shape[-1], dtype=torch.float64)
        for place in range(len(prompt), len(text)):
            # A token is read as a draft token in the step of an anchor before it; if it was accepted there, it stays.
            first = max(a for a in anchors if a <= place)
            late = place - first == gamma and place < anchor
            source = place if late else first - 1
            added[place] = vectors[source]
        deltas = added[None].split(drafter.steering.config.widths, -1)
        with torch.no_grad(), steered(drafter.lm.parts, deltas.__getitem__):
            expected = drafter.lm.model(torch.tensor([text]), use_cache=False).logits[0, -1]
        assert torch.allclose(rows[0], expected, atol=1e-9)


def test_a_batch_guesses_what_each_request_guesses_alone():
    these = prompts(9, 30, 3, 80)
    together, alone = guesses(engine(), these), {}
    for prompt in these:
        alone |= guesses(engine(slots=1), [prompt])
    assert difference(together, alone) < 1e-9


def test_a_prompt_that_goes_on_from_another_is_guessed_from_as_if_it_were_new():
    busy, [prompt] = engine(), prompts(40)
    busy.parts = replace(busy.parts, drafter=Recorded(inner=busy.parts.drafter))
    [first] = busy.generate([prompt], max_new_tokens=10, sampling=GREEDY)
    for shared, more in ((len(prompt) + 9, [5, 6]), (len(prompt) + 4, [7] * 9), (20, [8, 9, 8])):
        text = [*[*prompt, *first.tokens][:shared], *more]
        assert difference(guesses(busy, [text]), guesses(engine(), [text])) < 1e-9
    assert busy.num_reused_tokens >= 40 + 8 + 40 + 2 + 20 - 3


def test_what_must_be_seen_again_is_one_position_at_most():
    busy, [prompt] = engine(), prompts(70)
    drafter = busy.parts.drafter
    busy.generate([prompt], max_new_tokens=5, sampling=GREEDY)
    warm = busy._schedule.prefixes.oldest
    num_read = busy.parts.target.length(warm.slot)
    for length in range(num_read + 1):
        assert max(0, length - 1) <= drafter.needs(warm.drafter_state, length) <= length
    assert drafter.needs(warm.drafter_state, num_read) == num_read


def test_a_step_that_is_taken_back_changes_no_draw():
    these, model = prompts(30, 50), target(4)
    calm = engine(steered_drafter(model), lm=model)
    expected = [out.tokens for out in calm.generate(these, max_new_tokens=12, sampling=DRAWN)]
    calm.rest()
    broken = engine(Breaks(inner=steered_drafter(model)), lm=model)
    made = broken.generate(these, max_new_tokens=12, sampling=DRAWN)
    assert broken.parts.drafter.left[0] <= 0
    assert [out.tokens for out in made] == expected


def test_the_law_is_kept_by_whole_runs_on_tables():
    draft = ModelDrafter(lm=TabularLM(random_rows(2, 1), 2))
    own = SteeredDrafter.on_tables(draft, 2, seed=1)
    rows = random_rows(2, seed=3)
    small = tables(2, catalog.make("verifier", "block"), 2, drafter=own)
    small = replace(small, target=TabularLM(rows, 2, feature=random_features(TABLE_FEATURES, seed=4)))
    request = Request(id="", prompt=(0, 1, 1), max_new_tokens=4, sampling=Sampling(seed=0))
    found = law_of_runs(
        Engine(small, max_slots=2, keep_warm=False), [request], [lambda output: rows((*request.prompt, *output))]
    )
    assert found.error < 1e-12
    assert found.accepted > 0


@pytest.mark.parametrize("length", ["fixed:3", "tetris", "goodput"])
def test_the_gate_enumerates_a_drafter_that_reads_hidden_states(length):
    own = SteeredDrafter.on_tables(None, 3, seed=1)
    parts = tables(3, catalog.make("verifier", "block"), drafter=own, length=catalog.make("length", length))
    assert law_error(parts) < 1e-12


def test_the_gate_catches_a_biased_rule_behind_hidden_states():
    own = SteeredDrafter.on_tables(None, 3, seed=1)
    assert law_error(tables(3, verifier("lenient"), 3, drafter=own)) > 1e-3


def test_greedy_block_is_refused_because_rows_depend_on_more_than_the_tokens():
    with pytest.raises(InputError, match="rows depend on more than the tokens"):
        outrider.load(llama(), drafter=steered_drafter(target(1)), verifier="greedy_block", length="fixed:2")


def test_its_traits_say_what_it_is():
    traits = Traits.of(SteeredPath)
    assert (traits.rows, traits.trainer, traits.exports) == ("sampled", "steer", ("transformers",))
    assert traits.reads_hidden_states
    assert traits.keeps_cache
    assert not traits.context_pure


def written(folder, drafter: SteeredDrafter) -> str:
    drafter.lm.model.save_pretrained(folder)
    write_steering(drafter.steering, folder, drafter.lm.dtype)
    return str(folder)


def test_a_folder_is_loaded_as_it_was_written_and_as_a_plain_draft_model(tmp_path):
    model = target(4)
    drafter = steered_drafter(model)
    place = written(tmp_path, drafter)
    around = TargetInfo.of(model, None)
    loaded = SteeredPath(path=place).bind(around)
    these = prompts(9, 30)
    assert difference(guesses(engine(drafter, lm=model), these), guesses(engine(loaded, lm=model), these)) < 1e-12
    assert catalog.make("drafter", f"steered:path={place}") == SteeredPath(path=place)
    assert AutoModelForCausalLM.from_pretrained(place).num_parameters() == drafter.lm.model.num_parameters()
    assert set(loaded.modules) == {"draft model", "steering"}


def test_a_copy_in_another_dtype_is_steered_too(monkeypatch):
    monkeypatch.undo()
    half = LanguageModel(llama().to(torch.bfloat16), max_slots=4)
    drafter = steered_drafter(half)
    wide = drafter.cast(replace(TargetInfo.of(half, None), dtype=torch.float32))
    assert isinstance(wide.lm, SteeredLM)
    assert wide.lm.dtype == torch.float32
    assert {weight.dtype for weight in wide.steering.parameters()} == {torch.float32}
    assert {weight.dtype for weight in drafter.steering.parameters()} == {torch.bfloat16}


def test_a_steering_of_another_target_is_refused(tmp_path):
    model = target(1)
    place = written(tmp_path, steered_drafter(model))
    around = TargetInfo.of(model, None)
    with pytest.raises(InputError, match="2 layers of width 32, and this target has 3 layers"):
        SteeredPath(path=place).bind(replace(around, num_layers=3))
    with pytest.raises(InputError, match="shows none"):
        SteeredPath(path=place).bind(replace(around, num_layers=0))


def test_a_steering_beside_another_draft_model_is_refused(tmp_path):
    model = target(1)
    drafter = steered_drafter(model)
    llama(2).save_pretrained(tmp_path)
    write_steering(drafter.steering, tmp_path, torch.float64)
    with pytest.raises(InputError, match=r"widths \[48\], and the draft model beside it has \[48, 48\]"):
        SteeredPath(path=str(tmp_path)).bind(TargetInfo.of(model, None))


def test_a_low_rank_steering_drafts_too():
    model = target(2)
    busy = engine(steered_drafter(model, rank=2), lm=model, slots=2)
    drafted = busy.generate(prompts(9, 5), max_new_tokens=12, sampling=GREEDY)
    plain = busy.plain().generate(prompts(9, 5), max_new_tokens=12, sampling=GREEDY)
    assert [out.tokens for out in drafted] == [out.tokens for out in plain]
    assert isinstance(busy.parts.drafter.steering, Steering)
