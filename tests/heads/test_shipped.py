"""Heads that ship for a target: each is found by the target's weights, in every format, and drafts by default."""

import json
import shutil
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

import outrider
from outrider import Sampling
from outrider.assembly import completed
from outrider.embedded import EMBEDDED_DRAFT, EMBEDDED_HEAD, EMBEDDED_TARGET
from outrider.heads import shipped
from outrider.lm.hf.last_norm import norm_of
from outrider.setup import Setup
from tests.world.gguf_files import write_gguf

TARGET = str(EMBEDDED_TARGET)


@pytest.fixture
def head(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The head of the embedded target, as if it shipped."""
    place = tmp_path / "heads" / "embedded"
    shutil.copytree(EMBEDDED_HEAD, place)
    (place / "tokens.txt").write_text("".join(f"{token}\n" for token in range(4096)))
    card = {"norm": norm_of(TARGET), "drafter": "eagle", "files": {"token_map": "tokens.txt"}}
    (place / shipped.CARD).write_text(json.dumps(card))
    monkeypatch.setattr(shipped, "HEADS", place.parent)
    return place


def test_a_head_is_found_by_its_targets_weights(head: Path, tmp_path: Path) -> None:
    model, tokenizer = AutoModelForCausalLM.from_pretrained(TARGET), AutoTokenizer.from_pretrained(TARGET)
    copy = shutil.copytree(TARGET, tmp_path / "another name")
    file = write_gguf(tmp_path / "packed.gguf", model, tokenizer, kind="Q8_0")
    wanted = f"first:suffix,eagle:path={head},token_map={head / 'tokens.txt'}"
    assert {completed(Setup(str(each))).drafter for each in (TARGET, copy, file)} == {wanted}
    assert completed(Setup()).drafter == f"model:path={EMBEDDED_DRAFT}"


def test_it_drafts_by_default_and_changes_no_text(head: Path) -> None:
    plain, default = outrider.load(TARGET, drafter="none"), outrider.load(TARGET, probe=False)
    settings = {"sampling": Sampling(temperature=0), "max_new_tokens": 24}
    [one], [other] = (
        plain.generate(["Once upon a time"], **settings),
        default.generate(["Once upon a time"], **settings),
    )
    assert one.tokens == other.tokens
    assert [type(each).__name__ for each in default.parts.drafter.components] == ["SuffixDrafter", "FeatureDrafter"]
    assert other.num_accepted_tokens > 0


@pytest.mark.parametrize(
    "setup",
    [
        Setup(TARGET, drafter="suffix"),
        Setup(TARGET, tree="dynamic"),
        Setup(TARGET, verifier="block"),
        Setup(TARGET, length="fixed:4"),
        Setup(TARGET, reproducible=True),
    ],
)
def test_it_leaves_setups_alone_that_name_a_drafter_or_a_shape(head: Path, setup: Setup) -> None:
    assert completed(setup).drafter == "suffix"


def test_another_target_has_no_head(head: Path, tmp_path: Path) -> None:
    card = json.loads((head / shipped.CARD).read_text())
    (head / shipped.CARD).write_text(json.dumps({**card, "norm": "0" * 32}))
    assert completed(Setup(TARGET)).drafter == "suffix"
    for missing in ("org/model", str(tmp_path / "missing"), str(tmp_path)):
        assert completed(Setup(missing)).drafter == "suffix"
