"""Training of heads: what each guess reads, which tokens it learns, what is written and drafts."""

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

import outrider
from outrider import catalog
from outrider.core.types import InputError, Sampling
from outrider.engine.engine import Engine
from outrider.heads.objective import GuessObjective, LearntPositions, frequent_tokens, slot_balanced
from outrider.learning import divergences
from outrider.learning.batch import TrainBatch
from outrider.learning.divergences import divergence
from outrider.lm.hf.taps import tapped
from outrider.lm.model import LanguageModel
from outrider.lm.target_info import TargetInfo
from outrider.proof.gate import in_float32
from outrider.training.data.batches import Batches
from outrider.training.loop.steps import train
from outrider.training.loop.watch import Evaluation
from outrider.trees.fixed import FixedTree, likeliest_topology
from tests.world.forced import forced_guesses
from tests.world.heads import HEADS, TRAINED
from tests.world.learners import SETTINGS, batch, documents, head_learner, moved, repeated
from tests.world.zoo import VOCAB, tiny

GAMMA = 3
FEW = torch.arange(3, VOCAB, 2)

VARIANTS: dict[str, dict[str, Any]] = {
    "medusa, deep": {"layers": 2},
    "eagle3, normed": {"norm_before_residual": True, "norm_output": True, "fc_norm": True},
    "poss, of pairs": {"unrolled": GAMMA + 1, "stride": 2, "bias": True},
    "poss, on eagle3": {"trunk": "eagle3"},
    "griffin, biased": {"bias": True, "likeliest": 5.0},
    "jakiro, of distributions": {"unrolled": GAMMA - 1, "mixture": "gate", "expert_size": 24},
    "parallel, of states": {"form": "medusa", "layers": 2},
}
"""Heads with other options than the usual ones."""
GUESSING = [name for name in TRAINED if issubclass(HEADS[name].objective, GuessObjective)]
KINDS = [*GUESSING, *VARIANTS]


def told(kind: str, **more: Any) -> dict[str, Any]:
    """The options of a head: it learns all guesses."""
    known = {each.name for each in fields(HEADS[name_of(kind)].options)}
    return {**({"unrolled": GAMMA} if "unrolled" in known else {}), **VARIANTS.get(kind, {}), **more}


def name_of(kind: str) -> str:
    """The name in the catalog."""
    return kind.partition(",")[0]


def guesses_some(kind: str) -> bool:
    """Whether a head may guess some tokens only."""
    options = HEADS[name_of(kind)].options
    try:
        options(**told(kind, draft_vocab=len(FEW))).check()
    except (TypeError, InputError):
        return False
    return True


WITH_FEW = [*((kind, None) for kind in KINDS), *((kind, FEW) for kind in KINDS if guesses_some(kind))]
"""All heads, and those that may guess some tokens only with these tokens."""


def target() -> PreTrainedModel:
    return tiny("llama").float().requires_grad_(False)


def fresh(kind: str, model: PreTrainedModel | None = None, *, loss: str | None = "fkl", **more: Any) -> GuessObjective:
    """A new head that learns."""
    return head_learner(name_of(kind), model or target(), loss=loss, depth=GAMMA, **told(kind, **more))


def learner(kind: str, **more: Any) -> GuessObjective:
    """A learner whose weights are no longer those of the start."""
    return moved(fresh(kind, **more))


def learnt_logits(made: GuessObjective, given: TrainBatch, count: int = GAMMA) -> list[torch.Tensor]:
    """The logits of each guess at each place, as training computes them."""
    with torch.no_grad():
        hidden = made.drafted(made.with_states(given), count)
        return [made.logits(each, number) for number, each in enumerate(hidden)]


def drafter_of(made: GuessObjective, folder: Path, lm: LanguageModel):
    """The drafter of what a learner writes."""
    made.context = replace(made.context, dtype=torch.float32)
    made.write(folder)
    return catalog.make("drafter", str(folder)).bind(TargetInfo.of(lm, None))


@pytest.mark.parametrize(("kind", "ids"), WITH_FEW)
def test_training_guesses_what_real_drafting_with_the_same_tokens_guesses(tmp_path, kind, ids):
    made, [text] = learner(kind, **({} if ids is None else {"ids": ids})), documents(1)
    given = Batches([text], batch_size=1, max_length=24, seed=0).batch(0)
    lm = LanguageModel(target(), max_slots=1)
    found = forced_guesses(drafter_of(made, tmp_path, lm), lm, text.tokens.tolist(), text.start, GAMMA)
    assert {number for _, number in found} == set(range(GAMMA))
    expected = learnt_logits(made, given)
    for (place, number), logits in found.items():
        row = expected[number][0, place - 2 - number]
        if ids is not None:
            assert torch.isinf(logits[0])
            logits = logits[ids]
        assert torch.allclose(logits, row, atol=1e-4), (place, number, float((logits - row).abs().max()))


