"""Training of heads that guess blocks: training sees what drafting sees, what counts, what learns, what is written."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from outrider import catalog
from outrider.core.types import InputError
from outrider.heads.dspark import DSparkHead
from outrider.heads.objective import HeadContext, slot_balanced
from outrider.heads.trunks.blocks import (
    Anchors,
    BlockHead,
    BlockObjective,
    _misjudged,
    blocks,
    layers_like,
    unknown_token,
)
from outrider.learning.batch import TrainBatch
from outrider.learning.block_loss import BlockLoss
from outrider.lm.model import LanguageModel
from outrider.lm.target_info import TargetInfo
from outrider.training.data.batches import Batches
from outrider.training.loop.steps import train
from outrider.training.loop.watch import Evaluation
from tests.world.block_checkpoints import checkpoints
from tests.world.block_heads import BLOCKS, block_drafter, block_head
from tests.world.forced import forced_guesses
from tests.world.learners import SETTINGS, batch, documents, repeated
from tests.world.tokenizers import letters
from tests.world.zoo import VOCAB, tiny


def target_info(dtype: torch.dtype = torch.float32) -> TargetInfo:
    return TargetInfo.of(LanguageModel(tiny("llama").to(dtype), max_slots=2), None)


def learner(kind: str = "dflash", **named: object) -> BlockObjective:
    """A head with random weights and its target."""
    sizes = {name: named.pop(name) for name in ("windows", "markov", "from_anchor", "block_size") if name in named}
    return of(block_head(kind, target_info(), **sizes), **named)


def of(head: BlockHead, **named: object) -> BlockObjective:
    """What a head learns."""
    spec = BLOCKS[head.name]
    return spec.objective(head, spec.options(**named), HeadContext(target=tiny("llama").float()))


def fresh(kind: str, target: PreTrainedModel, tokenizer: object = None, **named: object) -> BlockObjective:
    """A new head of a target."""
    spec = BLOCKS[kind]
    return spec.learner(spec.options(**named), HeadContext(target=target, tokenizer=tokenizer, depth=2))


def trained(objective: BlockObjective, train_batch: TrainBatch, places: torch.Tensor) -> torch.Tensor:
    """The logits of all guesses of some blocks, as in training, with the text's own tokens before them."""
    config = objective.head.config
    with torch.no_grad():
        whole = objective.with_states(train_batch)
        hidden = blocks(objective.head, whole.tokens, objective._context(whole), places)
        preceding = train_batch.tokens.gather(1, (places - 1).clamp(min=0)).numpy()
        hidden = objective.head.guess_features(hidden, preceding)
        hidden = hidden[:, :, config.first : config.first + config.max_depth]
        before = (places[..., None] + torch.arange(config.max_depth)).clamp(max=train_batch.tokens.shape[1] - 1)
        rows = torch.arange(len(places))[:, None, None].expand(before.shape)
        return objective.head.logits_given_previous(
            objective.head.states_given_previous(hidden, train_batch.tokens[rows, before])
        )


VARIANTS = {
    "dflash": {},
    "windows": {"windows": True},
    "dflare": {},
    "dspark": {"markov": "vanilla"},
    "dspark-gated": {"markov": "gated", "from_anchor": False},
    "dspark-rnn": {"markov": "rnn"},
    "jetspec": {},
    "domino": {},
    "dflash2": {},
    "xpress": {},
    "xpress-anchor": {"from_anchor": True},
}


@pytest.mark.parametrize("kind", VARIANTS)
def test_a_block_in_training_is_the_block_that_is_drafted_behind_the_same_anchor(kind):
    method = {"windows": "dflash"}.get(kind, kind.split("-")[0])
    objective, text = learner(method, **VARIANTS[kind]), documents()[0].tokens.tolist()
    train_batch = Batches([documents()[0]], batch_size=1, max_length=24, seed=0).batch(0)
    drafter, depth = block_drafter(method, target_info(), objective.head), objective.head.config.max_depth
    guesses = forced_guesses(drafter, LanguageModel(tiny("llama").float(), max_slots=1), text, 3, depth)
    assert len(guesses) > 20
    for (place, number), logits in guesses.items():
        expected = trained(objective, train_batch, torch.tensor([[place - number - 1]]))[0, 0, number]
        # Some random heads have large logits.
        atol = max(1e-4, 5e-6 * float(expected.abs().max()))
        torch.testing.assert_close(logits, expected, rtol=0, atol=atol)


