"""The recipes that test published claims: whole runs of tiny size, statistics by hand, configurations that parse."""

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from outrider import InputError, catalog
from outrider.bench.evidence import Sums
from outrider.bench.workloads.workload import PROMPTS
from outrider.plan.tree_coverage import Branches, SharedPaths
from outrider.theory import acceptance
from recipes import block_gain, budgets, claims, marginals, optimal_rate, pearl, sharing, stopping
from recipes.inquiry.trial import Bench, Method, Setting
from recipes.questions import Question

METHODS = {
    "block_gain": block_gain.METHODS,
    "budgets": [m for f in budgets.FAMILIES for b in budgets.BUDGETS for m in budgets.candidates(f, b, 1.0)],
    "marginals": marginals.METHODS,
    "pearl": [m for m in pearl.methods() if m.decoding != "plain"],
    "sharing": sharing.methods(),
    "stopping": stopping.methods(),
}
SMALL: dict[str, Any] = {"threads": 1, "dtype": "float32"}
"""What is cheap on every CPU."""
PHASES = ("pilot", "counted")
FILES = {"rows.jsonl", "table.md", "claims.json", "circumstances.json", "report.html"}


def known(family: catalog.Family, text: str) -> None:
    """Skip what is not in the catalog."""
    if text.split(":")[0] not in catalog.rows(family):
        pytest.skip(f"there is no {family} {text}")


@pytest.mark.parametrize(
    "method", [pytest.param(m, id=f"{recipe}-{m.name}") for recipe, methods in METHODS.items() for m in methods]
)
def test_every_configuration_is_one_that_the_catalog_reads(method):
    for family in ("tree", "verifier", "length", "decoding"):
        text = getattr(method, family)
        known(family, text)
        catalog.make(family, text)


def test_names_of_methods_are_unique():
    for methods in METHODS.values():
        assert len({m.name for m in methods}) == len(methods)


def test_block_efficiency_leaves_out_steps_that_the_end_cuts(tmp_path):
    bench = Bench(Setting(out=tmp_path, max_new_tokens=16, **SMALL))
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
    setting = Setting(out=tmp_path / "clock", num_prompts=1, max_new_tokens=40, **SMALL)
    assert block_gain.INQUIRY.run(setting, clock=True) == []
    assert {path.name for path in setting.out.iterdir()} == FILES - {"claims.json"}
    rows = [json.loads(line) for line in (setting.out / "rows.jsonl").read_text().splitlines()]
    assert len(rows) == len(block_gain.METHODS)
    assert all(0 <= row["accepted"] <= row["drafted"] for row in rows)
    setting = Setting(out=tmp_path / "run", num_prompts=1, max_new_tokens=9, **SMALL)
    assert len(block_gain.INQUIRY.run(setting)) == len(block_gain.PUBLISHED)
    # Times may come later.
    found = block_gain.INQUIRY.run(setting, timed=tmp_path / "clock")
    assert {path.name for path in setting.out.iterdir()} == FILES
    assert json.loads((setting.out / "claims.json").read_text()) == json.loads(json.dumps(found))
    assert len(found) == len(block_gain.PUBLISHED) + len(block_gain.PUBLISHED_TIME)
    assert all(claim["holds"] is None for claim in found)
    other = claims.read(setting.out)
    other["circumstances"] = {
        **other["circumstances"],
        "arguments": {**other["circumstances"]["arguments"], "draft": "b"},
    }
    page = claims.page([claims.read(setting.out), other])
    assert claims.read(setting.out)["seconds"] > 0
    assert " ".join(page.split()).count(" minutes, tokens: at most 9;") == 2
    assert page.count("| Block verification emits") == len(found)
    assert f"| **all** | 0 | 0 | {2 * len(found)} |" in page


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (None, "no workload"),
        ("{}", "line 1 is of no known"),
        ("[1]", "item 1 is no JSON"),
        ("no", "line 1 is not JSON"),
    ],
)
def test_prompts_that_cannot_be_read_are_one_sentence_and_leave_nothing(tmp_path, text, sentence):
    given: Path = tmp_path / "prompts.jsonl"
    if text is not None:
        given.write_text(text)
    setting = Setting(out=tmp_path / "run", prompts=given, **SMALL)
    with pytest.raises(InputError, match=sentence):
        block_gain.INQUIRY.run(setting)
    assert not setting.out.exists()