@pytest.mark.parametrize("kind", TRAINED)
def test_judging_computes_the_logits_of_the_target_once(kind):
    made, given, seen = head_learner(kind, target(), loss="fkl", depth=GAMMA), batch(), []
    head = made.embedding_and_head.head

    def counted(states: torch.Tensor) -> torch.Tensor:
        seen.append(states.shape[:-1].numel())
        return head(states)

    made.embedding_and_head = replace(made.embedding_and_head, head=counted)
    again = made.judged(given, GAMMA)
    assert seen == [given.tokens.numel()]
    made.with_target_rows = lambda batch: batch
    assert np.allclose(again.log_ratios, made.judged(given, GAMMA).log_ratios, atol=1e-4)
    assert len(seen) > 1


@pytest.mark.parametrize("kind", KINDS)
def test_no_guess_depends_on_tokens_or_states_that_drafting_does_not_know(kind):
    made, given, changed = learner(kind), batch(), 7
    tokens = given.tokens.clone()
    tokens[0, changed] = (tokens[0, changed] + 1) % VOCAB
    before, after = learnt_logits(made, given), learnt_logits(made, replace(given, tokens=tokens))
    for number in range(GAMMA):
        # The guess at place t knows the tokens up to t + 1 + number, and the states up to t.
        same = changed - 1 - number
        assert torch.equal(before[number][0, :same], after[number][0, :same])
        assert not torch.allclose(before[number][0, changed:], after[number][0, changed:], atol=1e-4)
    whole = made.with_states(given)
    states = {tap: hidden.clone() for tap, hidden in whole.hidden.items()}
    for hidden in states.values():
        hidden[0, changed] += torch.randn(hidden.shape[-1])
    after = learnt_logits(made, replace(whole, hidden=states))
    for number in range(GAMMA):
        assert torch.equal(before[number][0, :changed], after[number][0, :changed])
        assert not torch.allclose(before[number][0, changed], after[number][0, changed], atol=1e-4)


@pytest.mark.parametrize("loss", ["fkl", "tvd", None])
@pytest.mark.parametrize("ids", [None, FEW])
def test_the_loss_is_the_weighted_mean_over_the_learnt_tokens(ids, loss):
    made, given = learner("medusa", loss=loss, ids=ids, decay=0.5), batch()
    logits = learnt_logits(made, given)
    model = target()
    with torch.no_grad():
        theirs = model(given.tokens, use_cache=False).logits
        found = made(given)
    total = weight = 0.0
    for row, count in enumerate(given.lengths.tolist()):
        for place in range(count):
            for number in range(GAMMA):
                guessed = place + 2 + number
                if guessed >= count or not given.learnt[row, guessed]:
                    continue
                weight += 0.5**number
                p, q, label = theirs[row, guessed - 1], logits[number][row, place], int(given.tokens[row, guessed])
                if loss is None:
                    known = ids is None or label in ids.tolist()
                    at = label if ids is None else (label - 3) // 2
                    total += 0.5**number * float(-q.log_softmax(-1)[at]) if known else 0.0
                elif ids is None or int(p.argmax()) in ids.tolist():
                    p = p if ids is None else p[ids]
                    total += 0.5**number * float(divergence(loss)(p[None], q[None]))
    assert float(found.weight) == pytest.approx(weight)
    assert float(found.total) == pytest.approx(total, rel=1e-4)


@pytest.mark.parametrize("ids", [None, FEW])
def test_what_is_watched_is_a_draft_behind_each_learnt_token(ids):
    made, given = learner("medusa", ids=ids), batch()
    judged, logits, model = made.judged(given, 2), learnt_logits(made, given), target()
    with torch.no_grad():
        log_p = model(given.tokens, use_cache=False).logits.log_softmax(-1)
    expected, agrees = [], []
    for row, count in enumerate(given.lengths.tolist()):
        for anchor in range(int(given.learnt[row].int().argmax()), count - 2):
            ratios, equal = [], []
            for number in range(2):
                guessed, q = anchor + 1 + number, logits[number][row, anchor - 1].log_softmax(-1)
                if ids is not None:
                    q = torch.full((VOCAB,), -torch.inf).index_copy(0, ids, q)
                p, label = log_p[row, guessed - 1], int(given.tokens[row, guessed])
                ratios.append(float(q[label] - p[label]))
                equal.append(bool(q.argmax() == p.argmax()))
            expected.append(ratios)
            agrees.append(equal)
    assert np.allclose(judged.log_ratios, expected, atol=1e-4)
    assert judged.agrees.tolist() == agrees


