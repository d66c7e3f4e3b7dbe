"""The comparison of heads: its quick form, what it goes on with, and what its figures and claims say."""

import json
from pathlib import Path

import pytest
import torch

from outrider import InputError
from outrider.embedded import EMBEDDED_TARGET
from outrider.lm.hf.open import open_model
from recipes import trained
from recipes.__main__ import main
from recipes.head_findings import PLAIN, OfHead, best_other, claims, common, folded, told
from recipes.head_plan import CHAIN, DYNAMIC, HEADS, all_taps, chosen_heads
from recipes.trained import DEPTH, of
from tests.recipes.test_trained import TEXT


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Texts, two files of prompts and one working folder, as options."""
    folder = tmp_path_factory.mktemp("heads")
    files = {
        "texts": [{"domain": "story", "text": TEXT.format(i) * 3} for i in range(16)],
        "first": [{"id": str(i), "category": "story", "prompt": f"One day {i} children"} for i in range(3)],
        "second": [{"id": str(i), "category": "math", "turns": [f"What is {i} and {i}?"]} for i in range(3)],
    }
    for name, rows in files.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [
        *("--quick", "--data", str(folder / "texts.jsonl"), "--work", str(folder / "work")),
        *("--prompts", str(folder / "first.jsonl"), "--prompts", str(folder / "second.jsonl")),
    ]


def run(given: list[str], *more: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["heads", *given, "--dtype", "float32", *more])
    return ended.value.code


def test_heads_that_were_trained_apart_come_together_in_one_table(given, tmp_path, monkeypatch):
    for head in ("medusa", "dflash"):
        assert run(given, "--heads", head) == 0
    monkeypatch.setattr(trained, "train", None)  # Nothing is trained again.
    every = ("--heads", "medusa,dflash")
    assert run(given, *every, "--out", str(tmp_path / "again")) == 0
    assert run(given, *every, "--as-is", "--out", str(tmp_path / "as-is")) == 0
    tables = [(tmp_path / name / "table.md").read_text().split("\n", 1)[1] for name in ("again", "as-is")]
    assert tables[0] == tables[1]
    assert all(f"| {head} |" in tables[0] for head in ("medusa", "dflash"))
    assert "nan" not in tables[0]
    rows = [json.loads(line) for line in (tmp_path / "again" / "rows.jsonl").read_text().splitlines()]
    assert {row["phase"] for row in rows} == {"trained", "made", "decoded"}
    assert {row["category"] for row in rows if row["phase"] == "made"} == {"first: story", "second: math"}
    [claim, _] = [c for c in json.loads((tmp_path / "again" / "claims.json").read_text()) if "is faster" in c["claim"]]
    assert claim["rests_on"] == ["dflash lattice:num_nodes=16, depth 5", "dflash chain"]
    assert (tmp_path / "again" / "plot.svg").exists()


def test_without_a_trained_head_there_is_nothing_to_show(given, tmp_path, capsys):
    assert run([*given, "--steps", "1"], "--as-is", "--out", str(tmp_path / "out")) == 2
    assert "no trained head" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_all_heads_learn_from_one_capture():
    target = open_model(str(EMBEDDED_TARGET), dtype=torch.float32, device="cpu")
    taps = all_taps(target)
    assert target.config.num_hidden_layers in taps
    assert all(set(head.make(target, 0).taps) <= set(taps) for head in HEADS)


def test_a_name_that_no_head_has_is_refused():
    with pytest.raises(InputError, match="unknown head 'eagle4'"):
        chosen_heads("eagle,eagle4")


def judged_row(method: str, prompt: int, seed: int, tokens: float, late: float) -> dict:
    row: dict = {"method": method, "prompt": str(prompt), "seed": seed, "category": "first: story"}
    for t in (0, 1):
        row |= {f"tokens_{of(t)}": tokens + prompt, f"steps_{of(t)}": 10.0, f"places_{t}": 20}
        row |= {f"accepted_{of(t, k)}": 20 * 0.5 ** min(k, 2) * late ** max(0, k - 2) for k in range(1, DEPTH + 1)}
    return row


def run_row(method: str, draft: str, prompt: int, *, seed: int = 0, steps: int = 10, seconds: float = 1.0) -> dict:
    of_steps = {"free_tokens": 20, "free_steps": steps, "later_steps": steps, "tokens": 20, "seconds": seconds}
    parts = {"target_seconds": 0.5 * seconds, "drafter_seconds": 0.25 * seconds}
    about = {"method": method, "draft": draft, "temperature": 0, "prompt": str(prompt), "category": "c", "seed": seed}
    return {**about, **of_steps, **parts}


def test_claims_are_made_of_the_heads_that_are_there_on_the_seeds_that_both_have():
    judged = [judged_row("griffin", p, s, 33.0, 0.5) for p in range(9) for s in range(3)]
    judged += [judged_row("eagle", p, s, 30.0, 0.5) for p in range(9) for s in range(2)]
    found = {claim.claim: claim for claim in claims(judged, [])}
    says = "GRIFFIN emits more tokens per step than EAGLE, chains of 5"
    assert set(found) == {f"{says}, temperature {t}." for t in (0, 1)}
    assert all(claim.holds and claim.our_value == pytest.approx(100 * 333 / 306 - 100) for claim in found.values())


def test_late_acceptance_leaves_the_first_positions_out():
    judged = [judged_row(m, p, 0, 30.0, late) for m, late in (("poss", 0.6), ("eagle", 0.5)) for p in range(9)]
    [first, _] = [claim for claim in claims(judged, []) if "positions 3 to 5" in claim.claim]
    ours, theirs = ((q + q**2 + q**3) / (1 + q + q**2) for q in (0.6, 0.5))
    assert first.our_value == pytest.approx(100 * (ours / theirs - 1))


def test_speed_is_compared_over_the_plain_runs_beside_each_head():
    rows = []
    for p in range(9):
        for head, slow in (("eagle", 1.0), ("eagle3", 2.0)):
            # The machine was half as fast while eagle3 was timed.
            rows += [run_row(head, PLAIN, p, seconds=slow), run_row(head, DYNAMIC.name, p, seconds=slow / 2)]
    faster = next(claim for claim in claims([], rows) if claim.claim.startswith("EAGLE-3 is faster"))
    assert faster.our_value == pytest.approx(0)


def test_the_figures_of_a_draft_are_those_of_its_runs():
    rows = [run_row("eagle", PLAIN, p, steps=20) for p in range(3)]
    rows += [run_row("eagle", CHAIN, p, steps=8, seconds=0.5) for p in range(3)]
    found = told(rows, CHAIN, 0)
    assert found is not None
    assert (found.efficiency.value, found.speedup.value) == (2.5, 2.0)
    assert found.draft_cost == pytest.approx((0.125 / 8) / (0.5 / 20))
    assert best_other(rows, 0) is None
    assert told(rows, DYNAMIC.name, 0) is None


def test_rounds_of_a_run_fold_into_the_median_second_and_all_counts():
    [row] = folded([run_row("eagle", CHAIN, 0, seconds=s) for s in (1.0, 9.0, 2.0)])
    assert (row["tokens"], row["free_steps"], row["seconds"]) == (60, 30, 60 * 2.0 / 20)


def test_only_prompts_and_seeds_of_all_methods_are_compared():
    rows = [{"method": m, "prompt": p, "seed": s} for m in "ab" for p in "xy" for s in (0, 1)]
    assert common(rows, ("a", "c")) == []
    assert {r["prompt"] for r in common(rows[:-1], ("a", "b"))} == {"x"}, "b lacks y with seed 1"


def test_acceptance_by_position_is_conditional():
    head = OfHead(name="a", made=[judged_row("a", 0, 0, 30.0, 0.25)], trained=[], decoded=[])
    assert head.acceptance(1) == pytest.approx([0.5, 0.5, 0.25, 0.25, 0.25])


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_head_of_a_larger_target_says_that_it_has_not_been_run(given, tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["heads", *given, "--target", "org/name", "--device", "cuda", "--out", str(tmp_path / "out")])
    assert ended.value.code == 2
    assert "has not been run" in capsys.readouterr().err
    assert not Path(tmp_path / "out").exists()
