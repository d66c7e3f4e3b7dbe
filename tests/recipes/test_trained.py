"""Recipes that train drafters: their quick forms, and what they judge by."""

import json
from pathlib import Path

import numpy as np
import pytest

from outrider.learning.batch import Document
from outrider.learning.divergences import divergence
from outrider.training.data.batches import Batches
from outrider.training.distill import Distilled
from outrider.training.loop.watch import Evaluation
from recipes.__main__ import main
from recipes.trained import Budget, Texts, covered, embedded_target, fresh_draft, judged, kept_states
from tests.world.tokenizers import letters
from tests.world.zoo import tiny

TEXT = "Once upon a time there was a dog named Sam who lived with a boy in a small house near the river, number {}. "
SMALL = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
}


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Texts, prompts and one folder for what the target says, as options."""
    folder = tmp_path_factory.mktemp("trained")
    texts = [{"domain": "story", "text": TEXT.format(i) * 3} for i in range(30)]
    prompts = [{"id": str(i), "category": "story", "prompt": f"One day {i} children"} for i in range(6)]
    for name, rows in (("texts", texts), ("prompts", prompts)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [
        *("--quick", "--data", str(folder / "texts.jsonl"), "--prompts", str(folder / "prompts.jsonl")),
        *("--work", str(folder / "work")),
    ]


@pytest.mark.parametrize(
    ("recipe", "num_ways", "num_claims"),
    [("distill", 12, 22), ("steer", 4, 4), ("shapes", 2, 2), ("positions", 4, 4)],
)
def test_the_quick_form_trains_judges_and_writes_its_claims(given, tmp_path, recipe, num_ways, num_claims):
    with pytest.raises(SystemExit) as ended:
        main([recipe, *given, "--out", str(tmp_path / "out")])
    assert ended.value.code == 0
    claims = json.loads((tmp_path / "out" / "claims.json").read_text())
    assert (len(claims), {claim["holds"] for claim in claims}) == (num_claims, {None}), "so few prompts judge nothing"
    rows = [json.loads(line) for line in (tmp_path / "out" / "rows.jsonl").read_text().splitlines()]
    assert len([row for row in rows if row["phase"] == "made"]) == num_ways
    assert "nan" not in (tmp_path / "out" / "table.md").read_text()


@pytest.mark.parametrize(
    ("recipe", "more"),
    [("distill", "--draft"), ("steer", "--draft"), ("shapes", "--cut"), ("positions", "--long")],
)
def test_another_target_gets_drafters_of_its_own(given, tmp_path, recipe, more):
    for seed, name in enumerate(("target", "draft")):
        model = tiny("llama", seed=seed).float()
        # No text ends early.
        model.config.eos_token_id = model.generation_config.eos_token_id = None
        model.save_pretrained(tmp_path / name)
        letters().save_pretrained(tmp_path / name)
    text = " ".join(f"w{i % 40}" for i in range(300))
    texts = [json.dumps({"domain": "story", "text": text[i:]}) for i in range(30)]
    (tmp_path / "texts.jsonl").write_text("\n".join(texts))
    told = ["--quick", "--data", str(tmp_path / "texts.jsonl"), *given[3:5], "--work", str(tmp_path / "work")]
    told += ["--target", str(tmp_path / "target"), "--out", str(tmp_path / "out")]
    told += {
        "--draft": ["--draft", str(tmp_path / "draft")],
        "--cut": ["--cut", "--layers", "1", "--parameters", "12000"],
        "--long": ["--long", "100", "--num-prompts", "6"],
    }[more]
    with pytest.raises(SystemExit) as ended:
        main([recipe, *told])
    assert ended.value.code == 0
    assert [each.name for each in (tmp_path / "work").iterdir()] == ["target"]
    made = json.loads((tmp_path / "out" / "circumstances.json").read_text())["circumstances"]["arguments"]
    assert made["target"].endswith("target")
    assert "nan" not in (tmp_path / "out" / "table.md").read_text()


def test_the_type_of_products_is_an_option_and_told_of_a_run_that_has_another(given, tmp_path):
    with pytest.raises(SystemExit) as ended:
        main(["steer", *given, "--work", str(tmp_path / "work"), "--precision", "no", "--out", str(tmp_path)])
    assert ended.value.code == 0
    made = json.loads((tmp_path / "circumstances.json").read_text())["circumstances"]["arguments"]
    assert made["precision"] == "no"
    shared = {"data": tmp_path, "work": tmp_path, "prompts": tmp_path}
    assert [Budget(**shared, precision=each).settings(0).precision for each in ("bf16", "no")] == ["bf16", "no"]


def test_drafters_that_begin_otherwise_have_folders_of_their_own(given, tmp_path):
    work = Path(given[given.index("--work") + 1])
    for draft in ("one", "two"):
        fresh_draft(SMALL).save_pretrained(tmp_path / draft)
        with pytest.raises(SystemExit) as ended:
            main(["distill", *given, "--draft", str(tmp_path / draft), "--out", str(tmp_path / f"out-{draft}")])
        assert ended.value.code == 0
    with pytest.raises(SystemExit) as ended:
        main(["shapes", *given, "--cut", "--out", str(tmp_path / "out")])
    assert ended.value.code == 0
    made = {each.name for each in work.iterdir()}
    assert {"distill-from-one", "distill-from-two", "shapes-cut"} <= made


def test_a_target_that_is_not_there_is_called_a_model(given, tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["distill", *given, "--target", str(tmp_path / "nothing")])
    said = " ".join(capsys.readouterr().err.split())
    assert (ended.value.code, "give a model's directory" in said) == (2, True)


def learner() -> Distilled:
    return Distilled(fresh_draft(SMALL), embedded_target(), loss=divergence("fkl"))


def documents(count: int, length: int) -> list[Document]:
    dice = np.random.default_rng(0)
    return [Document(tokens=dice.integers(4, 8000, length), start=5) for _ in range(count)]


def held_texts() -> Texts:
    return Texts(texts=(), answers=(), held={temperature: documents(4, 30) for temperature in (0, 1)}, more=())


def test_the_rows_of_a_drafter_agree_with_what_is_watched_in_training():
    own, texts = learner(), held_texts()
    rows = judged(own, texts, depth=3)
    watched = Evaluation(texts.held[1], depth=3).look(own)
    for temperature, accepted in ((0, watched.accepted_greedy), (1, watched.accepted)):
        first = sum(row[f"first_{temperature}"] for row in rows) / sum(row[f"places_{temperature}"] for row in rows)
        assert first == pytest.approx(accepted[0], rel=1e-4)


def test_judging_with_kept_states_says_the_same_and_runs_the_target_no_more():
    target, texts = embedded_target(), held_texts()
    own = Distilled(fresh_draft(SMALL), target, loss=divergence("fkl"))
    live, kept = judged(own, texts, depth=3), texts.with_states(target)
    forwards = []
    target.model.register_forward_hook(lambda *_: forwards.append(1))
    again = judged(own, kept, depth=3)
    assert (len(again), forwards) == (len(live), [])
    for row, before in zip(again, live, strict=True):
        assert {name: row[name] for name in ("prompt", "category")} == {"prompt": before["prompt"], "category": ""}
        assert [row[name] for name in sorted(row) if name not in ("prompt", "category")] == pytest.approx(
            [before[name] for name in sorted(row) if name not in ("prompt", "category")], rel=1e-3
        )


def test_a_loss_from_kept_states_is_that_of_the_target_itself():
    texts, own = documents(3, 20), learner()
    kept = kept_states(embedded_target(), texts)
    with_states, without = (
        own(Batches(texts, batch_size=3, max_length=20, seed=0, captured=captured).batch(0))
        for captured in (kept, None)
    )
    assert with_states.total.item() == pytest.approx(without.total.item(), rel=1e-4)


def test_expected_steps_are_those_of_all_ways_to_go_through_a_text():
    chances = np.array([[0.5, 0.25], [0.5, 1.0], [0.0, 1.0]])
    # From place 0: one token with 1/2, two with 3/8, three with 1/8; from place 1 one with 1/2, three with 1/2.
    second, third = 0.5, 3 / 8 + 0.5 * 0.5
    assert covered(chances).steps == pytest.approx(1 + second + third)


def test_drafters_that_accept_everything_take_the_fewest_steps(tmp_path: Path):
    assert covered(np.ones((12, 3))).steps == 3
