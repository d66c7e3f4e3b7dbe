"""Draft models and heads that propose the most frequent tokens alone: files of them, and what stays the same."""

import json
from dataclasses import fields, replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

import outrider
from outrider import InputError, Sampling, catalog
from outrider.core.types import ShortList
from outrider.drafters.model import ModelDrafter
from outrider.drafters.token_map import read_token_map
from outrider.lm.hf.narrow import narrowed
from outrider.lm.model import LanguageModel
from outrider.lm.protocol import Segment
from outrider.lm.tabular import TabularLM, random_rows
from outrider.lm.target_info import TargetInfo
from outrider.lm.translated import Translated
from outrider.proof.enumerate import law
from recipes.inquiry.texts import log_ratios, logits_along, rows_at
from tests.engine.test_vocabularies import saved, tiny, width
from tests.proof import tiny_runs as real
from tests.world import heads, models
from tests.world.forced import forced_guesses
from tests.world.models import llama
from tests.world.published import eagle
from tests.world.tables import tables
from tests.world.tokenizers import byte_level
from tests.world.verifiers import each, judges_of
from tests.world.zoo import VOCAB
from tests.world.zoo import tiny as zoo

GREEDY = Sampling(temperature=0.0, seed=0)


def save(place: Path, name: str, content: object) -> str:
    file = place / name
    if name.endswith(".pt"):
        torch.save(content, file)
    else:
        file.write_text(content if isinstance(content, str) else json.dumps(content))
    return str(file)


HEADS = [name for name, spec in heads.HEADS.items() if "token_map" in {each.name for each in fields(spec.trained)}]
"""Heads that guess with the target's own output layer, which can be cut."""
FILES = {
    "list.json": [7, 3, 12],
    "counts.json": {"3": 5, "12": 1, "7": 90, "8": 0},
    "ids.txt": "7\n3\n\n12\n",
    "counts.txt": "3 5\n12 1\n7 90\n8 0\n",
    "tensor.pt": torch.tensor([7, 3, 12]),
    "python.pt": [7, 3, 12],
}


@pytest.mark.parametrize("name", FILES)
def test_every_kind_of_file_gives_ids_by_frequency(name, tmp_path):
    path = save(tmp_path, name, FILES[name])
    assert read_token_map(path) == [7, 3, 12]
    assert read_token_map(path, 2) == [7, 3]