@pytest.mark.parametrize("kind", KINDS)
def test_every_weight_learns_and_the_loss_falls(tmp_path, kind):
    made = fresh(kind)
    before = {name: weight.clone() for name, weight in made.named_parameters() if weight.requires_grad}
    with torch.no_grad():
        first = float(made(batch()).total)
    train(made, repeated(batch()), replace(SETTINGS, steps=30), tmp_path)
    with torch.no_grad():
        last = float(made(batch()).total)
    assert last < 0.8 * first, (first, last)
    for name, weight in made.named_parameters():
        if weight.requires_grad:
            assert not torch.equal(weight, before[name]), name


@pytest.mark.parametrize(("kind", "ids"), WITH_FEW)
def test_logits_that_are_kept_give_the_gradients_of_those_computed_again(monkeypatch, kind, ids):
    more = {} if ids is None else {"ids": ids}

    def gradients() -> dict[str, torch.Tensor]:
        made = learner(kind, **more)
        made(batch()).total.backward()
        return {name: weight.grad for name, weight in made.named_parameters() if weight.grad is not None}

    kept = gradients()
    monkeypatch.setattr(divergences, "KEPT", 0)
    again = gradients()
    assert kept.keys() == again.keys() != set()
    for name in kept:
        assert torch.allclose(kept[name], again[name], rtol=1e-4, atol=1e-6), name


@pytest.mark.parametrize(("kind", "ids"), [case for case in WITH_FEW if case[1] is not None])
def test_the_targets_output_layer_runs_once_for_all_guesses_of_a_head_with_few_tokens(kind, ids):
    made, given, seen = learner(kind, ids=ids), batch(), []
    output = made.embedding_and_head.head
    made.embedding_and_head = replace(
        made.embedding_and_head, head=lambda states: seen.append(states[..., 0].numel()) or output(states)
    )
    made(given)
    assert sum(seen) == int(given.learnt.sum())