@pytest.mark.parametrize("kind", BLOCKS)
def test_a_block_depends_on_nothing_behind_its_anchor_and_on_no_other_block(kind):
    objective, train_batch = learner(kind), batch()
    places = torch.tensor([[4, 6, 7, 9]]).expand(3, -1)
    before = trained(objective, train_batch, places)
    for j in range(4):
        alone = trained(objective, train_batch, places[:, j : j + 1])
        assert torch.allclose(alone[:, 0], before[:, j], atol=1e-4)
    tokens, states = train_batch.tokens.clone(), objective.with_states(train_batch)
    tokens[:, 9:] = (tokens[:, 9:] + 1) % VOCAB
    after = trained(objective, replace(train_batch, tokens=tokens), places)
    assert torch.equal(before[:, 0, :2], after[:, 0, :2])
    changed = {tap: torch.cat([hidden[:, :7], hidden[:, 7:] + 1], 1) for tap, hidden in states.hidden.items()}
    after = trained(objective, replace(states, hidden=changed), places)
    # The state at an anchor is not known either.
    assert torch.equal(before[:, :3], after[:, :3])
    assert not torch.allclose(before[:, 3], after[:, 3], atol=1e-3)


def test_a_batch_has_the_loss_of_its_rows():
    objective = learner(num_anchors=4)
    with torch.no_grad():
        whole, parts = objective(batch()), [objective(Batches.share(batch(), range(i, i + 1))) for i in range(3)]
    assert float(whole.total) == pytest.approx(sum(float(part.total) for part in parts), rel=1e-4)
    assert float(whole.weight) == pytest.approx(sum(float(part.weight) for part in parts), rel=1e-6)


def test_the_loss_is_that_of_every_guess_of_a_learnt_token_weighted_by_depth():
    objective, train_batch = learner(num_anchors=3, hard=0.25, gamma=2.0), batch()
    target, drawn = tiny("llama").float(), objective.anchors(train_batch)
    with torch.no_grad():
        loss, rows = objective(train_batch), target(train_batch.tokens, use_cache=False).logits
    total = weight = 0.0
    for row, places in enumerate(drawn.places.tolist()):
        for j, anchor in enumerate(places):
            if not drawn.real[row, j]:
                continue
            assert train_batch.learnt[row, anchor]
            logits = trained(objective, train_batch, torch.tensor([[anchor]] * 3))[row, 0]
            for k in range(1, 4):
                if anchor + k < int(train_batch.lengths[row]) and train_batch.learnt[row, anchor + k]:
                    log_q = logits[k - 1].log_softmax(-1)
                    p = rows[row, anchor + k - 1].softmax(-1)
                    soft = float((p * (p.log() - log_q)).sum())
                    hard = -float(log_q[train_batch.tokens[row, anchor + k]])
                    share = np.exp(-(k - 1) / 2.0)
                    total, weight = total + share * (0.75 * soft + 0.25 * hard), weight + share
    assert float(loss.total) == pytest.approx(total, rel=1e-4)
    assert float(loss.weight) == pytest.approx(weight, rel=1e-6)


def test_balanced_depths_have_the_same_weight_however_few_anchors_have_them():
    texts = documents(3)
    train_batch = Batches(texts, batch_size=3, max_length=24, seed=0).batch(0)
    objective = learner(num_anchors=99, gamma=1e9)
    counts = objective.places_of(texts, 24)
    objective.slot_weights = tuple(float(each == 0) for each in range(len(counts)))
    with torch.no_grad():
        assert float(objective(train_batch).weight) == float(counts[0])
        objective.slot_weights = tuple(slot_balanced(counts).tolist())
        assert float(objective(train_batch).weight) == pytest.approx(float(counts.sum()), rel=1e-4)
    assert len(set(counts.tolist())) == len(counts)