def test_more_prompts_than_there_are_is_refused(tmp_path):
    with pytest.raises(InputError, match=r"40 prompts of at most .* 41 are needed"):
        block_gain.INQUIRY.run(Setting(out=tmp_path / "run", prompts=PROMPTS, num_prompts=41, **SMALL))


def nodes(shape: budgets.Shape) -> int:
    """Most nodes of a drawn tree."""
    name, _, rest = shape.tree.partition(":")
    value = rest.partition("=")[2].partition(",")[0]
    if name in ("chain", "iid", "beam"):
        return shape.depth * int(value or 1)
    if name == "gumbel":
        return int(np.cumprod([int(part) for part in value.split("x")]).sum())
    return sum(int(value) ** d for d in range(1, shape.depth + 1))


def test_shapes_keep_to_their_budgets_and_each_budget_is_nearly_spent():
    for family in budgets.FAMILIES:
        for budget in budgets.BUDGETS:
            shapes = family.shapes(budget)
            if not family.chosen:
                sizes = [nodes(shape) for shape in shapes]
                assert max(sizes) <= budget
                assert max(sizes) >= 0.9 * budget
            assert all(shape.depth <= budget for shape in shapes)


def test_compared_methods_of_the_budgets_are_measured_ones():
    names = {name for family in budgets.FAMILIES for name in family.names.values()}
    assert {name for _, better, worse, _ in budgets.COMPARISONS for name in (better, worse)} <= names


def test_budgets_writes_its_folder(tmp_path):
    known("tree", "gumbel")
    setting = Setting(out=tmp_path, num_prompts=1, max_new_tokens=8, **SMALL)
    budgets.run(setting, budgets=(6,), pilot_prompts=1, families=budgets.FAMILIES[:2])
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert {path.name for path in tmp_path.iterdir()} == FILES | {"sums.jsonl"}
    prompts = {phase: {e["prompt"] for r in rows if r["phase"] == phase for e in r["each"]} for phase in PHASES}
    assert len(prompts["pilot"]) == len(prompts["counted"]) == 1
    assert not prompts["pilot"] & prompts["counted"]
    measured = {r["way"]: r for r in rows if r["phase"] == "counted"}
    assert measured["RSD-C"]["tree"] == measured["RSD-C tree, traversal"]["tree"]
    sums = Sums([json.loads(line) for line in (tmp_path / "sums.jsonl").read_text().splitlines()])
    for way, row in measured.items():
        [each] = row["each"]
        expected = each["free_tokens"] / each["free_steps"]
        assert sums.ratio(f"{way} @6", "tokens", "steps")[0] == pytest.approx(expected, rel=1e-5)


def test_budgets_refuses_one_that_it_has_no_shapes_for(tmp_path):
    with pytest.raises(InputError, match="some of 6, 10, 14, 21, 30, got 7"):
        budgets.run(Setting(out=tmp_path), budgets=(7,))


def test_stopping_compares_with_the_best_static_length(tmp_path):
    timing = Setting(out=tmp_path / "clock", num_prompts=1, max_new_tokens=40, **SMALL)
    setting = Setting(out=tmp_path / "run", num_prompts=1, max_new_tokens=17, **SMALL)
    stoppers = [name for name in stopping.STOPPERS if name in catalog.rows("length")]
    stopping.inquiry(lengths=(1, 3), stoppers=stoppers).run(timing, clock=True)
    found = stopping.inquiry(lengths=(1, 3), stoppers=stoppers).run(setting, timed=tmp_path / "clock")
    assert {path.name for path in setting.out.iterdir()} == FILES
    assert len(found) == 2 * {0: 0, 2: 5}[len(stoppers)]


def test_batches_hold_each_prompt_once_per_seed():
    questions = [Question(id=str(i), category="c", tokens=(1,)) for i in range(10)]
    jobs = sharing.batches(questions, 4, seeds=2)
    assert [len(job.questions) for job in jobs] == [4] * 4
    for seed in range(2):
        taken = [q.id for job in jobs if job.seed == seed for q in job.questions]
        assert len(set(taken)) == len(taken) == 8
    assert jobs[0].questions != jobs[2].questions


