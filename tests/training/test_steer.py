"""Training of a steered draft model: which states steer which token, what learns, what is written."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from outrider.core.types import Frontier, InputError, Request, Running, Sampling
from outrider.drafters.protocol import Observed
from outrider.drafters.steered import SteeredDrafter, SteeredPath
from outrider.drafters.steering import CONFIG, Steering, SteeringConfig, usual_taps
from outrider.engine.engine import Engine
from outrider.learning.batch import TrainBatch
from outrider.learning.divergences import divergence
from outrider.lm.hf.anatomy import Anatomy
from outrider.lm.hf.taps import tapped
from outrider.lm.model import LanguageModel
from outrider.lm.protocol import Segment
from outrider.lm.steered import SteeredLM, up_projections
from outrider.lm.target_info import TargetInfo
from outrider.training.data.batches import Batches
from outrider.training.distill import Distilled
from outrider.training.loop.steps import train
from outrider.training.loop.watch import Evaluation
from outrider.training.steer import Steered, sources, steered_learner
from outrider.verifiers.block import BlockVerifier
from tests.world.learners import SETTINGS, batch, documents, repeated
from tests.world.parts import parts_of
from tests.world.tokenizers import letters
from tests.world.zoo import VOCAB, tiny


def learner(
    *, name: str = "llama", layers: int | None = None, strength: float = 0.0, rank: int | None = None, **named: object
) -> Steered:
    """A steered draft model with other weights than its target; 0 is the strength at the start."""
    model, target = tiny(name, seed=1).float(), tiny(name).float()
    if layers is not None:
        model.model.layers, model.config.num_hidden_layers = model.model.layers[:layers], layers
    anatomy = Anatomy.of(target)
    config = SteeringConfig(
        taps=usual_taps(anatomy.num_layers),
        target_layers=anatomy.num_layers,
        target_size=anatomy.hidden_size,
        widths=tuple(part.width for part in up_projections(model)),
        rank=rank,
    )
    steering = Steering(config)
    with torch.no_grad():
        weight = steering.inject.weight
        weight.copy_(strength * torch.randn(weight.shape, generator=torch.Generator().manual_seed(4)))
    return Steered(model, target, steering, **({"loss": divergence("fkl")} | named))


def test_a_token_is_read_with_states_of_the_offset_but_none_older_than_the_prompt():
    learnt = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 0], [0, 1, 1, 1, 1, 1, 1, 1], [0] * 8]).bool()
    where, reads = sources(learnt, 3)
    assert where.tolist() == [[0, 0, 0, 2, 2, 2, 3, 4], [0, 0, 0, 0, 1, 2, 3, 4], [0] * 8]
    assert reads.tolist() == [[False] * 3 + [True] * 5, [False] + [True] * 7, [False] * 8]
    assert sources(learnt, 1)[0][0].tolist() == [0, 0, 0, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("name", ["llama", "gemma3", "phi3"])
def test_at_the_start_the_loss_is_that_of_distillation_bit_for_bit(name):
    given, made = batch(), learner(name=name)
    plain = Distilled(made.model, tiny(name).float(), loss=divergence("fkl"))
    with torch.no_grad():
        ours, theirs = made(given), plain(given)
    assert ours.weight == theirs.weight == given.learnt.sum()
    assert torch.equal(made._hidden(made._with_states(given)), plain._hidden(given))
    assert float(ours.total) == pytest.approx(float(theirs.total), rel=1e-6)


def test_captured_states_give_the_loss_of_live_ones():
    given, made = batch(), learner(strength=0.3)
    target = tiny("llama").float()
    with torch.no_grad(), tapped(target.model.layers, range(4)) as seen:
        target(given.tokens, use_cache=False)
    captured = replace(given, hidden=dict(seen))
    dice = torch.Generator().manual_seed(0)
    with torch.no_grad():
        assert float(made(captured).total) == pytest.approx(float(made(given).total), rel=1e-5)
        other = replace(
            captured,
            hidden={tap: states + 10 * torch.randn(states.shape, generator=dice) for tap, states in seen.items()},
        )
        assert float(made(other).total) != pytest.approx(float(made(given).total), rel=1e-2)


def drafted_guesses(made: Steered, text: Sequence[int], prompt: int, gamma: int) -> dict[tuple[int, int], torch.Tensor]:
    """What real drafting guesses along a text: by the place of the guessed token and its number in the draft. Every
    draft is the text itself, and none of it is accepted.
    """
    target = LanguageModel(tiny("llama").float(), max_slots=1)
    drafter = SteeredDrafter(lm=SteeredLM(made.model, max_slots=1), steering=made.steering.eval())
    request = Request(id="r", prompt=tuple(text[:prompt]), max_new_tokens=99, sampling=Sampling(seed=0))
    state = Running(request=request, tokens=list(text[:prompt]), slot=target.open(), drafter=drafter)
    state.drafter_state = drafter.open(request)
    found = {}

    def show(tokens: Sequence[int]) -> None:
        seen = target.extend([Segment(slot=state.slot, tokens=torch.tensor(tokens))], taps=drafter.taps)
        target.commit({state.slot: range(len(tokens))})
        observed = Observed(tokens=np.array(tokens), offsets=np.array([0, len(tokens)]), taps=seen.taps)
        drafter.observe([state], observed)

    show(text[: prompt - 1])
    show(text[prompt - 1 : prompt])
    for anchor in range(prompt, len(text) - gamma):
        # `observe` is called when the newest token is the anchor, whose states are not known.
        state.tokens = list(text[: anchor + 1])
        found[anchor + 1, 1] = drafter.begin([state], [gamma]).logits[0].clone()
        for number in range(1, gamma):
            frontier = Frontier(
                owners=np.array([0]),
                nodes=np.array([number]),
                parents=np.array([number - 1]),
                depths=np.array([number]),
                tokens=torch.tensor([text[anchor + number]]),
            )
            found[anchor + number + 1, number + 1] = drafter.expand([state], frontier).logits[0].clone()
        drafter.commit([state], [[]])
        show(text[anchor : anchor + 1])
    return found


def trained_logits(made: Steered, given: TrainBatch, offset: int) -> torch.Tensor:
    with torch.no_grad():
        hidden = made._steered(made._with_states(given), offset, None)
        return made._states[0].head(hidden)[0]


@pytest.mark.parametrize(("layers", "gamma"), [(3, 1), (1, 4)])
def test_training_guesses_what_real_drafting_guesses(layers, gamma):
    """For drafts of one token, and for a draft model of one layer, whose keys and values do not depend on vectors."""
    made = learner(layers=layers, strength=0.3)
    [text] = documents(1)
    given = Batches([text], batch_size=1, max_length=24, seed=0).batch(0)
    found = drafted_guesses(made, text.tokens.tolist(), text.start, gamma)
    assert len(found) > 5
    for (place, number), logits in found.items():
        expected = trained_logits(made, given, number)[place - 1]
        assert torch.allclose(logits, expected, atol=1e-4), (place, number, float((logits - expected).abs().max()))


def test_no_guess_depends_on_states_or_tokens_behind_the_offset():
    made, given = learner(strength=0.3), batch()
    length, changed = int(given.lengths[0]), 9
    tokens = given.tokens.clone()
    tokens[0, changed] = (tokens[0, changed] + 1) % VOCAB
    for offset in (1, 3):
        before = trained_logits(made, given, offset)
        after = trained_logits(made, replace(given, tokens=tokens), offset)
        assert torch.equal(before[:changed], after[:changed])
        assert not torch.allclose(before[changed:length], after[changed:length], atol=1e-4)
    with torch.no_grad():
        whole = made._with_states(given)
        states = {tap: hidden.clone() for tap, hidden in whole.hidden.items()}
        for hidden in states.values():
            hidden[0, changed] += torch.randn(hidden.shape[-1])
        for offset in (1, 3):
            before = made._steered(whole, offset, None)[0]
            after = made._steered(replace(whole, hidden=states), offset, None)[0]
            assert torch.equal(before[: changed + offset], after[: changed + offset])
            assert not torch.allclose(before[changed + offset], after[changed + offset], atol=1e-4)


def test_offsets_are_one_to_the_longest_draft_and_the_same_for_all_rows_of_a_step():
    made = learner(num_speculative_tokens=3)
    drawn = [made.offset(step) for step in range(200)]
    assert set(drawn) == {1, 2, 3}
    assert drawn == [made.offset(step) for step in range(200)]
    with torch.no_grad():
        whole, parts = made(batch()), [made(Batches.share(batch(), range(i, i + 1))) for i in range(3)]
    assert float(whole.total) == pytest.approx(sum(float(part.total) for part in parts), rel=1e-5)


@pytest.mark.parametrize("rank", [None, 2])
@pytest.mark.parametrize("loss", ["fkl", "tvd"])
def test_a_frozen_draft_model_stays_and_its_steering_learns(tmp_path, rank, loss):
    made = learner(rank=rank, loss=divergence(loss))
    made.model.requires_grad_(False)
    before = {name: weight.clone() for name, weight in made.state_dict().items()}
    train(made, repeated(batch()), SETTINGS, tmp_path / "out")
    after = made.state_dict()
    moved = {name for name, weight in after.items() if not torch.equal(weight, before[name])}
    assert moved
    assert all(name.startswith("steering.") for name in moved)
    assert {"steering.inject.weight", "steering.gather.weight", "steering.norm.weight"} <= moved


@pytest.mark.parametrize("frozen", [False, True])
def test_training_lowers_the_loss_whether_or_not_the_draft_model_learns(tmp_path, frozen):
    made = learner()
    made.model.requires_grad_(not frozen)
    with torch.no_grad():
        before = float(made(batch()).total)
    train(made, repeated(batch()), replace(SETTINGS, steps=40), tmp_path)
    with torch.no_grad():
        after = float(made(batch()).total)
    assert after < 0.8 * before, (before, after)


def test_what_is_watched_is_a_draft_whose_states_age(tmp_path):
    made, given = learner(strength=0.3), batch()
    judged = made.judged(given, 3)
    target = tiny("llama").float()
    with torch.no_grad():
        log_p = target(given.tokens, use_cache=False).logits.log_softmax(-1)
        log_q = [
            made._states[0].head(made._steered(made._with_states(given), o, None)).log_softmax(-1) for o in (1, 2, 3)
        ]
    expected, agrees = [], []
    for row, count in enumerate(given.lengths.tolist()):
        start = int(given.learnt[row].int().argmax())
        for anchor in range(start, count - 3):
            places = [(anchor + i, int(given.tokens[row, anchor + i + 1])) for i in range(3)]
            pairs = list(zip(log_q, places, strict=True))
            expected.append([float(q[row, at, token] - log_p[row, at, token]) for q, (at, token) in pairs])
            agrees.append([bool(q[row, at].argmax() == log_p[row, at].argmax()) for q, (at, _) in pairs])
    assert np.allclose(judged.log_ratios, expected, atol=1e-4)
    assert judged.agrees.tolist() == agrees


def test_the_result_loads_as_a_steered_drafter_and_drafts_losslessly(tmp_path):
    made, target = learner(), tiny("llama").float()
    train(made, repeated(batch()), SETTINGS, tmp_path, Evaluation(documents(), depth=2, max_length=24))
    lm = LanguageModel(target, max_slots=2)
    drafter = SteeredPath(path=str(tmp_path)).bind(TargetInfo.of(lm, None))
    assert drafter.taps == made.steering.config.taps
    engine = Engine(parts_of(lm, drafter, verifier=BlockVerifier()), max_slots=2)
    prompts, greedy = [text.tokens[:7].tolist() for text in documents(2)], Sampling(temperature=0.0, seed=0)
    drafted = engine.generate(prompts, max_new_tokens=12, sampling=greedy)
    plain = engine.plain().generate(prompts, max_new_tokens=12, sampling=greedy)
    assert [out.tokens for out in drafted] == [out.tokens for out in plain]
    assert sum(out.num_draft_tokens for out in drafted) > 0


def saved_pair(folder: Path) -> tuple[str, object]:
    """A draft model in bfloat16 on disk, and its target."""
    tokenizer = letters()
    tiny("llama", seed=1).to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder), tokenizer


def test_a_draft_model_on_disk_learns_on_if_it_is_steered_already(tmp_path):
    place, tokenizer = saved_pair(tmp_path / "draft")
    given = {"loss": "tvd", "num_speculative_tokens": 2, "device": torch.device("cpu")}
    made = steered_learner(place, tiny("llama").float(), tokenizer, rank=2, frozen=True, **given)
    assert not any(weight.requires_grad for weight in made.model.parameters())
    train(made, repeated(batch()), replace(SETTINGS, steps=3), tmp_path / "out")
    assert (tmp_path / "out" / CONFIG).is_file()
    again = steered_learner(str(tmp_path / "out"), tiny("llama").float(), tokenizer, **given)
    assert again.steering.config == made.steering.config
    assert torch.allclose(again.steering.inject.weight, made.steering.inject.weight, rtol=1e-2, atol=1e-6)
    assert all(weight.requires_grad for weight in again.model.parameters())
    with pytest.raises(InputError, match="steered already"):
        steered_learner(str(tmp_path / "out"), tiny("llama").float(), tokenizer, rank=3, **given)


def test_what_cannot_be_steered_is_refused():
    with pytest.raises(InputError, match="num_speculative_tokens must be >= 1"):
        learner(num_speculative_tokens=0)
    with pytest.raises(InputError, match="cannot be steered"):
        learner(name="gpt2")
    made = learner()
    with pytest.raises(InputError, match="another pair"):
        Steered(made.model, tiny("qwen2"), made.steering, loss=divergence("fkl"))
