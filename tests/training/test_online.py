"""Draft models that learn from the requests of an engine: real models, counted tokens."""

import copy
import json
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from outrider.core.inputs import InputError
from outrider.core.types import Sampling
from outrider.decoding.pearl import PearlDecoding
from outrider.drafters.model import ModelDrafter
from outrider.engine.engine import Engine
from outrider.lm.model import LanguageModel
from outrider.training.online.learning import Learning, why_not
from outrider.training.online.pupil import OnlineSettings
from outrider.training.online.routing import Clusters
from tests.world.models import drafter_of, engine, llama

GREEDY = Sampling(temperature=0, seed=0)


def prompts(count: int, seed: int = 0) -> list[list[int]]:
    """A stationary stream: each prompt is a few tokens out of a dozen."""
    return np.random.default_rng(seed).integers(3, 15, size=(count, 4)).tolist()


def serve(busy: Engine, these: list[list[int]], temperature: float = 0.0, tokens: int = 24):
    """Outputs of prompts, with seeds of their own."""
    settings = [Sampling(temperature=temperature, seed=i) for i in range(len(these))]
    return busy.generate(these, max_new_tokens=tokens, sampling=settings)


def rate(outputs) -> float:
    """The acceptance rate of outputs."""
    return sum(out.num_accepted_tokens for out in outputs) / sum(out.num_draft_tokens for out in outputs)


def test_learning_from_a_stationary_stream_raises_acceptance_and_keeps_greedy_output():
    these = prompts(36)
    busy, frozen = engine("model", max_slots=2), engine("model", max_slots=2)
    before = serve(frozen, these)
    learning = Learning(busy, OnlineSettings(interval=2, learning_rate=3e-3))
    outputs = serve(busy, these)
    learning.finish()
    [pupil] = learning.pupils
    assert pupil.draft.num_rounds >= 10
    assert [out.tokens for out in outputs] == [out.tokens for out in before]
    assert rate(outputs[24:]) > rate(before[24:]) + 0.03, (rate(outputs[24:]), rate(before[24:]))


def test_learning_in_a_thread_keeps_greedy_output():
    these = prompts(16)
    busy = engine("model", max_slots=2)
    learning = Learning(busy, OnlineSettings(interval=2, learning_rate=3e-3, in_thread=True))
    outputs = serve(busy, these)
    learning.finish()
    assert learning.pupils[0].draft.num_rounds >= 1
    assert busy.parts.drafter is learning.pupils[0].draft.drafter
    plain = busy.plain().generate(these, max_new_tokens=24, sampling=GREEDY)
    assert [out.tokens for out in outputs] == [out.tokens for out in plain]


def test_a_learning_rate_of_zero_changes_no_weight_and_no_draw():
    these = prompts(8)
    busy, frozen = engine("model", max_slots=1), engine("model", max_slots=1)
    learning = Learning(busy, OnlineSettings(interval=1, learning_rate=0.0))
    changed, same = serve(busy, these, temperature=1.0), serve(frozen, these, temperature=1.0)
    learning.finish()
    assert learning.pupils[0].draft.num_rounds > 4
    assert [out.tokens for out in changed] == [out.tokens for out in same]
    assert [out.num_accepted_tokens for out in changed] == [out.num_accepted_tokens for out in same]
    ours, theirs = (each.parts.drafter.lm.model.state_dict() for each in (busy, frozen))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_the_drafter_that_was_given_never_changes():
    busy = engine("model", max_slots=2)
    given = busy.parts.drafter
    before = copy.deepcopy(given.lm.model.state_dict())
    learning = Learning(busy, OnlineSettings(interval=1, learning_rate=1e-2))
    serve(busy, prompts(6))
    learning.finish()
    assert busy.parts.drafter.lm is not given.lm
    assert all(torch.equal(before[name], weight) for name, weight in given.lm.model.state_dict().items())


def test_the_drafter_of_a_running_request_keeps_its_weights():
    busy = engine("model", max_slots=2)
    learning = Learning(busy, OnlineSettings(interval=1, learning_rate=1e-2))
    busy.generate(prompts(2), max_new_tokens=8, sampling=GREEDY)
    long, shorts = busy.add([5, 6, 7], max_new_tokens=60, sampling=GREEDY), iter(prompts(40, seed=1))
    seen, drafters, before = [], set(), learning.pupils[0].draft.num_rounds
    while long in busy.running or not seen:
        if len(busy.running) < 2:
            busy.add(next(shorts), max_new_tokens=4, sampling=GREEDY)
        busy.step()
        for id, drafter in busy.running.items():
            if id == long:
                drafters.add(drafter)
                seen.append(drafter.lm.model.lm_head.weight.detach().clone())
    assert learning.pupils[0].draft.num_rounds > before + 2
    assert len(drafters) == 1
    assert len(seen) > 10
    assert all(torch.equal(seen[0], other) for other in seen)


