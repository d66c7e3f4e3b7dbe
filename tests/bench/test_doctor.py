"""The doctor's figures are those that plain forwards give, and what cannot run is still described."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast, T5Config

from outrider.bench.agreement import along_text, run_freely
from outrider.bench.costs import Costs
from outrider.bench.doctor import Side, Worth, compare_sides, measure
from outrider.cli.doctor import _print_costs as print_costs
from outrider.core.types import InputError
from outrider.drafters.model import ModelDrafter
from tests.cli.runs import done, refused
from tests.world.models import engine, llama, target
from tests.world.tokenizers import TEXT, byte_level, letters
from tests.world.zoo import VOCAB, tiny_config

wide = pytest.mark.usefixtures("float64_stays_float64")


def texts() -> list[list[int]]:
    dice = np.random.default_rng(0)
    return [dice.integers(3, VOCAB, size=size).tolist() for size in (40, 9, 2, 1, 25)]


def rows_of(num_layers: int, tokens: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return llama(num_layers)(torch.tensor([tokens]), use_cache=False).logits[0].softmax(-1)


@wide
def test_rows_along_a_text_are_those_of_plain_forwards():
    found = along_text(engine("model", max_slots=2), texts(), num_speculative_tokens=3)
    direct = found.depths == 1
    # The last token of a text is followed by nothing, the one before it by one token: no room to draft.
    expected = []
    for text in texts():
        p, q = rows_of(2, text), rows_of(1, text)
        expected += list(zip(torch.minimum(p, q).sum(-1).tolist()[:-2], range(len(text) - 2), strict=True))
    got = list(zip(found.alpha[direct].tolist(), found.positions[direct].tolist(), strict=True))
    assert np.array(sorted(got)) == pytest.approx(np.array(sorted(expected)), abs=1e-6)
    bands = found.by_position()
    assert [band.where for band in bands] == ["0-15", "16-31", "32-63"]
    assert sum(band.count for band in bands) == len(expected)
    assert found.by_depth()[0].alpha == pytest.approx(np.mean([alpha for alpha, _ in expected]), abs=1e-6)
    assert found.by_depth()[0].variation == pytest.approx(1 - found.by_depth()[0].alpha)


@wide
def test_a_draft_model_that_is_the_target_agrees_everywhere():
    same = engine(ModelDrafter(lm=target()))
    found = along_text(same, texts(), num_speculative_tokens=3)
    assert [(row.where, row.argmax) for row in found.by_depth()] == [("1", 1.0), ("2", 1.0), ("3", 1.0)]
    assert min(row.alpha for row in found.by_depth()) > 1 - 1e-6
    free = run_freely(same, [[3, 4], [5]], num_speculative_tokens=3, max_new_tokens=30)
    assert free.acceptance == 1
    assert free.conditional == [1, 1, 1]
    assert min(row.alpha for row in free.rows) > 1 - 1e-6


@wide
def test_free_running_counts_what_was_judged():
    free = run_freely(engine("model"), [[3, 4], [5]], num_speculative_tokens=3, max_new_tokens=60)
    assert 0 < free.acceptance < 1
    assert free.num_accepted_tokens == round(sum(free.unconditional) * free.num_steps)
    assert free.rows[0].count >= free.rows[-1].count > 0
    assert free.conditional[0] == pytest.approx(free.rows[0].alpha, abs=0.25)


@wide
def test_a_drafter_without_rows_is_measured_free_running_only():
    found = measure(engine("ngram"), texts()[:1] * 2, rounds=0)
    assert found.by_depth is None
    assert "only its free running" in found.notes[0]
    assert found.free.num_steps > 0
    with pytest.raises(InputError, match="no distribution"):
        along_text(engine("ngram"), texts())


def test_break_even_is_where_the_speedup_is_one():
    costs = Costs(draft=0.2, token=0.05)
    worth = Worth.of(costs, 0.6)
    for length, acceptance in worth.break_even.items():
        assert costs.speedup(acceptance, length) == pytest.approx(1)
    assert worth.best_speedup == max(worth.speedups[0.6].values())
    assert Costs(draft=1.2, token=0.0).break_even(1) is None


def test_sides_name_what_differs():
    ours, theirs = letters(), letters()
    theirs.add_tokens(["new"])
    theirs.chat_template = "{{ messages }}"
    config = tiny_config("llama")
    sides = Side(config=config, tokenizer=ours), Side(config=tiny_config("qwen2"), tokenizer=theirs)
    found = {aspect.name: aspect for aspect in compare_sides(*sides)}
    assert not found["vocabulary"].same
    assert f"1 token ids differ ({VOCAB} is None and 'new')" in found["vocabulary"].means
    assert f"the {VOCAB} tokens that both have are drafted, 100.0% of the target's" in found["vocabulary"].means
    assert "refused" not in found["vocabulary"].means
    assert not found["chat template"].same
    assert not found["added tokens"].same
    assert found["end token"].same
    assert found["context length"].same
    alike = compare_sides(Side(config=config, tokenizer=ours), Side(config=config, tokenizer=ours))
    assert all(aspect.same and not aspect.means for aspect in alike)


@pytest.fixture(scope="module")
def places(tmp_path_factory) -> dict[str, Path]:
    """A tiny pair, and a config that is refused, without weights."""
    found = {name: tmp_path_factory.mktemp(name) for name in ("target", "draft", "refused")}
    for name, layers in (("target", 2), ("draft", 1)):
        llama(layers).float().save_pretrained(found[name])
        letters().save_pretrained(found[name])
    T5Config().save_pretrained(found["refused"])
    (found["target"] / "text.txt").write_text("".join(letters().convert_ids_to_tokens(texts()[0])))
    return found


def test_a_pair_is_diagnosed_for_programs_and_for_people(monkeypatch, capsys, places):
    given = ["--target", str(places["target"]), "--text", str(places["target"] / "text.txt"), "--num-tokens", "30"]
    # A draft model that is the target gets everything accepted, so that few steps are timed.
    twin = [*given, "--drafter", f"model:path={places['target']}", "--rounds", "1"]
    printed = done(monkeypatch, capsys, "doctor", *given, "--drafter", f"model:path={places['draft']}", "--rounds", "0")
    assert "into drafts that begin in the text, by depth" in printed
    assert "free running, by depth" in printed
    found = json.loads(done(monkeypatch, capsys, "doctor", *twin, "--json"))
    assert found["capabilities"][0]["supported"]
    assert found["refusal"] is None
    assert sum(row["count"] for row in found["by_position"]) == 28
    assert found["by_depth"][0]["variation"] == pytest.approx(1 - found["by_depth"][0]["alpha"])
    assert found["worth"]["costs"]["draft"] > 0
    assert set(found["free"]["rows"][0]) == {"where", "count", "alpha", "variation", "argmax"}


def test_a_refused_target_and_a_refused_pair_are_described(monkeypatch, capsys, places):
    printed = done(monkeypatch, capsys, "doctor", "--target", str(places["refused"]), "--json")
    [first, *_] = json.loads(printed)["capabilities"]
    assert not first["supported"]
    assert "encoder-decoder model" in first["reason"]
    assert " no " in done(monkeypatch, capsys, "doctor", "--target", str(places["refused"]))
    given = ["--target", str(places["target"]), "--drafter", f"model:path={places['refused']}"]
    found = json.loads(done(monkeypatch, capsys, "doctor", *given, "--json"))
    assert "cannot load a causal LM" in found["refusal"]
    assert found["by_depth"] is None
    assert "refused: " in done(monkeypatch, capsys, "doctor", *given)


def test_a_target_with_weights_that_are_not_numbers_is_named_with_the_tensor(monkeypatch, capsys, tmp_path):
    model = llama(1).float()
    with torch.no_grad():
        model.model.embed_tokens.weight[-1] = torch.nan
    model.save_pretrained(tmp_path)
    letters().save_pretrained(tmp_path)
    printed = " ".join(done(monkeypatch, capsys, "doctor", "--target", str(tmp_path), "--drafter", "ngram").split())
    assert "refused: model.embed_tokens.weight of the target holds values that are not numbers" in printed


def test_a_vocabulary_with_too_little_in_common_is_said_to_be_refused():
    """What is said of the vocabularies is what putting the pair together does."""
    ours, near = (Side(config=tiny_config("llama"), tokenizer=byte_level(size, TEXT)) for size in (420, 300))
    words = WordLevel({"zebra": 0, "quagga": 1}, unk_token="zebra")
    far = replace(near, tokenizer=PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words)))
    shared, too_little = (compare_sides(ours, theirs)[0].means for theirs in (near, far))
    assert "the 300 tokens that both have are drafted" in shared
    assert "refused" not in shared
    assert "the 0 tokens that both have are drafted, 0.0% of the target's" in too_little
    assert "below 5% the draft model is refused" in too_little


def wrong(monkeypatch, capsys, *arguments: str) -> str:
    err = refused(monkeypatch, capsys, "doctor", *arguments)
    assert err.count("\n") == 1
    return err


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--num-speculative-tokens", "0"], "num_speculative_tokens must be >= 1, got 0"),
        (["--max-slots", "0"], "max_slots must be >= 1, got 0"),
        (["--num-tokens", "2"], "num_tokens must be >= 3, got 2"),
        (["--temperature", "inf"], "temperature must be >= 0, got inf"),
        (["--dtype", "float17"], "unknown dtype 'float17'"),
        (["--device", "warp"], "device 'warp' cannot be used"),
        (["--target", ""], "there is no directory ''"),
        (["--text", "/no/such/text"], "there is no prompt file /no/such/text"),
    ],
    ids=str,
)
def test_wrong_input_gets_one_sentence(monkeypatch, capsys, arguments, sentence):
    assert sentence in wrong(monkeypatch, capsys, *arguments)


def test_texts_that_are_too_short_or_that_nobody_reads_are_refused(monkeypatch, capsys, places):
    short = places["target"] / "short.txt"
    short.write_text("".join(letters().convert_ids_to_tokens([4, 5])))
    given = ["--target", str(places["target"]), "--text", str(short)]
    assert "give --drafter too" in wrong(monkeypatch, capsys, *given)
    drafter = ["--drafter", f"model:path={places['draft']}", "--rounds", "0"]
    assert "no text has 3 tokens" in wrong(monkeypatch, capsys, *given, *drafter)
    assert "no text has 3 tokens" in wrong(monkeypatch, capsys, *given[:2], *drafter, "--max-context", "3")


def test_shipped_prompts_do_for_a_target_without_a_chat_template(monkeypatch, capsys, places):
    given = ["--target", str(places["target"]), "--drafter", "ngram", "--num-tokens", "12", "--rounds", "0"]
    assert "free running, by depth" in done(monkeypatch, capsys, "doctor", *given)


def test_where_no_length_pays_the_doctor_recommends_to_draft_nothing(capsys):
    never = Worth.of(Costs(draft=3.0, token=0.5), 0.3)
    assert never.best_speedup < 1
    assert set(never.break_even.values()) == {None}
    print_costs(Console(soft_wrap=True), never)
    said = capsys.readouterr().out
    assert "no length pays, so draft nothing (--drafter none)" in said
    assert "best length" not in said
    print_costs(Console(soft_wrap=True), Worth.of(Costs(draft=0.05, token=0.01), 0.9))
    assert "best length" in capsys.readouterr().out