@pytest.mark.parametrize("kind", KINDS)
def test_captured_states_give_the_loss_of_live_ones(kind):
    made, given, model = learner(kind), batch(), target()
    with torch.no_grad(), tapped(model.model.layers, range(4)) as seen:
        model(given.tokens, use_cache=False)
    with torch.no_grad():
        captured = made(replace(given, hidden=dict(seen)))
        assert float(captured.total) == pytest.approx(float(made(given).total), rel=1e-5)
        parts = [made(Batches.share(given, range(i, i + 1))) for i in range(3)]
        assert float(captured.total) == pytest.approx(sum(float(part.total) for part in parts), rel=1e-4)
        assert float(captured.weight) == pytest.approx(sum(float(part.weight) for part in parts), rel=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_trained_drafts_losslessly_and_trains_further(tmp_path, kind):
    made = fresh(kind)
    train(
        made,
        repeated(batch()),
        replace(SETTINGS, keep_best=False),
        tmp_path / "head",
        Evaluation(documents(), depth=2, max_length=24),
    )
    engine = outrider.load(target(), drafter=str(tmp_path / "head"), length="fixed:3")
    assert catalog.name_of(catalog.make("drafter", str(tmp_path / "head"))) == name_of(kind)
    prompts = [text.tokens[:7].tolist() for text in documents(2)]
    for sampling in (Sampling(temperature=0.0, seed=0), Sampling(temperature=1.0, seed=0)):
        drafted = engine.generate(prompts, max_new_tokens=12, sampling=sampling)
        assert sum(out.num_draft_tokens for out in drafted) > 0
        if sampling.temperature == 0:
            plain = engine.plain().generate(prompts, max_new_tokens=12, sampling=sampling)
            assert [out.tokens for out in drafted] == [out.tokens for out in plain]
    again = fresh(kind, loss="tvd", init_from=str(tmp_path / "head"))
    for mine, theirs in zip(learnt_logits(again, batch()), learnt_logits(made, batch()), strict=True):
        assert torch.allclose(mine, theirs, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_a_head_in_float32_learns_from_a_target_in_half_precision(tmp_path, kind):
    model = tiny("llama").to(torch.bfloat16).requires_grad_(False)
    made = fresh(kind, model)
    found = made(batch())
    found.total.backward()
    assert float(found.total.detach()) > 0
    assert {weight.dtype for weight in made.parameters()} == {torch.float32}
    made.write(tmp_path)
    engine = outrider.load(model, drafter=str(tmp_path), length="fixed:3")
    assert {weight.dtype for weight in weights_of(engine)} == {torch.bfloat16}
    wide = in_float32(engine)
    assert {weight.dtype for weight in weights_of(wide)} == {torch.float32}
    prompts, greedy = [text.tokens[:7].tolist() for text in documents(2)], Sampling(temperature=0.0, seed=0)
    drafted = wide.generate(prompts, max_new_tokens=8, sampling=greedy)
    plain = wide.plain().generate(prompts, max_new_tokens=8, sampling=greedy)
    assert [out.tokens for out in drafted] == [out.tokens for out in plain]


def weights_of(engine: Engine) -> list[torch.Tensor]:
    """The weights of an engine's drafter."""
    return [weight for module in engine.parts.drafter.modules.values() for weight in module.parameters()]


def test_accuracies_are_those_of_each_rank():
    made, given = learner("medusa"), batch()
    logits, found = learnt_logits(made, given), made.accuracies([given], ranks=4, greedy=False)
    for number in range(GAMMA):
        places = LearntPositions.of(given, number)
        ranked = logits[number][places.rows, places.at].argsort(-1, descending=True)[:, :4]
        assert np.allclose(found[number], (ranked == places.labels[:, None]).double().mean(0))
    assert not np.allclose(made.accuracies([given], ranks=4, greedy=True), found)


def test_balanced_guesses_have_the_same_weight_however_few_places_they_have():
    # Nothing stands before the first learnt token, so that deep guesses have fewer places.
    texts = [replace(text, start=0) for text in documents(3)]
    given = Batches(texts, batch_size=3, max_length=24, seed=0).batch(0)
    made = learner("eagle3", decay=0.5)
    counts = made.places_of(texts, 24)
    assert counts.tolist() == [len(LearntPositions.of(given, number).labels) for number in range(made.num_guesses)]
    assert len(set(counts.tolist())) == made.num_guesses
    made.slot_weights = tuple(slot_balanced(counts).tolist())
    with torch.no_grad():
        found = made(given)
    whole = float(counts.sum()) / made.num_guesses
    assert float(found.weight) == pytest.approx(whole * sum(0.5**number for number in range(made.num_guesses)))
    parts = []
    for number in range(made.num_guesses):
        made.slot_weights = tuple(float(each == number) for each in range(made.num_guesses))
        with torch.no_grad():
            one = made(given)
        parts.append(float(one.total / one.weight) * 0.5**number)
    assert float(found.total) == pytest.approx(whole * sum(parts), rel=1e-4)


def test_the_tree_that_fits_is_of_the_heads_that_were_kept(tmp_path):
    made = learner("medusa", tree_nodes=5)
    made.write(tmp_path)
    expected = likeliest_topology(made.accuracies([batch()], greedy=False), 5)
    with torch.no_grad():
        for weight in made.parameters():
            weight.zero_()
    [(name, tree)] = made.findings(tmp_path, [batch()]).items()
    assert (name, catalog.make("tree", tree)) == ("tree", FixedTree(children=expected, chosen=True))


def test_shared_heads_keep_the_targets_output_layer(tmp_path):
    made = head_learner("medusa", target(), loss="fkl", depth=GAMMA, shared=True)
    train(made, repeated(batch()), SETTINGS, tmp_path)
    assert torch.equal(made.head.lm_heads[0].weight, target().lm_head.weight)
    assert made.head.blocks[2].layers[0].weight.abs().max() > 0


def test_wrong_sizes_are_refused_in_one_sentence(tmp_path):
    for wrong, message in [
        ({"depth": 0}, "num_heads of Medusa heads must be >= 1, got 0"),
        ({"layers": -1}, "layers must be >= 0, got -1"),
        ({"decay": 0.0}, "decay must be > 0"),
        ({"init_from": str(tmp_path)}, r"no config\.json"),
    ]:
        with pytest.raises(InputError, match=message):
            head_learner("medusa", target(), **wrong)
    with pytest.raises(InputError, match=r"draft vocabulary must have 1\.\.64 tokens, got 65"):
        frequent_tokens(documents(), 65, VOCAB)
    with pytest.raises(InputError, match="drafts 3 tokens, so a depth of 4"):
        learner("medusa").judged(batch(), 4)
    head_learner("medusa", target(), depth=1).write(tmp_path)
    with pytest.raises(InputError, match="knows 64 tokens, and this target has 65"):
        head_learner("medusa", _wider(), init_from=str(tmp_path))


def _wider() -> PreTrainedModel:
    model = target()
    model.resize_token_embeddings(VOCAB + 1)
    return model
