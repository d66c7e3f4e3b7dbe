"""Engines that decode with models of transformers are told what was asked, and what they tell is counted."""

import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from outrider.bench.engines import economize, flashspec
from outrider.bench.engines.driver import DriverRequest, Options
from outrider.bench.engines.engine import DRAFT_MODEL
from outrider.bench.engines.transformers_model import one_at_a_time
from outrider.embedded import EMBEDDED_DRAFT

ASKED = DriverRequest(prompts=[[5, 6, 7]], new_tokens=4, temperature=0.0, seed=3)
OPTIONS = Options(
    mode="plain",
    target=str(EMBEDDED_DRAFT),
    draft=str(EMBEDDED_DRAFT),
    dtype="float32",
    threads=torch.get_num_threads(),
    draft_tokens=5,
    ngram=2,
    batch=1,
    context=64,
)
TOLD = [(5, 2), (0, 0), (4, 4)]
"""Draft tokens of each step, and how many of them were accepted."""


def test_a_run_of_several_prompts_is_refused_and_steps_without_a_draft_are_no_drafts():
    output = one_at_a_time(ASKED, lambda prompt, _: ([*prompt, 9], TOLD))
    assert output.tokens == [[5, 6, 7, 9]]
    assert output.counts == {"drafts": 2, "draft_tokens": 9, "accepted_tokens": 6}
    with pytest.raises(ValueError, match="one prompt at a time"):
        one_at_a_time(replace(ASKED, prompts=[[1], [2]]), lambda prompt, _: ([], []))


@pytest.mark.parametrize(
    ("mode", "temperature", "told"),
    [
        ("plain", 0.0, {"cycle_length": 1, "verifier": None}),
        (economize.LOOKUP, 0.0, {"cycle_length": 6, "verifier": None}),
        (DRAFT_MODEL, 0.7, {"cycle_length": 6, "verifier": "rejection"}),
    ],
)
def test_economize_is_told_what_was_asked(monkeypatch, mode, temperature, told):
    seen = {}

    def decode(tokens, count, *, decoding, selector):
        seen.update(tokens=tokens.tolist(), count=count, decoding=decoding, selector=selector)
        return SimpleNamespace(tokens=torch.tensor([8, 9]), acceptance=TOLD)

    configs = {"LookupConfig": lambda **told: ("lookup", told), "DraftModelConfig": lambda **told: ("model", told)}
    made = SimpleNamespace(
        apply=lambda model, drafts: seen.update(drafts=drafts) or SimpleNamespace(decode=decode),
        DecodeConfig=dict,
        TopPSampler=lambda temperature, seed: (temperature, seed),
    )
    modules = ("techniques", "techniques.draft_model", "techniques.lookup")
    for name, module in [("economize", made), *((f"economize.{each}", SimpleNamespace(**configs)) for each in modules)]:
        monkeypatch.setitem(sys.modules, name, module)
    driver = economize.EconomizeDriver()
    driver.start(replace(OPTIONS, mode=mode))
    output = driver.ask(replace(ASKED, temperature=temperature))
    assert (output.tokens, seen["tokens"], seen["count"]) == ([[8, 9]], [5, 6, 7], 4)
    assert seen["decoding"] == told
    assert seen["selector"] == ((temperature, 3) if temperature else None)
    drafts = ("model", {"model": str(EMBEDDED_DRAFT), "dtype": "float32"})
    assert seen["drafts"] == (drafts if mode == DRAFT_MODEL else ("lookup", {"max_ngram": 2}))


@pytest.mark.parametrize(
    ("mode", "strategy", "drafters"),
    [
        (flashspec.LOOKUP, "bandit", ["lookup 2"]),
        (DRAFT_MODEL, "bandit", ["model"]),
        (flashspec.BOTH, "composite-g6-f2", ["model", "lookup 2"]),
    ],
)
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_flashspec_is_told_what_was_asked(monkeypatch, mode, strategy, drafters, temperature):
    seen = {}

    class Named:
        def __init__(self, name):
            self.name, self.temperature = name, 1.0

        def set_temperature(self, value):
            self.temperature = value

    def engine(config, drafters, target):
        def generate(tokens, *, max_new_tokens, eos_token_ids):
            seen.update(config=config, drafters=drafters, tokens=tokens.tolist(), count=max_new_tokens)
            steps = [SimpleNamespace(proposed=drafted, accepted=accepted) for drafted, accepted in TOLD]
            return SimpleNamespace(output_ids=torch.tensor([[8, 9, -1]]), n_tokens_generated=2, arm_steps=steps)

        return SimpleNamespace(generate=generate)

    parts = SimpleNamespace(
        TargetModel=lambda name, device, dtype, model: Named("target"),
        HuggingFaceDrafter=lambda name, device, dtype, model: Named("model"),
        NgramDrafter=lambda max_ngram: Named(f"lookup {max_ngram}"),
    )
    configs = SimpleNamespace(BanditConfig=dict, FlashSpecConfig=dict, SamplingConfig=dict, SpeculativeEngine=engine)
    monkeypatch.setitem(sys.modules, "flashspec", configs)
    monkeypatch.setitem(sys.modules, "flashspec.engine", parts)
    driver = flashspec.FlashspecDriver()
    driver.start(replace(OPTIONS, mode=mode))
    output = driver.ask(replace(ASKED, temperature=temperature))
    # Its padding behind the last token is left out.
    assert (output.tokens, seen["tokens"], seen["count"]) == ([[8, 9]], [[5, 6, 7]], 4)
    assert output.counts["accepted_tokens"] == 6
    assert seen["config"]["drafter_strategy"] == strategy
    assert seen["config"]["sampling"] == {"gamma": 5, "temperature": temperature, "seed": 3}
    assert [each.name for each in seen["drafters"]] == drafters
    assert {each.temperature for each in seen["drafters"] if each.name == "model"} <= {temperature or 1.0}