def test_anchors_are_learnt_tokens_drawn_anew_in_every_step_and_the_same_for_every_share():
    objective = learner(num_anchors=3)
    seen = set()
    for step in range(40):
        train_batch = replace(batch(), step=step)
        drawn = objective.anchors(train_batch)
        assert drawn.real.all()
        assert train_batch.learnt.gather(1, drawn.places).all()
        assert train_batch.learnt.gather(1, drawn.places + 1).all()
        assert (drawn.places.diff(dim=1) > 0).all()
        part = objective.anchors(Batches.share(train_batch, range(1, 2)))
        assert part.places.tolist() == drawn.places[1:2].tolist()
        seen.update(drawn.places[0].tolist())
    assert len(seen) > 3
    single = replace(batch(), learnt=torch.zeros_like(batch().learnt))
    single.learnt[0, 5] = True
    assert objective.anchors(single).places[0, 0] == 4
    assert objective.anchors(single).real.tolist() == [[True], [False], [False]]


def test_weights_by_survival_are_the_expected_number_of_guesses_that_follow():
    q = torch.tensor([[[0.5, 0.2, 0.9]]])
    valid = torch.tensor([[[True, True, True]]])
    weights = BlockLoss(weighting="survival").weights(q.log(), valid)[0, 0]
    r = 0.5 * q[0, 0] + 0.5
    assert torch.allclose(weights, torch.stack([r[0] + r[0] * r[1] + r.prod(), r[0] * r[1] + r.prod(), r.prod()]))


@pytest.mark.parametrize("divergence", ["fkl", "ce"])
def test_captured_states_give_the_loss_of_live_ones(divergence):
    objective, train_batch = learner(divergence=divergence, num_anchors=4), batch()
    captured = objective.with_states(train_batch)
    with torch.no_grad():
        live = objective(train_batch)
        assert float(objective(captured).total) == pytest.approx(float(live.total), rel=1e-6)
        other = replace(
            captured, hidden={tap: states + torch.randn_like(states) for tap, states in captured.hidden.items()}
        )
        assert float(objective(other).total) != pytest.approx(float(live.total), rel=1e-3)
        logits = tiny("llama").float()(train_batch.tokens, use_cache=False).logits
        few = {tap: captured.hidden[tap] for tap in objective.head.config.taps}
        kept = replace(captured, hidden=few, logits_of_target=logits)
        assert float(objective(kept).total) == pytest.approx(float(live.total), rel=1e-4)


def test_what_is_watched_are_drafts_behind_every_learnt_token():
    objective, train_batch = learner("dspark"), batch()
    judged = objective.judged(train_batch, 3)
    with torch.no_grad():
        log_p = tiny("llama").float()(train_batch.tokens, use_cache=False).logits.log_softmax(-1)
    expected, agrees = {}, {}
    for row, count in enumerate(train_batch.lengths.tolist()):
        start = int(train_batch.learnt[row].int().argmax())
        for anchor in range(start, count - 3):
            log_q = trained(objective, train_batch, torch.tensor([[anchor]] * 3))[row, 0].log_softmax(-1)
            places = [(anchor + i, int(train_batch.tokens[row, anchor + i + 1])) for i in range(3)]
            key = row, anchor
            expected[key] = [float(log_q[i, y] - log_p[row, at, y]) for i, (at, y) in enumerate(places)]
            agrees[key] = [bool(log_q[i].argmax() == log_p[row, at].argmax()) for i, (at, _) in enumerate(places)]
    assert np.allclose(judged.log_ratios, list(expected.values()), atol=1e-4)
    assert judged.agrees.tolist() == list(agrees.values())


def test_a_text_with_more_anchors_than_are_judged_at_once_is_judged_whole(monkeypatch):
    objective, train_batch = learner(), batch()
    whole = objective.judged(train_batch, 2)
    monkeypatch.setattr("outrider.heads.trunks.blocks.JUDGED_AT_ONCE", 3)
    parts = objective.judged(train_batch, 2)
    assert len(whole.log_ratios) == len(parts.log_ratios) > 9
    order = [np.lexsort(each.log_ratios.T) for each in (whole, parts)]
    assert np.allclose(whole.log_ratios[order[0]], parts.log_ratios[order[1]], atol=1e-5)