def test_no_more_than_two_copies_of_a_draft_model_draft():
    busy = engine("model", max_slots=4)
    learning = Learning(busy, OnlineSettings(interval=1, learning_rate=1e-3))
    lms = set()
    busy_note = busy.watch
    busy.watch = lambda cycle: (busy_note(cycle), lms.update(id(state.drafter.lm) for state in cycle.states))
    serve(busy, prompts(12))
    # The given one drafts until the first optimizer step.
    assert len(lms) <= 3
    assert learning.pupils[0].draft.num_rounds > 2


def test_master_weights_are_in_float32_and_the_drafter_in_its_own_dtype():
    model = llama(1).to(torch.bfloat16)
    busy = engine(ModelDrafter(lm=LanguageModel(model, max_slots=8)))
    learning = Learning(busy, OnlineSettings(interval=1, learning_rate=1e-5))
    [pupil] = learning.pupils
    before = [weight.clone() for weight in pupil.draft.master.parameters()]
    serve(busy, prompts(6))
    learning.finish()
    assert {weight.dtype for weight in pupil.draft.master.parameters()} == {torch.float32}
    assert busy.parts.drafter.lm.dtype == torch.bfloat16
    # Steps too small for bfloat16 are not lost.
    assert any(not torch.equal(old, new) for old, new in zip(before, pupil.draft.master.parameters(), strict=True))
    pairs = zip(pupil.draft.master.parameters(), busy.parts.drafter.lm.model.parameters(), strict=True)
    assert all(torch.equal(ours.to(torch.bfloat16), theirs) for ours, theirs in pairs)


def test_a_snapshot_is_a_checkpoint_that_transformers_loads(tmp_path):
    busy = engine("model")
    settings = OnlineSettings(interval=1, learning_rate=1e-3, snapshots=tmp_path / "kept", snapshot_interval=2)
    learning = Learning(busy, settings)
    serve(busy, prompts(9))
    learning.finish()
    [pupil] = learning.pupils
    names = sorted(path.name for path in (tmp_path / "kept").iterdir())
    rounds = pupil.draft.num_rounds
    assert names == sorted({f"step-{n:06d}" for n in (*range(2, rounds + 1, 2), rounds)})
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "kept" / names[-1], dtype=torch.float64)
    pairs = zip(loaded.parameters(), busy.parts.drafter.lm.model.parameters(), strict=True)
    assert all(torch.equal(ours, theirs) for ours, theirs in pairs)
    with pytest.raises(InputError, match="is not empty; give a new one"):
        Learning(engine("model"), settings)


def test_a_snapshot_that_cannot_be_written_leaves_nothing_and_requests_go_on(tmp_path):
    busy = engine("model")
    settings = OnlineSettings(interval=1, learning_rate=1e-3, snapshots=tmp_path / "kept", snapshot_interval=1)
    learning = Learning(busy, settings)
    (tmp_path / "kept").rmdir()
    (tmp_path / "kept").write_text("in the way")
    with pytest.warns(RuntimeWarning, match="step-000001 was not written"):
        [output] = serve(busy, prompts(1))
    assert output.finish_reason == "length"
    assert [path.name for path in tmp_path.iterdir() if path.suffix != ".lock"] == ["kept"]
    with pytest.warns(RuntimeWarning, match="was not written"):
        learning.finish()


def test_weights_go_back_when_acceptance_falls():
    these = prompts(40)
    busy = engine("model", max_slots=2)
    learning = Learning(busy, OnlineSettings(interval=4, learning_rate=1e-3, margin=0.1, least_drafted=60))
    [pupil] = learning.pupils
    serve(busy, these[:8])
    assert pupil.best is not None
    best, score = [weight.clone() for weight in pupil.best.weights], pupil.best.acceptance_rate
    with torch.no_grad():
        for weight in pupil.draft.master.parameters():
            weight.normal_(generator=torch.Generator().manual_seed(0))
    busy.swap(pupil.draft.publish([]))
    served = 8
    while pupil.num_rollbacks == 0 and served < len(these):
        serve(busy, these[served : served + 4])
        served += 4
    assert pupil.num_rollbacks == 1
    assert score > 0.15
    pairs = zip(busy.parts.drafter.lm.model.parameters(), best, strict=True)
    assert all(torch.equal(ours, theirs) for ours, theirs in pairs)
    frozen = engine("model", max_slots=2)
    outputs = serve(busy, these[:4])
    assert [out.tokens for out in outputs] == [out.tokens for out in serve(frozen, these[:4])]


