"""Distillation: which rows learn what, on which texts, and what is written."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

import outrider
from outrider.core.types import InputError
from outrider.learning.batch import Document, TrainBatch
from outrider.learning.divergences import divergence
from outrider.learning.top_rows import TopRows
from outrider.theory.estimators import expected_accepted
from outrider.training.data.batches import Batches
from outrider.training.distill import Data, Distilled, distilled
from outrider.training.loop.journal import read
from outrider.training.loop.settings import TrainSettings
from outrider.training.loop.steps import train
from outrider.training.loop.watch import Evaluation, hold_out
from outrider.training.on_policy import Sampler
from tests.world.learners import repeated
from tests.world.tokenizers import byte_level, letters
from tests.world.zoo import VOCAB, tiny

SETTINGS = TrainSettings(
    steps=10, batch_size=3, max_length=24, learning_rate=3e-3, warmup=2, save_every=5, watch_every=5, log_every=1
)


def documents(count: int = 9, prompt: bool = True) -> list[Document]:
    dice = np.random.default_rng(0)
    return [
        Document(tokens=dice.integers(3, VOCAB, size=size), start=int(size // 3) if prompt else 0)
        for size in dice.integers(8, 20, size=count)
    ]


def batch(prompt: bool = True) -> TrainBatch:
    return Batches(documents(prompt=prompt), batch_size=3, max_length=24, seed=0).batch(0)


def learner(name: str = "llama", loss: str | None = "fkl", **named: object) -> Distilled:
    """A draft model of an architecture, with other weights than its target."""
    of = None if loss is None else divergence(loss)
    return Distilled(tiny(name, seed=1).float(), tiny(name), loss=of, **named)


def loss_by_hand(model: PreTrainedModel, target: PreTrainedModel, given: TrainBatch, name: str) -> Tensor:
    """Token by token: what stands at j is guessed by the row at j - 1."""
    total = torch.zeros(())
    ours, theirs = model(given.tokens).logits, target(given.tokens).logits
    for row in range(len(given.tokens)):
        for j in range(1, given.tokens.shape[1]):
            if given.learnt[row, j]:
                total = total + divergence(name)(theirs[row, j - 1, None], ours[row, j - 1, None])[0]
    return total


@pytest.mark.parametrize("name", ["fkl", "tvd", "jsd:beta=0.3"])
def test_loss_is_the_divergence_of_the_rows_that_guess_learnt_tokens(name: str) -> None:
    given, made = batch(), learner(loss=name)
    with torch.no_grad():
        loss = made(given)
        expected = loss_by_hand(made.model, tiny("llama"), given, name)
    assert loss.weight == given.learnt.sum() > 0
    assert torch.allclose(loss.total.double(), expected.double(), rtol=1e-4), (loss.total, expected)


def test_chunks_change_neither_loss_nor_gradient() -> None:
    given = batch()
    one, other = learner(chunk=1000), learner(chunk=4)
    losses = [each(given).total for each in (one, other)]
    for loss in losses:
        loss.backward()
    assert torch.allclose(*losses, rtol=1e-5)
    for ours, theirs in zip(one.parameters(), other.parameters(), strict=True):
        assert torch.allclose(ours.grad, theirs.grad, rtol=1e-3, atol=1e-6)


def test_hard_labels_need_no_target() -> None:
    model, given = tiny("llama", seed=1).float(), batch()
    loss = Distilled(model, None, loss=None)(given)
    log_q = model(given.tokens).logits.log_softmax(-1)[:, :-1].gather(-1, given.tokens[:, 1:, None])[..., 0]
    assert torch.allclose(loss.total, -log_q[given.learnt[:, 1:]].sum(), rtol=1e-4)
    with pytest.raises(InputError, match="a divergence needs a target"):
        Distilled(model, None, loss=divergence("fkl"))


def test_captured_rows_give_the_loss_of_a_live_target() -> None:
    given, made = batch(), learner()
    target = tiny("llama")
    with torch.no_grad():
        logits = target(given.tokens).logits
        live = made(given).total
        whole = made(replace(given, logits_of_target=logits)).total
        top = made(replace(given, rows_of_target=TopRows.of(logits, VOCAB - 1))).total
        few = made(replace(given, rows_of_target=TopRows.of(logits, 4))).total
        seen: list[Tensor] = []
        hook = target.model.norm.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
        target(given.tokens)
        hook.remove()
        tapped = made(replace(given, hidden={3: seen[0]})).total
    assert float(whole) == pytest.approx(float(live), rel=1e-4)
    assert float(top) == pytest.approx(float(live), rel=1e-4)
    assert float(tapped) == pytest.approx(float(live), rel=1e-4)
    assert few < live


@pytest.mark.parametrize("prompt", [True, False])
def test_the_draft_model_continues_prompts_without_a_graph(prompt: bool) -> None:
    given, model = batch(prompt), tiny("llama", seed=1).float()
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        found = Sampler(seed=0)(model, given)
    assert not kept
    assert not found.tokens.requires_grad
    assert torch.equal(found.lengths, given.lengths)
    for row in range(3):
        first = int(found.learnt[row].int().argmax())
        assert torch.equal(found.tokens[row, :first], given.tokens[row, :first])
        assert found.learnt[row, first : found.lengths[row]].all()
        assert not found.learnt[row, found.lengths[row] :].any()
        assert not found.learnt[row, 0]
        if prompt:
            assert torch.equal(found.learnt[row], given.learnt[row])
    assert not torch.equal(found.tokens, given.tokens)


def test_what_the_draft_model_writes_is_drawn_from_its_own_rows() -> None:
    model = tiny("llama", seed=1).float()
    document = Document(tokens=np.array([5, 9, 4, 7]), start=3)
    counts = torch.zeros(VOCAB)
    rows, steps = 50, 40
    for step in range(steps):
        given = Batches([document], batch_size=rows, max_length=8, seed=0).batch(step)
        counts += torch.bincount(Sampler(seed=0)(model, given).tokens[:, 3], minlength=VOCAB)
    with torch.no_grad():
        expected = model(torch.tensor([[5, 9, 4]])).logits[0, -1].softmax(-1) * rows * steps
    likely = expected > 5
    deviation = ((counts - expected)[likely] ** 2 / expected[likely]).sum()
    assert deviation < 2 * likely.sum() + 10, (deviation, likely.sum())


def test_draws_of_a_row_depend_on_no_other_row() -> None:
    given, model = batch(), tiny("llama", seed=1).double()
    together = Sampler(seed=3)(model, given)
    for row in range(3):
        alone = Sampler(seed=3)(model, Batches.share(given, range(row, row + 1)))
        width = int(alone.lengths[0])
        assert torch.equal(alone.tokens[0, :width], together.tokens[row, :width])
    assert not torch.equal(Sampler(seed=4)(model, given).tokens, together.tokens)
    assert not torch.equal(Sampler(seed=3)(model, replace(given, step=1)).tokens, together.tokens)


def test_an_end_of_text_ends_the_row() -> None:
    given, model = batch(), tiny("llama", seed=1).float()
    ends = list(range(VOCAB // 2))
    found = Sampler(seed=0, eos_ids=ends)(model, given)
    for row in range(3):
        made = found.tokens[row][found.learnt[row]].tolist()
        assert all(token not in ends for token in made[:-1]), made
    assert (found.lengths < given.lengths).any()


def test_mixed_data_leave_a_share_of_the_rows_as_they_are() -> None:
    model = tiny("llama", seed=1).float()
    own = 0
    for step in range(10):
        given = Batches(documents(), batch_size=6, max_length=24, seed=0).batch(step)
        found = Sampler(seed=0, share=0.5)(model, given)
        own += sum(not torch.equal(a, b) for a, b in zip(found.tokens, given.tokens, strict=True))
    assert 15 <= own <= 45, own


def test_a_penalty_of_the_model_does_not_change_what_it_draws() -> None:
    given, model = batch(), tiny("llama", seed=1).float()
    plain = Sampler(seed=0)(model, given)
    model.generation_config.repetition_penalty = 5.0
    assert torch.equal(Sampler(seed=0)(model, given).tokens, plain.tokens)
    assert model.generation_config.repetition_penalty == 5.0


def test_data_names() -> None:
    assert [Data.of(name).share for name in ("fixed", "target", "on_policy", "mixed", "mixed:share=0.25")] == [
        0,
        0,
        1,
        0.5,
        0.25,
    ]
    assert Data.of("target").regenerated
    assert not Data.of("on_policy").regenerated
    for name in ("onpolicy", "fixed:share=1"):
        with pytest.raises(InputError, match=f"unknown data '{name}'; use fixed, target, on_policy or mixed"):
            Data.of(name)
    with pytest.raises(InputError, match=r"a number in 0..1, got 'share=2'"):
        Data.of("mixed:share=2")


def test_watched_acceptance_is_that_of_the_estimators() -> None:
    model, target = tiny("llama", seed=1).double(), tiny("llama")
    made = Distilled(model, target, loss=divergence("fkl"))
    held = documents()
    found = Evaluation(held, depth=3, max_length=24).look(made)
    ratios, agrees = [], []
    for document in held:
        tokens = torch.from_numpy(document.tokens)
        with torch.no_grad():
            log_q, log_p = (each(tokens[None]).logits[0].log_softmax(-1) for each in (model, target))
        for begin in range(max(1, document.start), len(tokens) - 2):
            places = range(begin, begin + 3)
            ratios.append([float(log_q[j - 1, tokens[j]] - log_p[j - 1, tokens[j]]) for j in places])
            agrees.append([bool(log_q[j - 1].argmax() == log_p[j - 1].argmax()) for j in places])
    assert found.num_steps == len(ratios)
    estimate = expected_accepted(np.array(ratios)).token.mean()
    assert found.block_efficiency == pytest.approx(1 + estimate, rel=1e-4)
    assert found.accepted_greedy == pytest.approx(np.cumprod(agrees, 1).mean(0))


def test_the_target_as_its_own_drafter_is_always_accepted() -> None:
    made = Distilled(tiny("llama"), tiny("llama"), loss=divergence("fkl"))
    found = Evaluation(documents(), depth=4).look(made)
    assert found.block_efficiency == pytest.approx(5)
    assert found.block_efficiency_greedy == 5


def test_texts_too_short_to_watch_are_refused() -> None:
    with pytest.raises(InputError, match="no held-out text has 30 tokens after its prompt"):
        Evaluation(documents(), depth=30)


def test_held_out_texts_are_not_trained_on() -> None:
    whole = documents(20)
    kept, held = hold_out(whole, 0.2)
    assert len(held) == 4
    assert sorted([*kept.numbers, *held.numbers]) == list(range(20))
    assert hold_out(whole, 0.2)[1].numbers == held.numbers
    with pytest.raises(InputError, match="the corpus has one document"):
        hold_out(whole[:1], 0.2)


@pytest.mark.parametrize("name", ["qwen3", "gemma3", "mixtral"])
@pytest.mark.parametrize("data", ["fixed", "on_policy"])
def test_published_architectures_learn_and_load_in_transformers(tmp_path: Path, name: str, data: str) -> None:
    model = tiny(name, seed=1).float()
    if name == "qwen3":
        model.config.tie_word_embeddings = True
        model.lm_head.weight = model.model.embed_tokens.weight
    sampler = Sampler(seed=0) if data == "on_policy" else None
    made = Distilled(model, tiny(name), loss=divergence("fkl"), sampler=sampler, dtype=torch.bfloat16)
    given = batch()
    if data == "fixed":
        train(made, repeated(given), SETTINGS, tmp_path)
        losses = [line["loss"] for line in read(tmp_path / "training" / "log.jsonl") if line["kind"] == "step"]
        assert losses[-1] < 0.9 * losses[0], losses
    else:
        train(made, repeated(given), replace(SETTINGS, steps=3), tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.dtype == torch.bfloat16
    assert type(loaded) is type(model)
    with torch.no_grad():
        ours, theirs = model(given.tokens).logits.softmax(-1), loaded.float()(given.tokens).logits.softmax(-1)
    assert (ours - theirs).abs().max() < 0.1
    if name == "qwen3":
        assert loaded.lm_head.weight.data_ptr() == loaded.model.embed_tokens.weight.data_ptr()


def written(folder: Path, seed: int, tokenizer: object = None) -> str:
    """A tiny model on the disk, in bfloat16."""
    tiny("llama", seed=seed).bfloat16().save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    return str(folder)


def test_the_result_loads_as_a_drafter_with_its_tokenizer_in_its_own_dtype(tmp_path: Path) -> None:
    target, drafter = written(tmp_path / "target", 0, letters()), written(tmp_path / "draft", 1, letters())
    made = distilled(
        drafter,
        AutoModelForCausalLM.from_pretrained(target),
        AutoTokenizer.from_pretrained(target),
        loss="tvd",
        data=Data.of("mixed"),
        seed=0,
        device=torch.device("cpu"),
    )
    out = tmp_path / "out"
    train(made, Batches(documents(), batch_size=3, max_length=24, seed=0), replace(SETTINGS, steps=2), out)
    assert AutoModelForCausalLM.from_pretrained(out).dtype == torch.bfloat16
    engine = outrider.load(target, drafter=f"model:path={out}", length="fixed:5", dtype="float32")
    plain = outrider.load(target, drafter="none", dtype="float32")
    greedy = outrider.Sampling(temperature=0)
    ours, theirs = (each.generate([[5, 6, 7]], max_new_tokens=8, sampling=greedy)[0] for each in (engine, plain))
    assert ours.tokens == theirs.tokens
    assert ours.num_draft_tokens > 0


def test_another_tokenizer_is_refused_with_a_sentence(tmp_path: Path) -> None:
    drafter = written(tmp_path / "draft", 1, letters())
    with pytest.raises(InputError, match=r"has another tokenizer than the target: .* with the target"):
        distilled(
            drafter,
            tiny("llama"),
            byte_level(300),
            loss="fkl",
            data=Data.of("fixed"),
            seed=0,
            device=torch.device("cpu"),
        )