def test_sharing_runs_whole_batches(tmp_path):
    setting = Setting(out=tmp_path, num_prompts=2, max_new_tokens=8, **SMALL)
    policies = [name for name, text in sharing.POLICIES.items() if text.split(":")[0] in catalog.rows("length")]
    sharing.run(replace(setting, out=tmp_path / "clock"), policies=policies, lengths=(2,), sizes=(2,), clock=True)
    rows = [json.loads(line) for line in (tmp_path / "clock" / "rows.jsonl").read_text().splitlines()]
    assert all(row["requests"] == 2 and row["tokens"] == 16 and row["iterations"] < row["steps"] for row in rows)
    sharing.run(replace(setting, out=tmp_path / "run"), policies=policies, lengths=(2,), sizes=(2,))
    counted = [json.loads(line) for line in (tmp_path / "run" / "rows.jsonl").read_text().splitlines()]
    assert all([each["tokens"] for each in row["each"]] == [8, 8] for row in counted)
    assert {path.name for path in (tmp_path / "run").iterdir()} == FILES


def test_sharing_refuses_fewer_prompts_than_a_batch(tmp_path):
    with pytest.raises(InputError, match="num_prompts must be >= 16"):
        sharing.run(Setting(out=tmp_path, num_prompts=15))


def test_marginals_writes_its_folder(tmp_path):
    known("tree", "lattice")
    timing = Setting(out=tmp_path / "clock", num_prompts=1, max_new_tokens=30, **SMALL)
    marginals.INQUIRY.run(timing, clock=True)
    setting = Setting(out=tmp_path / "run", num_prompts=1, max_new_tokens=8, **SMALL)
    found = marginals.INQUIRY.run(setting, timed=tmp_path / "clock")
    assert {path.name for path in setting.out.iterdir()} == FILES
    assert [claim["paper_value"] for claim in found] == [37.7, 35.3, 47.7, 44.5]


def test_pearl_measures_both_clocks_and_says_whether_overlapping_pays(tmp_path):
    found = pearl.main(out=tmp_path, num_prompts=1, max_new_tokens=8, dtype="float32", lengths="2")
    assert {path.name for path in tmp_path.iterdir()} == FILES
    assert len(found) == 6
    rows = {row["method"]: row for row in map(json.loads, (tmp_path / "rows.jsonl").read_text().splitlines())}
    for t in pearl.TEMPERATURES:
        real, simulated = (rows[f"pearl, {clock} 2 T={t:g}"] for clock in ("a thread each", "simulated"))
        assert real["digest"] == simulated["digest"]
        assert simulated["stepping"] < sum(simulated["profile"].values())
        assert rows[f"plain T={t:g}"]["drafted"] == 0
    assert (tmp_path / "table.md").read_text().count("overlapping in two threads of this machine") == 2


def test_a_reason_is_the_longest_that_fits(monkeypatch):
    monkeypatch.setattr(claims, "REASONS", {"A": "short", "A tree": "long"})
    assert claims.reason("A tree is better.") == "long"
    assert claims.reason("Nothing.") == ""


def test_a_folder_without_claims_is_refused(tmp_path):
    with pytest.raises(InputError, match="not the folder of a finished run"):
        claims.read(tmp_path)


def test_three_drafts_without_replacement_are_near_the_exact_figure():
    torch.manual_seed(0)
    p, q = (torch.randn(6, 12, dtype=torch.float64).mul(1.5).softmax(-1) for _ in range(2))
    exact = acceptance.recursive_without_replacement(p, q, 3)
    assert (optimal_rate.without_replacement(p, q, 3) - exact).abs().max() < 0.02


def test_three_drafts_without_replacement_are_exact_in_the_mean_over_where_the_points_begin():
    p, q = (torch.randn(4, 6, dtype=torch.float64).mul(1.5).softmax(-1) for _ in range(2))
    exact = acceptance.recursive_without_replacement(p, q, 3)
    for i in range(len(p)):
        # Between two of these starts the same drafts are taken.
        over = (q[i] - p[i]).clamp_min(0).cumsum(0)
        points = optimal_rate.REFUSED * over / over[-1]
        edges = torch.cat([torch.tensor([0.0, 1.0]), (points % 1).double()]).unique()
        mean = sum(
            float(b - a)
            * float(optimal_rate.without_replacement(p[i : i + 1], q[i : i + 1], 3, ((a + b) / 2)[None])[0])
            for a, b in itertools.pairwise(edges)
        )
        assert mean == pytest.approx(float(exact[i]), abs=1e-12)


def test_optimal_rate_writes_its_folder_and_no_rule_beats_its_optimum(tmp_path):
    optimal_rate.main(out=tmp_path, num_prompts=1, max_new_tokens=3, every=2, **SMALL)
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert len(rows) == len(optimal_rate.TEMPERATURES)
    for row in [each for made in rows for each in made["each"]]:
        for rule in ("recursive with replacement", "K-SEQ"):
            for n in optimal_rate.DRAFTS:
                best = row[optimal_rate.key(optimal_rate.OPTIMUM[rule], n)]
                assert row["one draft"] - 1e-6 <= row[optimal_rate.key(rule, n)] <= best + 1e-6
    assert {path.name for path in tmp_path.iterdir()} == FILES


