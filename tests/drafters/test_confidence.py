"""DSpark's confidence head: what it says, that stopping by it keeps the law, and what it learns."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from outrider import catalog
from outrider.core.types import InputError, Sampling
from outrider.engine.engine import Engine
from outrider.heads.dspark import SPEC, DSparkOptions
from outrider.heads.objective import HeadContext
from outrider.learning.batch import Document
from outrider.lengths.confident import ConfidentLength
from outrider.lengths.fixed import FixedLength
from outrider.lm.model import LanguageModel
from outrider.lm.target_info import TargetInfo
from outrider.proof.rule import law_error
from outrider.refusals import Cell, refusal
from outrider.training.data.batches import Batches
from outrider.verifiers.token import TokenVerifier
from tests.world.block_checkpoints import BLOCK, RANK, block_logits, checkpoints
from tests.world.heads import head
from tests.world.models import target
from tests.world.parts import parts_of
from tests.world.tables import tables
from tests.world.verifiers import verifier
from tests.world.zoo import VOCAB, tiny

GREEDY = Sampling(temperature=0.0, seed=0)
PROMPTS = [[3, 1, 4, 1, 5], [9, 2, 6, 5, 3, 5, 8]]


def bound(kind, tmp_path, lm, drop=()):
    made = checkpoints(VOCAB)[kind]
    made.tensors = {name: tensor for name, tensor in made.tensors.items() if name not in drop}
    return made, catalog.make("drafter", f"dspark:path={made.save(tmp_path / kind)}").bind(TargetInfo.of(lm, None))


def engine(drafter, lm, length):
    parts = parts_of(lm, drafter, length=length)
    return Engine(parts, max_slots=2)


@pytest.mark.usefixtures("float64_stays_float64")
@pytest.mark.parametrize("narrow", [False, True], ids=["reads the tokens", "reads the trunk alone"])
@pytest.mark.parametrize("kind", ["dspark-vanilla", "dspark-gated", "dspark-rnn"])
def test_the_survival_is_the_product_of_what_its_description_says(tmp_path, monkeypatch, kind, narrow):
    model = tiny("llama")
    lm = LanguageModel(model, max_slots=2)
    made, drafter = bound(kind, tmp_path, lm)
    if narrow:
        weight = made.tensors["confidence_head.proj.weight"][:, :-RANK]
        made.tensors["confidence_head.proj.weight"] = weight
        drafter = catalog.make("drafter", f"dspark:path={made.save(tmp_path / kind)}").bind(TargetInfo.of(lm, None))
    seen = []
    reach = ConfidentLength.reach

    def noted(self, states, level):
        seen.append((level.depth, level.owners.tolist(), level.survival.clone()))
        return reach(self, states, level)

    monkeypatch.setattr(ConfidentLength, "reach", noted)
    busy = engine(drafter, lm, ConfidentLength(threshold=0.0))
    [out] = busy.generate(PROMPTS[:1], max_new_tokens=8, sampling=GREEDY)
    # The first step drafts nothing, so that the first draft is behind its token.
    text = (*PROMPTS[0], out.tokens[0])
    w, first = made.tensors, 0 if made.from_anchor else 1
    ends = model.get_input_embeddings().weight.detach(), model.get_output_embeddings().weight.detach()
    with torch.no_grad():
        states = model(torch.tensor([text[:-1]]), use_cache=False, output_hidden_states=True).hidden_states
        hidden, _ = block_logits(made, tuple(each[0] for each in states), text[-1], *ends)
    read = w["markov_head.markov_w1.weight"][text[-1]]
    inner = hidden[first] if narrow else torch.cat([hidden[first], read])
    expected = torch.sigmoid(w["confidence_head.proj.weight"] @ inner + w["confidence_head.proj.bias"])
    assert seen[0][0] == 0
    assert float(abs(seen[0][2] - expected)) < 1e-6
    depths = [depth for depth, _, _ in seen[: BLOCK if made.from_anchor else BLOCK - 1]]
    assert depths == list(range(len(depths)))
    falling = [float(survival) for _, _, survival in seen[: len(depths)]]
    assert falling == sorted(falling, reverse=True)


@pytest.mark.parametrize("rule", ["token", "block", "match"])
def test_stopping_by_confidence_keeps_the_law(monkeypatch, rule):
    drafter = head("dspark", TargetInfo.of(target(1), None)).on_tables(2, seed=1)
    with torch.no_grad():
        chances = drafter.judge(None, drafter.markov.markov_w1.weight).sigmoid()
    # Between the survivals of the tokens at depth 2.
    threshold = float(chances.outer(chances).flatten()[[0, 3]].mean())
    parts = tables(2, verifier(rule), ConfidentLength(num_speculative_tokens=3, threshold=threshold), drafter=drafter)
    reach, ends = ConfidentLength.reach, set()

    def noted(self, states, level):
        found = reach(self, states, level)
        ends.update([] if found is None else found.tolist())
        return found

    monkeypatch.setattr(ConfidentLength, "reach", noted)
    assert law_error(parts) < 1e-12
    # Some drafts end and some go on.
    assert ends == {0, 3}


@pytest.mark.usefixtures("float64_stays_float64")
def test_a_draft_ends_where_the_survival_is_below_the_threshold(tmp_path):
    lm = LanguageModel(tiny("llama"), max_slots=2)
    _, drafter = bound("dspark-vanilla", tmp_path, lm)
    drafts = {}
    for threshold in (0.0, 0.5, 1.0):
        busy = engine(drafter, lm, ConfidentLength(threshold=threshold))
        made = busy.generate(PROMPTS, max_new_tokens=12, sampling=GREEDY)
        drafts[threshold] = sum(out.num_draft_tokens for out in made) / sum(out.num_steps - 1 for out in made)
        busy.rest()
    plain = engine(drafter, lm, FixedLength(num_speculative_tokens=BLOCK))
    assert [out.tokens for out in plain.generate(PROMPTS, max_new_tokens=12, sampling=GREEDY)] == [
        out.tokens for out in made
    ]
    # The last step of a request may have no room for a draft.
    assert drafts[1.0] <= 1 < drafts[0.5] < drafts[0.0]


@pytest.mark.usefixtures("float64_stays_float64")
def test_a_head_without_confidence_is_refused_with_the_length_that_needs_it(tmp_path):
    lm = LanguageModel(tiny("llama"), max_slots=2)
    _, drafter = bound("dspark-vanilla", tmp_path, lm, ["confidence_head.proj.weight", "confidence_head.proj.bias"])
    assert not drafter.estimates
    cell = Cell(rows="sampled", structure="chain", verifier=TokenVerifier(), length=ConfidentLength())
    assert "needs a drafter that estimates" in refusal(cell)
    assert refusal(Cell(**{**vars(cell), "estimates": True})) is None
    with pytest.raises(InputError, match="threshold must be in"):
        ConfidentLength(threshold=1.5)


def documents():
    dice = np.random.default_rng(0)
    return [Document(tokens=dice.integers(3, VOCAB, size=16), start=4) for _ in range(6)]


def test_confidence_learns_the_chance_of_acceptance_and_nothing_else_learns_from_it():
    model = tiny("llama").float().requires_grad_(False)
    options = DSparkOptions(layers=1, block_size=4, markov_rank=6, num_anchors=4)
    learners = [
        SPEC.learner(replace(options, confidence=confidence), HeadContext(target=model, depth=4))
        for confidence in (False, True)
    ]
    plain, made = (learner.head for learner in learners)
    trunk = {name for name, _ in plain.named_parameters()}
    assert {name for name, _ in made.named_parameters()} - trunk == {
        "confidence_head.proj.weight",
        "confidence_head.proj.bias",
    }
    made.load_state_dict(plain.state_dict(), strict=False)
    given = Batches(documents(), batch_size=6, max_length=16, seed=0).batch(0)
    grads = []
    for learner in learners:
        loss = learner(given)
        loss.total.backward()
        grads.append({name: weight.grad.clone() for name, weight in learner.head.named_parameters() if name in trunk})
    assert all(torch.allclose(grads[0][name], grads[1][name], atol=1e-6) for name in trunk)
    steps = torch.optim.Adam(made.confidence_head.parameters(), lr=0.1)
    losses = []
    made.requires_grad_(False)
    learner = SPEC.objective(made, replace(options, divergence="tvd"), learners[1].context)
    made.confidence_head.requires_grad_(True)
    for _ in range(40):
        loss = learner(given)
        losses.append(float((loss.total / loss.weight).detach()))
        steps.zero_grad()
        (loss.total / loss.weight).backward()
        steps.step()
    assert losses[-1] < losses[0]
    assert all(math.isfinite(each) for each in losses)
    # Heads without training are right as often as chance has it, and that is what confidence has learnt.
    whole = learner.with_states(given)
    found = learner._guesses(whole, learner._context(whole), learner.anchors(given), 3)
    with torch.no_grad():
        said = made.confidence(found.inner).sigmoid()
        rows = model(given.tokens, use_cache=False).logits[found.rows, found.before].softmax(-1)
        near = torch.minimum(rows, made.logits_given_previous(found.inner).softmax(-1)).sum(-1)
    assert float((said - near).abs().mean()) < float((near - 0.5).abs().mean())