def with_weights_of(child: BlockHead, parent: BlockHead) -> BlockHead:
    """A child that computes what its parent computes."""
    child.load_state_dict(parent.state_dict(), strict=False)
    return child


def test_a_sequential_head_that_adds_nothing_leaves_dflash_that_samples_from_the_anchor():
    around = target_info()
    parent = block_head("dflash", around, from_anchor=True)
    for markov in ("vanilla", "gated", "rnn"):
        child = with_weights_of(block_head("dspark", around, markov=markov, seed=8), parent)
        assert isinstance(child, DSparkHead)
        torch.nn.init.zeros_(child.markov_head.markov_w2.weight)
        places = torch.tensor([[4, 6]]).expand(3, -1)
        rows = [trained(of(head), batch(), places) for head in (parent, child)]
        assert torch.allclose(rows[0], rows[1], atol=1e-4)


def test_new_heads_that_correct_guesses_begin_as_dflash_to_the_bit():
    parent, places = fresh("dflash", tiny("llama").float(), taps=(1, 2)), torch.tensor([[4, 6]]).expand(3, -1)
    expected = trained(parent, batch(), places)
    for kind, allowed in (("domino", VOCAB), ("dflash2", 16), ("xpress", VOCAB)):
        child = fresh(kind, tiny("llama").float(), taps=(1, 2))
        with_weights_of(child.head, parent.head)
        logits = trained(child, batch(), places)
        assert (logits.isfinite().sum(-1) == allowed).all()
        assert torch.equal(logits[logits.isfinite()], expected[logits.isfinite()])


def test_the_guesses_of_the_trunk_alone_learn_beside_those_that_xpress_corrects():
    target, loss = tiny("llama").float(), {"divergence": "tvd", "hard": 0.1}
    parent, child = fresh("dflash", target, taps=(1, 2), **loss), fresh("xpress", target, taps=(1, 2))
    with_weights_of(child.head, parent.head)
    alone, both = (float(each(batch()).total.detach()) for each in (parent, child))
    # At the start the refiner corrects nothing.
    assert both == pytest.approx((1 + 0.6) * alone, rel=1e-4)


def test_a_mixture_of_one_layer_with_the_same_projections_leaves_dflash():
    around = target_info()
    parent = block_head("dflash", around)
    child = with_weights_of(block_head("dflare", around, seed=8), parent)
    size = around.hidden_size
    with torch.no_grad():
        parent.fc.weight.copy_(torch.cat([torch.zeros(size, size), torch.eye(size)], 1))
        child.fusion_weights.copy_(torch.tensor([[-1e4, 0.0]] * 2))
        for layer, norm in zip(child.layers, child.fusion_norms, strict=True):
            norm.load_state_dict(parent.hidden_norm.state_dict())
            layer.self_attn.k_proj_target.load_state_dict(layer.self_attn.k_proj.state_dict())
            layer.self_attn.v_proj_target.load_state_dict(layer.self_attn.v_proj.state_dict())
    places = torch.tensor([[4, 6]]).expand(3, -1)
    rows = [trained(of(head), batch(), places) for head in (parent, child)]
    assert torch.allclose(rows[0], rows[1], atol=1e-4)