def test_each_draft_model_learns_from_its_own_requests_only():
    busy = engine("model", max_slots=2)
    learning = Learning(
        busy, OnlineSettings(interval=1, learning_rate=1e-3), num_drafts=2, route=lambda request: request.prompt[0] % 2
    )
    first, second = learning.pupils
    serve(busy, [[5, 6, 7], [7, 8], [9, 9, 8]])
    assert second.draft.num_rounds > 0
    assert first.draft.num_rounds == 0
    used = {}
    busy.watch = lambda cycle: used.update({s.request.prompt[0] % 2: s.drafter for s in cycle.states})
    outputs = serve(busy, [[6, 7, 8], [7, 8]])
    assert used == {0: first.draft.drafter, 1: second.draft.drafter}
    assert [out.tokens for out in outputs] == [out.tokens for out in serve(engine("none"), [[6, 7, 8], [7, 8]])]


def test_clusters_route_requests_to_draft_models():
    busy = engine("model", max_slots=2)
    route = Clusters.of(busy.parts.target, 2)
    learning = Learning(busy, OnlineSettings(interval=1, learning_rate=1e-3), num_drafts=2, route=route)
    these = prompts(6)
    outputs = serve(busy, these)
    learning.finish()
    assert all(pupil.draft.num_rounds > 0 for pupil in learning.pupils)
    assert [out.tokens for out in outputs] == [out.tokens for out in serve(engine("none"), these)]


def test_a_route_to_a_draft_model_that_does_not_exist_is_an_error():
    busy = engine("model")
    Learning(busy, num_drafts=2, route=lambda request: 2)
    with pytest.raises(InputError, match="the route chose draft model 2 of 2; they are numbered from 0"):
        serve(busy, prompts(1))


def test_draft_models_learn_while_drafting_and_verifying_at_once():
    these = prompts(6)
    busy = engine("model", max_slots=2)
    busy.parts = replace(busy.parts, decoding=PearlDecoding(clock="simulated"))
    learning = Learning(busy, OnlineSettings(interval=2, learning_rate=3e-3))
    outputs = serve(busy, these)
    assert learning.pupils[0].draft.num_rounds > 1
    assert [out.tokens for out in outputs] == [out.tokens for out in serve(engine("none"), these)]


@pytest.mark.parametrize(
    ("drafter", "reason"),
    [("ngram", "the drafter ngram has no weights to train"), ("none", "the drafter none has no weights to train")],
)
def test_a_drafter_without_weights_is_refused(drafter, reason):
    with pytest.raises(InputError, match=reason):
        Learning(engine(drafter, "match"))


def test_a_quantised_draft_model_is_refused():
    drafter = drafter_of("model")
    drafter.lm.model.is_quantized = True
    assert "quantised" in (why_not(drafter) or "")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"interval": 0}, "interval must be >= 1, got 0"),
        ({"learning_rate": -1.0}, "learning_rate must be >= 0, got -1.0"),
        ({"margin": 2.0}, "margin must be in"),
        ({"divergence": "fk"}, "unknown divergence 'fk'; did you mean 'fkl'"),
        ({"max_corrections": 0}, "max_corrections must be >= 1"),
        ({"clip": 0.0}, "clip must be > 0"),
    ],
)
def test_wrong_settings_are_refused(options, message):
    with pytest.raises(InputError, match=message):
        OnlineSettings(**options)


def test_several_draft_models_need_a_route():
    with pytest.raises(InputError, match="2 draft models need a route"):
        Learning(engine("model"), num_drafts=2)
    with pytest.raises(InputError, match="must be >= 1, got 0"):
        Learning(engine("model"), num_drafts=0)


def test_a_folder_of_snapshots_that_cannot_be_made_is_refused(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot be used"):
        Learning(engine("model"), OnlineSettings(snapshots=tmp_path / "file" / "kept"))


def test_a_folder_of_snapshots_is_held_until_learning_ends(tmp_path: Path):
    folder = tmp_path / "kept"
    learning = Learning(engine("model"), OnlineSettings(snapshots=folder))
    lock = folder.with_name(".kept.lock")
    assert json.loads(lock.read_text())["pid"] == os.getpid()
    learning.finish()
    assert not lock.exists()
    (folder / "file").write_text("")
    with pytest.raises(InputError, match="is not empty"):
        Learning(engine("model"), OnlineSettings(snapshots=folder))
    assert not lock.exists()
