"""Training of heads that guess all tokens at once: groups of mask slots, one drawn head, the n-gram model beside."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from outrider import catalog
from outrider.core.types import InputError
from outrider.heads.objective import LearntPositions, slot_balanced
from outrider.heads.parallel import ParallelObjective
from outrider.heads.parts.backoff import FILE
from outrider.learning.divergences import divergence
from outrider.lm.model import LanguageModel
from outrider.lm.target_info import TargetInfo
from outrider.training.data.batches import Batches
from outrider.training.loop.steps import train
from tests.training.test_heads import GAMMA, SETTINGS, batch, documents, learner, learnt_logits, repeated, target
from tests.world.learners import head_learner
from tests.world.zoo import VOCAB

FORMS = ("parallel", "parallel, of states")


def in_groups(kind: str, count: int, **more: object) -> ParallelObjective:
    """A parallel head that learns at some groups of a row."""
    made = learner(kind, num_groups=count, **more)
    assert isinstance(made, ParallelObjective)
    return made.train()


@pytest.mark.parametrize("kind", FORMS)
def test_a_group_is_the_same_beside_other_groups(kind):
    given = batch()
    whole, few = learnt_logits(learner(kind), given), in_groups(kind, 2)
    some, groups = learnt_logits(few, given), few.groups(given)
    assert groups.at.shape == (3, 2)
    rows, which = groups.real.nonzero(as_tuple=True)
    at = groups.at[rows, which]
    assert torch.equal(some[0], whole[0])
    for number in range(1, GAMMA):
        assert torch.allclose(some[number][rows, at], whole[number][rows, at], atol=1e-5)
        others = torch.ones(given.tokens.shape, dtype=torch.bool)
        others[rows, at] = False
        assert not torch.allclose(some[number][others], whole[number][others], atol=1e-2)


@pytest.mark.parametrize("kind", FORMS)
def test_a_slot_knows_nothing_of_the_text_behind_its_group(kind):
    made, given, changed = learner(kind), batch(), 7
    tokens = given.tokens.clone()
    tokens[:, changed] = (tokens[:, changed] + 1) % VOCAB
    before, after = learnt_logits(made, given), learnt_logits(made, replace(given, tokens=tokens))
    for number in range(GAMMA):
        # The place t has read the tokens up to t + 1.
        assert torch.equal(before[number][:, : changed - 1], after[number][:, : changed - 1])
        assert not torch.allclose(before[number][:, changed], after[number][:, changed], atol=1e-4)


@pytest.mark.parametrize("kind", FORMS)
def test_the_loss_is_the_weighted_mean_over_the_places_of_the_groups(kind):
    made, given = in_groups(kind, 2, decay=0.5), batch(1)
    groups, logits = made.groups(given), learnt_logits(made, given)
    with torch.no_grad():
        found = made(given)
        theirs = target()(given.tokens, use_cache=False).logits
    drawn = {(row, int(at)) for row in range(3) for at in groups.at[row] if at < given.tokens.shape[1]}
    total = weight = 0.0
    for number in range(GAMMA):
        places = LearntPositions.of(given, number)
        for row, at in zip(places.rows.tolist(), places.at.tolist(), strict=True):
            if number == 0 or (row, at) in drawn:
                weight += 0.5**number
                p, q = theirs[row, at + 1 + number], logits[number][row, at]
                total += 0.5**number * float(divergence("fkl")(p[None], q[None]))
    assert float(found.weight) == pytest.approx(weight)
    assert float(found.total) == pytest.approx(total, rel=1e-4)


def test_groups_are_drawn_anew_in_each_step_and_whole_rows_are_watched():
    made, given = in_groups("parallel", 3), batch()
    learnt = given.learnt
    for step in range(4):
        groups = made.groups(replace(given, step=step))
        rows, which = groups.real.nonzero(as_tuple=True)
        assert learnt[rows, groups.at[rows, which] + 2].all()
    assert not torch.equal(made.groups(replace(given, step=1)).at, made.groups(replace(given, step=2)).at)
    assert torch.equal(made.groups(given).at, made.groups(given).at)
    for i, at in enumerate(made.groups(given).at):
        [alone] = made.groups(Batches.share(given, range(i, i + 1))).at
        width = int(given.lengths[i])
        assert alone[alone < width].tolist() == at[at < width].tolist()
    judged = [each.judged(given, 2) for each in (made.eval(), learner("parallel"))]
    assert np.allclose(judged[0].log_ratios, judged[1].log_ratios, atol=1e-5)


def test_balanced_slots_have_the_same_weight_however_few_groups_are_drawn():
    # Deep slots have fewer places, and the last text has fewer places than groups.
    texts = [replace(text, start=3) for text in documents(2)]
    texts.append(replace(texts[0], tokens=texts[0].tokens[:7]))
    made = in_groups("parallel", 4)
    expected = made.places_of(texts, 24)
    given, weights = Batches(texts, batch_size=3, max_length=24, seed=0).batch(0), np.zeros(GAMMA)
    for step in range(400):
        counts = [len(made.places(replace(given, step=step), number).labels) for number in range(GAMMA)]
        weights += counts * slot_balanced(expected).numpy()
    assert expected[0] > 2 * expected[1] > 2 * expected[-1]
    assert np.allclose(weights, weights.mean(), rtol=0.02)
    whole = in_groups("parallel", 99)
    found = [len(whole.places(given, number).labels) for number in range(GAMMA)]
    assert whole.places_of(texts, 24).tolist() == found


def test_without_slots_the_head_is_an_eagle_head():
    parent = head_learner("eagle", target())
    child = head_learner("parallel", target(), slots=0)
    state = parent.head.state_dict()
    child.head.load_state_dict(state | {"slots": child.head.slots})
    [mine], [theirs] = learnt_logits(child, batch(), 1), learnt_logits(parent, batch(), 1)
    assert torch.equal(mine, theirs)
    assert child.most_guesses == 1


@torch.no_grad()
def test_a_step_of_one_head_has_the_loss_of_that_head():
    given, counts = batch(), np.zeros(GAMMA)
    weights = 0.5 ** np.arange(GAMMA)
    parts = []
    for number in range(GAMMA):
        alone = learner("blockwise", decay=0.5)
        alone.counted = lambda batch, number=number: (number,)
        parts.append(alone(given))
    made = learner("blockwise", decay=0.5, one_head=True)
    for step in range(300):
        [number] = made.counted(replace(given, step=step))
        counts[number] += 1
        if step < 4:
            found = made(replace(given, step=step))
            assert float(found.total) == pytest.approx(float(parts[number].total))
            assert float(found.weight) == pytest.approx(float(parts[number].weight))
    # Eight standard deviations.
    assert np.allclose(counts / 300, weights / weights.sum(), atol=8 * 0.5 / 300**0.5)
    whole = learner("blockwise", decay=0.5)(given)
    assert float(whole.total) == pytest.approx(sum(float(part.total) for part in parts), rel=1e-5)
    assert len(made.eval().counted(given)) == GAMMA


def test_heads_that_learn_one_at_a_time_all_learn(tmp_path):
    made = head_learner("blockwise", target(), loss="fkl", depth=GAMMA, one_head=True)
    before = {name: weight.clone() for name, weight in made.named_parameters()}
    with torch.no_grad():
        first = float(made.eval()(batch()).total)
    train(made.train(), repeated(batch()), replace(SETTINGS, steps=60), tmp_path)
    with torch.no_grad():
        assert float(made.eval()(batch()).total) < 0.8 * first
    assert [name for name, weight in made.named_parameters() if torch.equal(weight, before[name])] == []


def test_the_ngram_model_of_the_texts_is_written_beside_the_heads(tmp_path):
    made = head_learner("blockwise", target(), depth=2, documents=documents(), ngram_least=1)
    made.write(tmp_path)
    lm = LanguageModel(target(), max_slots=1)
    drafter = catalog.make("drafter", f"blockwise:path={tmp_path},paths=2").bind(TargetInfo.of(lm, None))
    assert drafter.model.order == 3
    text = documents()[0].tokens
    score = drafter.model.score(text[None, :2], np.arange(VOCAB)[None])[0]
    assert score.argmax() == text[2]
    further = head_learner("blockwise", target(), init_from=str(tmp_path))
    assert np.array_equal(further.grams.keys[1], drafter.model.keys[1])
    bare = tmp_path / "bare"
    head_learner("blockwise", target(), depth=2, documents=documents(), ngram_order=0).write(bare)
    assert not (bare / FILE).exists()


def test_wrong_sizes_are_refused_in_one_sentence(tmp_path):
    for kind, wrong, message in (
        ("blockwise", {"depth": 0}, "num_heads of blockwise heads must be >= 1, got 0"),
        ("blockwise", {"intermediate_size": 0}, "intermediate_size must be >= 1, got 0"),
        ("blockwise", {"ngram_order": 9}, "ngram_order must be one of 0, 1, 2, 3, 4, got 9"),
        ("blockwise", {"ngram_least": 0}, "ngram_least must be >= 1, got 0"),
        ("blockwise", {"init_from": str(tmp_path)}, r"no config\.json"),
        ("parallel", {"slots": -1}, "slots must be >= 0, got -1"),
        ("parallel", {"layers": 0}, "layers must be >= 1, got 0"),
        ("parallel", {"form": "dflash"}, "form must be one of eagle, medusa, got 'dflash'"),
        ("parallel", {"num_groups": 0}, "num_groups must be >= 1"),
        ("parallel", {"init_from": str(tmp_path)}, r"no config\.json"),
    ):
        with pytest.raises(InputError, match=message):
            head_learner(kind, target(), **wrong)
    with pytest.raises(InputError, match="drafts 3 tokens, so a depth of 4"):
        learner("parallel").judged(batch(), 4)
    wider = target()
    wider.resize_token_embeddings(VOCAB + 1)
    for kind in ("blockwise", "parallel"):
        learner(kind).write(tmp_path / kind)
        with pytest.raises(InputError, match="knows 64 tokens, and this target has 65"):
            head_learner(kind, wider, init_from=str(tmp_path / kind))