WRONG = {
    "empty list": ("a.json", [], "holds no token ids; give at least one"),
    "empty text": ("a.txt", "", "holds no token ids; give at least one"),
    "never used": ("a.json", {"3": 0}, "holds no token ids; give at least one"),
    "twice": ("a.json", [3, 4, 3], "must be different, .* holds 3 twice"),
    "negative": ("a.txt", "3\n-1\n", "must be >= 0, .* holds -1"),
    "words": ("a.txt", "the\nof\n", "must hold token ids, or ids and their counts"),
    "fractions": ("a.json", [1.5], "a token id must be a whole number, got 1.5"),
    "mixed": ("a.txt", "3 5\n4\n", "some lines have one number"),
    "broken": ("a.json", "[3, ", "must hold token ids"),
    "tables": ("a.pt", torch.zeros(2, 2), "must hold token ids"),
    "no tensor": ("a.pt", {"a": 1}, "expected a list of ids, got dict"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_file_that_is_no_list_of_tokens_gets_a_sentence(case, tmp_path):
    name, content, message = WRONG[case]
    with pytest.raises(InputError, match=message):
        read_token_map(save(tmp_path, name, content))


def test_a_file_that_is_not_there_and_numbers_that_make_no_sense_get_a_sentence(tmp_path):
    with pytest.raises(InputError, match=r"there is no file nowhere\.json"):
        read_token_map("nowhere.json")
    with pytest.raises(InputError, match=r"vocabulary must be >= 1, .* got 0"):
        read_token_map(save(tmp_path, "a.json", [1]), 0)
    with pytest.raises(InputError, match="give the file, token_map=FILE"):
        catalog.make("drafter", "model:path=there,vocabulary=5")


@pytest.mark.parametrize("name", ["llama", "gemma2", "phi3", "gpt2", "cohere2"])
@pytest.mark.usefixtures("float64_stays_float64")
def test_a_cut_output_layer_computes_the_same_logits_of_fewer_tokens(name):
    ids, text = [3, 9, 10, 40], torch.tensor([5, 9, 60, 3])
    logits = []
    for cut in (False, True):
        model = zoo(name)
        lm = LanguageModel(narrowed(model, ids) if cut else model, max_slots=1)
        logits.append(lm.extend([Segment(slot=lm.open(), tokens=text)]).logits)
    assert lm.vocab_size == len(ids)
    torch.testing.assert_close(logits[1], logits[0][:, ids], rtol=1e-12, atol=1e-12)


def test_an_output_layer_that_cannot_be_cut_is_refused():
    model = zoo("llama")
    model.lm_head = torch.nn.Sequential(model.lm_head)
    with pytest.raises(InputError, match=r"output layer is a Sequential, .* leave token_map out"):
        narrowed(model, [3])


@pytest.mark.parametrize("name", HEADS)
@pytest.mark.usefixtures("float64_stays_float64")
def test_a_head_with_a_list_guesses_what_it_guesses_without_it_among_fewer_tokens(name, tmp_path):
    lm, ids = models.target(1), [*range(20, 50), 3, 4]
    around, text = TargetInfo.of(lm, None), [5, 9, 33, 7, 12, 40, 3, 22, 51, 6, 17]
    heads.write_head(name, tmp_path, around)
    listed = save(tmp_path, "list.json", ids)
    plain = catalog.make("drafter", f"{name}:path={tmp_path}").bind(around)
    found = catalog.make("drafter", f"{name}:path={tmp_path},token_map={listed},vocabulary=31").bind(around)
    kept = sorted(ids[:31])
    assert found.lm.vocab_size == 31
    assert found.cast(around).lm.vocab_size == 31
    rows = [forced_guesses(each, models.target(1), text, 5, 3) for each in (plain, found)]
    for place, row in rows[0].items():
        torch.testing.assert_close(rows[1][place][kept], row[kept], rtol=1e-9, atol=1e-9)
        assert rows[1][place].isinf().sum() == VOCAB - 31


@pytest.mark.parametrize("name", HEADS)
@pytest.mark.parametrize(("tree", "verifier"), [("chain", "block"), ("gumbel:branching=2x1", "traversal")])
@pytest.mark.usefixtures("float64_stays_float64")
def test_runs_of_a_head_with_a_list_keep_the_law(name, tree, verifier, tmp_path):
    model = real.tiny("llama", 3)
    around = TargetInfo.of(LanguageModel(model, max_slots=real.SLOTS), None)
    heads.write_head(name, tmp_path, around)
    listed = save(tmp_path, "list.json", [0, 2])
    drafter = catalog.make("drafter", f"{name}:path={tmp_path},token_map={listed}").bind(around)
    found = real.walk(real.engine(model, drafter, verifier, tree), most=3)
    real.assert_lossless(found)


def test_a_head_with_ids_that_the_target_lacks_or_a_number_without_a_file_is_refused(tmp_path):
    around = TargetInfo.of(models.target(1), None)
    eagle(tmp_path, around)
    listed = save(tmp_path, "list.json", [3, VOCAB])
    with pytest.raises(InputError, match=f"holds token id {VOCAB}, .* have ids 0..{VOCAB - 1} in common"):
        catalog.make("drafter", f"eagle:path={tmp_path},token_map={listed}").bind(around)
    with pytest.raises(InputError, match="give the file, token_map=FILE"):
        catalog.make("drafter", "griffin:path=there,vocabulary=5")


def few(vocab: int) -> ModelDrafter:
    """A table over all tokens but one."""
    ids = [token for token in range(vocab) if token != 1]
    lm = TabularLM(random_rows(len(ids), 100), len(ids))
    return ModelDrafter(lm=lm, short_list=ShortList.of(torch.tensor(ids), vocab))


@pytest.mark.parametrize("verifier", each(judges_of("sampled chain")))
def test_a_short_list_keeps_the_law_of_every_chain_verifier(verifier):
    for length, steps in ((3, 1), (2, 2)):
        found = law(tables(3, verifier, length, drafter=few(3)), [0], steps, horizon=3)
        assert found.error < 1e-12
        assert found.accepted > 0


@pytest.mark.parametrize(
    ("tree", "kind"),
    [
        ("gumbel:branching=2x1", "without replacement"),
        ("iid:num_paths=2", "iid"),
        ("top_plus_one:width=2", "top plus one"),
        ("dynamic:width=2,num_nodes=3", "chosen tree"),
    ],
)
def test_a_short_list_keeps_the_law_of_trees(tree, kind):
    drafter = catalog.make("tree", tree)
    names = {"without replacement": "recursive", "iid": "kseq", "top plus one": "top_plus_one", "chosen tree": "match"}
    rule = catalog.make("verifier", names[kind])
    assert law(tables(4, rule, 2, drafter=few(4), tree=drafter), [0], 1).error < 1e-12


@pytest.mark.usefixtures("float64_stays_float64")
def test_runs_of_a_model_with_a_cut_output_layer_keep_the_law():
    lm = LanguageModel(narrowed(real.tiny("llama", 3, seed=50), [0, 2]), max_slots=real.SLOTS)
    drafter = ModelDrafter(lm=lm, short_list=ShortList.of(torch.tensor([0, 2]), 3))
    found = real.walk(real.engine(real.tiny("llama", 3), drafter), most=3)
    real.assert_lossless(found)


def pair(place: Path) -> tuple[str, str]:
    """A target and a shallower draft model without tokenizers."""
    for name, layers in (("target", 2), ("draft", 1)):
        llama(layers).float().save_pretrained(place / name)
    return str(place / "target"), str(place / "draft")


@pytest.mark.parametrize(
    ("tree", "decoding"), [("chain", "step"), ("gumbel:branching=2x2", "step"), ("chain", "pearl")]
)
def test_output_is_the_targets_and_drafts_are_of_the_list(tree, decoding, tmp_path):
    target, draft = pair(tmp_path)
    listed = save(tmp_path, "list.json", [*range(20, 50), 3, 4])
    engine = outrider.load(
        target,
        drafter=f"model:path={draft},token_map={listed},vocabulary=31",
        tree=tree,
        decoding=decoding,
        length="fixed:3",
        dtype="float64",
    )
    drafter = engine.parts.drafter
    assert drafter.lm.model.get_output_embeddings().weight.shape[0] == drafter.lm.vocab_size == 31
    drafted: set[int] = set()
    widths: set[int] = set()

    def watch(cycle) -> None:
        drafted.update(cycle.draft.tokens[torch.from_numpy(cycle.draft.parents >= 0)].tolist())
        widths.update([] if cycle.draft.rows is None else [cycle.draft.rows.shape[1]])

    engine.watch = watch
    prompts = [[5, 9, 4], [7] * 12, [3, 30]]
    made = engine.generate(prompts, max_new_tokens=24, sampling=GREEDY)
    plain = engine.plain().generate(prompts, max_new_tokens=24, sampling=GREEDY)
    assert [out.tokens for out in made] == [out.tokens for out in plain]
    assert sum(out.num_accepted_tokens for out in made) > 0
    engine.generate(prompts, max_new_tokens=24, sampling=Sampling(temperature=1.0, seed=1))
    assert drafted <= {*range(20, 50), 3}
    # Rows stay narrow until a verifier compares them with the target's.
    assert widths == {31}


def test_ids_that_the_models_lack_and_another_device_are_refused(tmp_path):
    target, draft = pair(tmp_path)
    load = partial(outrider.load, target, length="fixed:2")
    listed = save(tmp_path, "list.json", [3, VOCAB])
    with pytest.raises(InputError, match=f"holds token id {VOCAB}, .* have ids 0..{VOCAB - 1} in common"):
        load(drafter=f"model:path={draft},token_map={listed}")
    around = replace(TargetInfo.of(models.target(), None), device=torch.device("cuda:1"))
    with pytest.raises(InputError, match="token_map needs the draft model on the target's device cuda:1, got cpu"):
        catalog.make("drafter", f"model:path={draft},token_map={listed},device=cpu").bind(around)


def test_a_list_of_the_targets_tokens_suits_a_draft_model_with_another_vocabulary(tmp_path):
    target, draft = byte_level(420), byte_level(300)
    place = saved(tmp_path / "target", tiny(target, 2, 0), target)
    other = saved(tmp_path / "draft", tiny(draft, 1, 1), draft)
    whole = outrider.load(place, drafter=f"model:path={other}", length="fixed:2", dtype="float32")
    shared = whole.parts.drafter.lm.translation.ours.tolist()
    alone = next(token for token in range(width(target)) if token not in shared)
    listed = save(tmp_path, "list.json", [alone, *shared[::2]])
    engine = outrider.load(place, drafter=f"model:path={other},token_map={listed}", length="fixed:2", dtype="float32")
    lm = engine.parts.drafter.lm
    assert isinstance(lm, Translated)
    assert lm.translation.ours.tolist() == shared[::2]
    assert lm.lm.vocab_size == len(shared[::2])
    tokens = torch.tensor([shared[0], shared[1], alone])
    rows = [
        each.parts.drafter.lm.extend([Segment(slot=each.parts.drafter.lm.open(), tokens=tokens)]).logits
        for each in (whole, engine)
    ]
    torch.testing.assert_close(rows[1][:, shared[::2]], rows[0][:, shared[::2]], rtol=1e-5, atol=1e-5)
    assert (rows[1].isfinite().sum(1) == len(shared[::2])).all()
    with pytest.raises(InputError, match=r"names no token that the target and the draft model .* share"):
        outrider.load(place, drafter=f"model:path={other},token_map={save(tmp_path, 'none.json', [alone])}")


def test_the_gate_proves_a_drafter_with_a_short_list(tmp_path):
    target, draft = pair(tmp_path)
    listed = save(tmp_path, "list.json", [3, 4, 5, 20, 21])
    engine = outrider.load(target, drafter=f"model:path={draft},token_map={listed}", length="fixed:2", dtype="float64")
    small = engine.parts.drafter.on_tables(3, seed=1)
    assert small.short_list is not None
    assert law(tables(3, engine.parts.verifier, 2, drafter=small), [0], 2, horizon=3).error < 1e-12


def test_counts_on_texts_know_that_other_tokens_are_never_proposed():
    ids, text = [3, 9, 10, 40], [9, 41, 3, 40, 10]
    target, whole = (LanguageModel(zoo(name).float(), max_slots=1) for name in ("llama", "qwen2"))
    cut = LanguageModel(narrowed(zoo("qwen2").float(), ids), max_slots=1)
    listed = ShortList.of(torch.tensor(ids), VOCAB)
    ratios = log_ratios(target, cut, [5, 6], text, 1.0, listed)
    assert np.isposinf(ratios).tolist() == [token not in ids for token in text]
    inside = rows_at(logits_along(whole, [5, 6], text), 1.0)[:, ids].sum(1).log().numpy()
    there = ~np.isposinf(ratios)
    plain = log_ratios(target, whole, [5, 6], text, 1.0)
    np.testing.assert_allclose(ratios[there], (plain + inside)[there], atol=1e-5)