@pytest.mark.parametrize("kind", BLOCKS)
def test_a_new_head_learns_and_all_of_it_moves(tmp_path, kind):
    target = tiny("llama").float()
    more = {"markov_rank": 6, "markov": "gated", "divergence": "tvd"} if kind == "dspark" else {}
    objective = fresh(kind, target, letters(), layers=2, block_size=4, hard=0.1, num_anchors=8, **more)
    config = objective.head.config
    before = {name: weight.clone() for name, weight in objective.state_dict().items()}
    still = {name: weight.clone() for name, weight in target.state_dict().items()}
    with torch.no_grad():
        first = objective(batch())
    done = train(
        objective,
        repeated(batch()),
        replace(SETTINGS, steps=60),
        tmp_path,
        Evaluation(documents(), depth=2, max_length=24),
    )
    with torch.no_grad():
        last = objective(batch())
    assert float(last.total / last.weight) < 0.8 * float(first.total / first.weight)
    assert [name for name, weight in objective.state_dict().items() if torch.equal(weight, before[name])] == []
    assert all(torch.equal(weight, still[name]) for name, weight in target.state_dict().items())
    lm = LanguageModel(target, max_slots=2)
    drafter = catalog.make("drafter", f"{kind}:path={done.out}").bind(TargetInfo.of(lm, None))
    assert (drafter.taps, drafter.mask_id, drafter.block_size) == (config.taps, config.mask_id, 4)
    assert drafter.from_anchor is (kind == "dspark")


def test_a_new_head_fits_its_target():
    for name in ("llama", "gpt2", "gemma3", "qwen3_moe"):
        target = tiny(name).float()
        loss = fresh("dflash", target, layers=1, block_size=3, num_anchors=2)(batch())
        assert float(loss.weight) > 0
        assert torch.isfinite(loss.total)
    with pytest.raises(InputError, match="several residual streams"):
        fresh("dflash", tiny("gemma3n"))
    config = layers_like(tiny("llama").config, 2, VOCAB)
    assert (config.num_hidden_layers, config.hidden_size, config.head_dim) == (2, 32, 8)
    assert unknown_token(tiny("llama"), None) == 0
    tokenizer = letters()
    ids = {"unk_token": 3, "pad_token": 4, "mask_token": 5}
    for kind, expected in ids.items():
        setattr(tokenizer, kind, tokenizer.convert_ids_to_tokens(expected))
        assert unknown_token(tiny("llama"), tokenizer) == expected


def test_what_does_not_fit_is_refused(tmp_path):
    target = tiny("llama").float()
    for kind, wrong, message in (
        ("dflash", {"taps": (9,)}, r"taps must be in 0..3"),
        ("dflash", {"taps": (1, 1)}, "different hidden states"),
        ("dflash", {"mask_token_id": VOCAB}, "mask_token_id must be in"),
        ("dflash", {"block_size": 1}, "block_size must be >= 2"),
        ("dflash", {"block_size": 2}, "a block of 2 guesses 1 tokens, and depth is 2"),
        ("dflash", {"layers": 0}, "layers must be >= 1"),
        ("dspark", {"markov": "gru"}, "unknown sequential head 'gru'"),
        ("dspark", {"markov_rank": 0}, "markov_rank must be >= 1"),
        ("dflash", {"num_anchors": 0}, "num_anchors must be >= 1"),
        ("dflash", {"gamma": 0.0}, "gamma must be > 0"),
        ("dflash", {"hard": 1.5}, r"hard must be in \[0, 1\]"),
        ("dflash", {"weighting": "all"}, "weighting must be one of decay, even, survival"),
    ):
        with pytest.raises(InputError, match=message):
            fresh(kind, target, **wrong)
    published = checkpoints(VOCAB)
    separate, plain = (published[kind].save(tmp_path / kind) for kind in ("dflash-own-ends", "dflash"))
    for kind, wrong, message in (
        ("dflash", {"init_from": separate}, "has an output layer of its own"),
        ("dspark", {"init_from": separate}, "is no dspark head"),
        ("dflash", {"init_from": plain, "layers": 2, "hard": 0.1}, "^layers: the head in"),
    ):
        with pytest.raises(InputError, match=message):
            fresh(kind, target, **wrong)
    with pytest.raises(InputError, match="a block of 4 guesses 3 tokens, and depth is 5"):
        learner().judged(batch(), 5)
    assert isinstance(learner().anchors(batch()), Anchors)


def test_rows_without_a_common_token_leave_the_loss_of_confidence_finite() -> None:
    far = torch.tensor([1.0, 1.0 + 2**-23, 1.0 + 2**-20, 0.0, -(2**-23)])
    divergences = _misjudged(torch.zeros(5), far)
    assert torch.allclose(divergences, torch.full((5,), math.log(2)), atol=1e-5), divergences