def test_families_of_trees_are_read_by_name_and_unknown_ones_are_refused():
    assert budgets.chosen_families(",".join(f.name for f in budgets.FAMILIES)) == list(budgets.FAMILIES)
    with pytest.raises(InputError, match="some of chain, gumbel, beam, iid, top_plus_one, dynamic, opt, got 'oak'"):
        budgets.chosen_families("oak")


def test_a_run_that_was_cut_off_is_judged_as_it_is(tmp_path):
    """By the prompts that all methods have done, without another turn."""
    setting = Setting(out=tmp_path, num_prompts=9, max_new_tokens=20, threads=1)
    inquiry = stopping.inquiry(lengths=(1, 3), stoppers=("svip",))
    inquiry.run(setting)
    lines = (tmp_path / "rows.jsonl").read_text().splitlines(keepends=True)
    assert len(lines) == 4
    kept = "".join(lines[:3])
    whole = {each["prompt"] for line in lines[:2] for each in json.loads(line)["each"]}
    assert 0 < len(whole) < 9
    (tmp_path / "rows.jsonl").write_text(kept)
    inquiry.run(replace(setting, as_is=True))
    assert (tmp_path / "rows.jsonl").read_text() == kept
    assert f"prompts: {len(whole)}" in (tmp_path / "table.md").read_text()


def test_nothing_is_judged_of_no_whole_prompt(tmp_path):
    with pytest.raises(InputError, match="no prompt that all methods have done"):
        stopping.inquiry(lengths=(1, 3)).run(Setting(out=tmp_path, max_new_tokens=20, **SMALL, as_is=True))


def test_trees_whose_steps_texts_tell_are_those_that_rules_judge_node_by_node():
    told = {m.labels["way"]: m.told for m in METHODS["budgets"] if m.labels["budget"] == 6}
    assert [way for way, tree in told.items() if tree is not None] == ["RSD-C", "SpecInfer"]
    families = {f.name: f for f in budgets.FAMILIES}
    for verifier, name in families["iid"].names.items():
        made = budgets.method(families["iid"], verifier, budgets.iid(14)[0], 14, 1.0)
        assert made.told == SharedPaths(count=2, depth=7, rule=verifier), name
    assert replace(made, temperature=0.0).told is None
    assert budgets.method(families["gumbel"], "traversal", budgets.gumbel(6)[0], 6, 1.0).told is None
    assert budgets.method(families["gumbel"], "recursive", budgets.gumbel(14)[1], 14, 1.0).told == Branches(
        counts=(2, 2, 1, 1)
    )


def judged(draft: str, *own: dict[str, object], timed: str | None = None) -> dict[str, object]:
    """A run as the page reads it."""
    arguments = {
        "draft": draft,
        "timed": timed,
        "num_prompts": 9,
        "prompts": "p.jsonl",
        "seeds": 1,
        "max_new_tokens": 8,
    }
    made = {"arguments": arguments, "uncommitted_changes": False, "cpu": "c", "threads": 1, "commit": "abc"}
    made |= {"versions": {"torch": "2"}, "date": "2026-11-21"}
    return {"recipe": "r", "circumstances": made, "claims": list(own), "folder": Path("measurements/x")}


def claim_of(claim: str, holds: bool | None, hours: float | None = None, **more: object) -> dict[str, object]:
    """A claim as `claims.json` has it."""
    given = {"paper": "A et al. 2024, P", "url": "https://p", "paper_value": 3.46, "unit": "% of tokens per second"}
    given |= {"our_value": 5.58, "interval": (-0.5, 6.0), "note": "", "num_prompts": 9}
    return {**given, "claim": claim, "holds": holds, "hours": hours, **more}


