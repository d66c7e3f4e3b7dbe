"""Engines over hybrid and recurrent models: greedy outputs are the model's own, and no request notices the others."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

import outrider
from outrider.catalog import make
from outrider.core.types import InputError, Request, Sampling
from outrider.drafters.model import ModelDrafter
from outrider.drafters.ngram import NgramDrafter
from outrider.drafters.protocol import Drafter
from outrider.engine.engine import Engine
from outrider.engine.output import Output
from outrider.lengths.fixed import FixedLength
from outrider.lm.open import as_lm
from outrider.verifiers.block import BlockVerifier
from outrider.verifiers.match import MatchVerifier
from outrider.verifiers.token import TokenVerifier
from tests.world.models import prompts
from tests.world.parts import parts_of
from tests.world.recurrent_zoo import RECURRENT, tiny_recurrent
from tests.world.zoo import VOCAB, tiny

pytestmark = pytest.mark.usefixtures("float64_stays_float64")
GREEDY = Sampling(temperature=0.0, seed=0)
DRAWN = Sampling(temperature=1.0, seed=0)
ALIKE = ("lfm2_moe", "falcon_mamba", "olmo_hybrid", "zamba", "kimi_linear")
"""Models whose layers work as those of others here; they are beside their plain twins in tests/lm."""
SOME = ["qwen3_5", "nemotron_h", "mamba", "recurrent_gemma"]


def noisy(model: PreTrainedModel, noise: float = 0.02) -> PreTrainedModel:
    """The model with some noise on its weights: it agrees with what it was often, not always."""
    random = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.add_(noise * weight.std() * torch.randn(weight.shape, generator=random, dtype=weight.dtype))
    return model


def drafter(name: str, draft: PreTrainedModel) -> Drafter:
    return NgramDrafter(prompt_lookup_min=1) if name == "ngram" else ModelDrafter(lm=as_lm(draft, max_slots=3))


def engine(target: PreTrainedModel, guesser: Drafter, rule: object = None, max_slots: int = 3) -> Engine:
    lm = as_lm(target, max_slots=max_slots)
    length = FixedLength(num_speculative_tokens=4)
    parts = parts_of(lm, guesser, verifier=rule or BlockVerifier(), length=length)
    return Engine(parts, max_slots=max_slots)


def assert_greedy(model: PreTrainedModel, output: Output, prompt: list[int]) -> None:
    """Each token is the most likely one after all before it, in one plain run over the whole text."""
    with torch.no_grad():
        logits = model(torch.tensor([prompt + output.tokens]), use_cache=False).logits[0]
    assert output.tokens == logits[len(prompt) - 1 : -1].argmax(-1).tolist()


@pytest.mark.parametrize("name", [n for n in RECURRENT if n not in ALIKE])
def test_greedy_outputs_of_a_ragged_batch_are_the_models_own_though_drafts_are_rejected(name: str) -> None:
    model = tiny_recurrent(name)
    for guesser, rule in (("model", BlockVerifier()), ("ngram", MatchVerifier())):
        busy = engine(model, drafter(guesser, noisy(tiny_recurrent(name))), rule)
        made = busy.generate(prompts(13, 5, 21), max_new_tokens=10, sampling=GREEDY)
        for prompt, output in zip(prompts(13, 5, 21), made, strict=True):
            assert_greedy(model, output, prompt)
            assert len(output.tokens) == 10
        drafted = sum(output.num_draft_tokens for output in made)
        accepted = sum(output.num_accepted_tokens for output in made)
        assert accepted < drafted, "nothing was rejected"
        if guesser == "model":
            assert accepted > 0
            assert busy.parts.drafter.lm.num_replayed_tokens == 0 or busy.parts.drafter.lm.least > 1
        assert (busy.parts.target.num_replays > 0) != busy.parts.target.stepwise


@pytest.mark.parametrize(("target", "draft"), [("qwen3_next", "llama"), ("llama", "mamba2"), ("jamba", "lfm2")])
def test_kinds_of_target_and_draft_mix(target: str, draft: str) -> None:
    built = {n: tiny_recurrent(n) if n in RECURRENT else tiny(n) for n in (target, draft)}
    busy = engine(built[target], drafter("model", built[draft]))
    made = busy.generate(prompts(13, 5, 21), max_new_tokens=12, sampling=GREEDY)
    for prompt, output in zip(prompts(13, 5, 21), made, strict=True):
        assert_greedy(built[target], output, prompt)
    assert sum(o.num_accepted_tokens for o in made) < sum(o.num_draft_tokens for o in made)


@pytest.mark.parametrize("name", SOME)
def test_requests_get_what_they_get_alone_beside_others_that_come_and_are_cancelled(name: str) -> None:
    model, draft = tiny_recurrent(name), noisy(tiny_recurrent(name))
    sizes = zip((7, 1, 12, 4), (24, 7, 4, 9), strict=True)
    random = np.random.default_rng(3)
    these = [
        Request(
            id=str(i),
            prompt=tuple(random.integers(3, VOCAB, size=n).tolist()),
            max_new_tokens=most,
            sampling=replace(DRAWN, seed=70 + i),
        )
        for i, (n, most) in enumerate(sizes)
    ]
    alone = {}
    single = engine(model, drafter("model", draft), TokenVerifier())
    for request in these:
        single.rest()
        single.add(request)
        while single.busy:
            alone |= {u.id: u.output.tokens for u in single.step() if u.output is not None}
    busy = engine(model, drafter("model", draft), TokenVerifier())
    found, waiting = {}, list(these)
    for step in range(1000):
        if waiting:
            busy.add(waiting.pop(0))
        found |= {u.id: u.output.tokens for u in busy.step() if u.output is not None}
        if step == 3:
            found["0"] = busy.cancel("0").tokens
        if not busy.busy:
            break
    assert 0 < len(found["0"]) < len(alone["0"])
    assert found["0"] == alone["0"][: len(found["0"])]
    assert {id: tokens for id, tokens in found.items() if id != "0"} == {id: t for id, t in alone.items() if id != "0"}


@pytest.mark.parametrize("name", SOME)
def test_a_prompt_that_continues_or_leaves_the_last_text_is_as_in_a_cold_engine(name: str) -> None:
    model, draft = tiny_recurrent(name), noisy(tiny_recurrent(name))
    warm = engine(model, drafter("model", draft))
    first = prompts(13, 5, 21)[0]
    [output] = warm.generate([first], max_new_tokens=9, sampling=DRAWN)
    cold = engine(model, drafter("model", draft))
    for second in ([*first, *output.tokens, 6, 7, 8], [*first[:6], 9, 9]):
        cold.rest()
        asked = {"max_new_tokens": 6, "sampling": DRAWN}
        assert warm.generate([second], **asked)[0].tokens == cold.generate([second], **asked)[0].tokens


def test_a_prompt_that_continues_the_last_text_prefills_only_what_is_new() -> None:
    warm = engine(tiny_recurrent("qwen3_next"), drafter("ngram", tiny("llama")))
    first = list(range(3, 60))
    [output] = warm.generate([first], max_new_tokens=2, sampling=GREEDY)
    before = warm.parts.target.num_replayed_tokens
    warm.generate([[*first, *output.tokens, 5, 6]], max_new_tokens=1, sampling=GREEDY)
    assert warm.parts.target.num_replayed_tokens - before <= len(output.tokens)


def test_branching_trees_are_refused_where_target_or_draft_model_is_recurrent() -> None:
    with pytest.raises(InputError, match=r"the target qwen3_next has recurrent layers.* use tree 'chain'"):
        outrider.load(
            tiny_recurrent("qwen3_next"), drafter=ModelDrafter(lm=as_lm(tiny("llama"), max_slots=1)), tree="opt"
        )
    guesser = ModelDrafter(lm=as_lm(tiny_recurrent("mamba2"), max_slots=2))
    with pytest.raises(InputError, match=r"the draft model mamba2 has recurrent layers.* use tree 'chain'"):
        outrider.load(tiny("llama"), drafter=guesser, tree=make("tree", "gumbel:branching=2x2"))
    assert outrider.load(tiny("llama"), drafter=guesser).parts.drafter is guesser


def test_a_recurrent_model_is_loaded_from_its_directory_and_drafts_for_another(tmp_path) -> None:
    for name in ("mamba2", "lfm2"):
        tiny_recurrent(name).float().save_pretrained(tmp_path / name)
    loaded = outrider.load(tmp_path / "lfm2", drafter=f"model:path={tmp_path / 'mamba2'}")
    [output] = loaded.generate([[5, 6, 7]], max_new_tokens=6, sampling=GREEDY, ignore_eos=True)
    plain = loaded.plain().generate([[5, 6, 7]], max_new_tokens=6, sampling=GREEDY, ignore_eos=True)
    assert output.tokens == plain[0].tokens
