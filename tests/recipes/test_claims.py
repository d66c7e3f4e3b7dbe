"""The recipes that test published claims: whole runs of tiny size, statistics by hand, configurations that parse."""

import json
from pathlib import Path

import numpy as np
import pytest

from outrider import InputError, catalog
from recipes import block_gain
from recipes.speed import Row
from recipes.trial import PROMPTS, Bench, Estimate, Method, Paper, Setting, Sums, gain

METHODS = {"block_gain": block_gain.METHODS}


def made(method: str, prompt: str, tokens: int, steps: int, seed: int = 0) -> Row:
    return {"method": method, "prompt": prompt, "seed": seed, "tokens": tokens, "steps": steps}


def parses(method: Method) -> None:
    """Whether the catalog reads a method; skips what is not in the catalog."""
    for family, text in (("tree", method.tree), ("verifier", method.verifier), ("length", method.length)):
        if text.split(":")[0] not in catalog.rows(family):
            pytest.skip(f"there is no {family} {text}")
        catalog.make(family, text)


@pytest.mark.parametrize(
    "method", [pytest.param(m, id=f"{recipe}-{m.name}") for recipe, methods in METHODS.items() for m in methods]
)
def test_every_configuration_is_one_that_the_catalog_reads(method):
    parses(method)


def test_names_of_methods_are_unique():
    for methods in METHODS.values():
        assert len({m.name for m in methods}) == len(methods)


def test_sums_are_plain_sums_and_resamples_are_shared_by_all_methods():
    rows = [made(m, p, tokens * scale, 10) for m, scale in (("a", 1), ("b", 2)) for p, tokens in (("x", 10), ("y", 40))]
    sums = Sums(rows)
    assert sums.get("a", "tokens")[0] == 50
    assert set(sums.get("a", "tokens")) == {20, 50, 80}
    assert gain(sums.ratio("b", "tokens", "steps"), sums.ratio("a", "tokens", "steps")) == Estimate(
        value=100.0, low=100.0, high=100.0
    )


def test_seeds_are_resampled_within_prompts():
    rows = [made("a", "x", tokens, 1, seed) for seed, tokens in enumerate((0, 3))]
    assert set(Sums(rows).get("a", "tokens")) == {0, 3, 6}


def test_the_interval_of_a_mean_is_the_one_that_theory_gives():
    values = np.random.default_rng(0).normal(5, 2, 200)
    rows = [made("a", str(i), value, 1) for i, value in enumerate(values)]
    found = Estimate.of(Sums(rows).ratio("a", "tokens", "steps"))
    half = 1.96 * values.std() / np.sqrt(200)
    assert found.value == pytest.approx(values.mean())
    assert found.high - found.low == pytest.approx(2 * half, rel=0.1)


def test_rows_that_are_not_complete_are_refused():
    with pytest.raises(InputError, match="not complete"):
        Sums([made("a", "x", 1, 1), made("b", "y", 1, 1)])


@pytest.mark.parametrize(("low", "high", "holds"), [(0.1, 2, True), (-2, -0.1, False), (-1, 1, None)])
def test_a_claim_holds_only_with_its_whole_interval_and_enough_prompts(low, high, holds):
    paper, ours = Paper(name="", url=""), Estimate(value=0, low=low, high=high)
    for prompts in (8, 7):
        sums = Sums([made("a", str(i), 1, 1) for i in range(prompts)])
        found = paper.claim("", ours, over=sums, published=1, unit="", least=0)
        assert found.holds is (holds if prompts == 8 else None)


def test_block_efficiency_leaves_out_steps_that_the_end_cuts(tmp_path):
    bench = Bench(Setting(out=tmp_path, max_new_tokens=16, threads=1))
    [job] = bench.jobs(bench.questions(1))
    method = Method(name="m", length="fixed:8", deepest=8)
    made = bench.run(method, job)
    [output] = bench.engine(method).generate(
        [list(job.questions[0].tokens)],
        max_new_tokens=16,
        sampling=bench.first.sampling.__class__(temperature=1.0, seed=0),
    )
    starts = np.cumsum([0, *(len(step.tokens) for step in output.steps)])
    assert made["tokens"] == len(output.tokens)
    assert made["free_steps"] == sum(starts[:-1] < 8)
    assert made["free_tokens"] == starts[made["free_steps"]]


def test_block_gain_writes_its_folder(tmp_path):
    setting = Setting(out=tmp_path / "run", num_prompts=1, max_new_tokens=9, threads=1)
    claims = block_gain.run(setting)
    names = {path.name for path in setting.out.iterdir()}
    assert names == {"rows.jsonl", "table.md", "plot.svg", "claims.json", "circumstances.json"}
    assert json.loads((setting.out / "claims.json").read_text()) == json.loads(json.dumps(claims))
    rows = [json.loads(line) for line in (setting.out / "rows.jsonl").read_text().splitlines()]
    assert len(rows) == len(block_gain.METHODS)
    assert all(sum(row["drafted_per_position"]) == row["drafted"] for row in rows)
    assert all(claim["holds"] is None for claim in claims)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [(None, "cannot read"), ("{}", "on every line"), ("[1]", "on every line"), ("no", "on every line")],
)
def test_prompts_that_cannot_be_read_are_one_sentence_and_leave_nothing(tmp_path, text, sentence):
    given: Path = tmp_path / "prompts.jsonl"
    if text is not None:
        given.write_text(text)
    setting = Setting(out=tmp_path / "run", prompts=given, threads=1)
    with pytest.raises(InputError, match=sentence):
        block_gain.run(setting)
    assert not setting.out.exists()


def test_more_prompts_than_there_are_is_refused(tmp_path):
    with pytest.raises(InputError, match=r"40 prompts of at most .* 41 are needed"):
        block_gain.run(Setting(out=tmp_path / "run", prompts=PROMPTS, num_prompts=41, threads=1))