def test_the_page_begins_with_a_line_per_claim_that_has_both_pairs_beside_each_other():
    shared = {"note": "same; ahead at 1"}
    first = judged("d/draft", claim_of("A is faster.", True, **shared), claim_of("B is faster.", None, 2.0), timed="t")
    second = judged("recipes/small_draft", claim_of("A is faster.", False, note="same; ahead at 2"), timed="t")
    page = claims.page([first, second])
    table = page[: page.index("## ")]
    assert "2 claims, 3 verdicts: 1 yes, 1 no, 1 undecided." in table
    assert "| paper |  | claim | paper's | embedded pair | small pair | verdicts |" in table
    assert "| [P](https://p) | 1 | A is faster | 3.46 | 5.6 [-0.5, 6.0] | 5.6 [-0.5, 6.0] | **yes** / **no** |" in table
    assert "|  | 2 | B is faster | 3.46 | 5.6 [-0.5, 6.0] | - | **undecided** / - |" in table
    counted = "counted steps over measured seconds of a step"
    assert f"- **1**: Same; embedded pair: ahead at 1; small pair: ahead at 2; {counted}." in page
    assert f"- **2**: {counted.capitalize()}." in page


def test_claims_that_were_judged_on_a_real_model_are_shown_in_a_picture_with_the_other_pairs_beside_them():
    def run(draft: str, *names: str, unit: str = "% of block efficiency") -> dict[str, object]:
        return judged(draft, *(claim_of(f"{name} is faster.", True, unit=unit) for name in names))

    own, real = run("d/draft", "A", "B"), run("models/smollm2-6", "B", "C")
    other = run("models/smollm2-6", "D", unit="acceptance rate")
    runs = [own, real, other]
    panel = claims.pictured(claims.lines(runs), claims.pairs_of(runs, trained=False))
    assert panel is not None
    assert panel.names == ["2 B is faster", "3 C is faster"]
    assert {name: [each is not None for each in ratios] for name, ratios in panel.groups.items()} == {
        "embedded pair": [True, False],
        "SmolLM2-135M and 6 of its layers": [True, True],
    }
    [ratio, _] = panel.groups["embedded pair"]
    assert ratio is not None
    assert (ratio.value, ratio.low, ratio.high) == pytest.approx((1.0558, 0.995, 1.06))
    assert "(claims.svg)" in claims.page(runs)
    assert "svg" not in claims.page([own])
    assert claims.pictured(claims.lines([own]), claims.pairs_of([own], trained=False)) is None


def test_drafters_that_were_trained_for_another_target_have_a_column_of_their_own():
    known, unknown = (judged("", claim_of("A emits more.", holds)) for holds in (True, False))
    known["circumstances"]["arguments"] |= {"draft": None, "target": "models/smollm2"}
    unknown["circumstances"]["arguments"] |= {"draft": None, "target": "models/experts"}
    page = claims.page([known, unknown])
    table = page[page.index("## Training") : page.index("## Remarks")]
    assert "drafters of SmolLM2-135M | drafters of the embedded target | verdicts |" in table
    assert "**yes** / **no** |" in table
    begun = judged("", claim_of("A emits more.", None))
    begun["circumstances"]["arguments"] |= {"draft": None, "target": "smollm2", "begins_with": "smollm2-6-talk"}
    beside = claims.page([known, begun])
    assert "drafters of SmolLM2-135M | SmolLM2-135M, from a draft model that read dialogues | verdicts |" in beside
    assert "**yes** / **undecided** |" in beside


def test_the_page_counts_claims_that_no_real_pair_decides():
    def run(draft: str, **holds: bool | None) -> dict[str, object]:
        return judged(draft, *(claim_of(f"{name} is faster.", each) for name, each in holds.items()))

    pairs = run("smollm2-6", A=None, B=None), run("coder-0.5b.gguf", A=False, C=True), run("d/draft", B=True, D=None)
    said = claims.total(claims.lines(pairs))
    assert "3 of the claims are judged on real models, with 4 verdicts: 1 yes, 1 no, 2 undecided. 1 of these" in said


def test_every_undecided_claim_has_its_hours_and_those_that_nobody_will_measure_are_not_added():
    found = [claim_of(f"{i} is faster.", None, h) for i, h in enumerate((2.0, 0.5, 1e6, None))]
    page = claims.page([judged("d/draft", *found)])
    left = page[page.index("## Undecided") : page.index("## Verdicts")]
    for line in ("- **1** 0 is faster: 2.0 (", "- **3** 2 is faster: > 1000 (", "- **4** 3 is faster: not known ("):
        assert line in left
    assert "Together 2.5 hours, without those that would take more than 1000." in left


def test_a_unit_that_is_no_gain_is_named_in_the_remark_and_claims_of_one_remark_share_it():
    found = [claim_of(f"{i} is near.", True, unit="% below the optimum", note="n") for i in range(2)]
    assert "- **1, 2**: The figures are % below the optimum; n." in claims.page([judged("d/draft", *found)])
