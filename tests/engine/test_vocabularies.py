"""Pairs whose tokenizers differ: what they have in common, and that output is the target's all the same."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import outrider
from outrider import InputError, Sampling
from outrider.embedded import EMBEDDED_DRAFT
from outrider.lm.model import LanguageModel
from outrider.lm.protocol import Segment
from outrider.lm.translated import Translated
from outrider.lm.vocabulary import spellings, translation
from tests.world.models import llama
from tests.world.tokenizers import TEXT, byte_level, sentencepiece
from tests.world.zoo import scrambled


def width(tokenizer: PreTrainedTokenizerFast) -> int:
    return max(tokenizer.get_vocab().values()) + 1


PAIRS = [
    pytest.param(byte_level(420), byte_level(300), id="larger-and-smaller"),
    pytest.param(byte_level(300), byte_level(420), id="smaller-and-larger"),
    pytest.param(byte_level(420), sentencepiece(120), id="bytes-and-sentencepiece"),
    pytest.param(sentencepiece(120), byte_level(420), id="sentencepiece-and-bytes"),
]


@pytest.mark.parametrize(("target", "draft"), PAIRS)
def test_pieces_say_what_the_token_says(target, draft):
    words = translation(target, draft, width(target), width(draft))
    own, other = spellings(target, width(target)), spellings(draft, width(draft))
    assert len(set(words.ours.tolist())) == len(set(words.theirs.tolist())) == len(words.ours) > 50
    shared = dict(zip(words.ours.tolist(), words.theirs.tolist(), strict=True))
    for token, said in enumerate(own):
        pieces = words.pieces(token)
        assert (len(pieces) == 1 and pieces[0] == shared[token]) if token in shared else token not in words.ours
        if isinstance(said, bytes):
            assert b"".join(other[piece] for piece in pieces) == said
    assert shared[target.eos_token_id] == draft.eos_token_id


@pytest.mark.parametrize(("target", "draft"), PAIRS)
def test_a_text_keeps_its_words_and_its_bytes(target, draft):
    words = translation(target, draft, width(target), width(draft))
    other = spellings(draft, width(draft))
    for text in (TEXT, "naïve 海, \t\x07 “quoted”"):
        ids = target(text, add_special_tokens=False)["input_ids"]
        said = b"".join(other[piece] for token in ids for piece in words.pieces(token))
        assert said.decode().strip() == text.strip()
    the = target(" the", add_special_tokens=False)["input_ids"]
    assert len(the) == 1
    assert the[0] in words.ours


def test_what_begins_and_ends_a_text_is_known_by_its_role():
    target = byte_level(300, begin="<begin>", end="<finish>")
    draft = byte_level(300, begin="<s>", end="</s>")
    words = translation(target, draft, 300, 300)
    assert words.pieces(target.bos_token_id) == (draft.bos_token_id,)
    assert words.pieces(target.eos_token_id) == (draft.eos_token_id,)
    assert words.share == 1
    same = byte_level(300, end="<x>")
    same.bos_token = "<x>"
    both = translation(same, draft, 300, 300)
    assert both.pieces(same.eos_token_id) == (draft.eos_token_id,)


def test_a_special_token_is_not_the_text_that_looks_like_it():
    plain = byte_level(400, text="<|end|> " * 50 + TEXT, end="<stop>")
    special = byte_level(400, end="<|end|>")
    looks = plain("<|end|>")["input_ids"]
    words = translation(special, plain, 400, 400)
    assert len(words.pieces(special.eos_token_id)) == 1
    assert words.pieces(special.eos_token_id)[0] not in looks


def saved(place: Path, model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast) -> str:
    model.save_pretrained(place)
    tokenizer.save_pretrained(place)
    return str(place)


def tiny(tokenizer: PreTrainedTokenizerFast, layers: int, seed: int) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=width(tokenizer) + 5,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=layers,
        num_attention_heads=4,
        max_position_embeddings=128,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    return scrambled(LlamaForCausalLM(config), seed)


@pytest.mark.parametrize(("target", "draft"), PAIRS)
@pytest.mark.parametrize("tree", ["chain", "gumbel:branching=2x2"])
def test_greedy_output_is_the_targets_whatever_the_drafts_tokenizer(target, draft, tree, tmp_path):
    place = saved(tmp_path / "target", tiny(target, 2, 0), target)
    other = saved(tmp_path / "draft", tiny(draft, 1, 1), draft)
    engine = outrider.load(place, drafter=f"model:path={other}", tree=tree, length="fixed:2", dtype="float32")
    assert isinstance(engine.parts.drafter.lm, Translated)
    greedy = Sampling(temperature=0, seed=0)
    prompts = ["The old man", "He said: naïve", "2 3"]
    outputs = engine.generate(prompts, max_new_tokens=20, sampling=greedy)
    assert sum(out.num_draft_tokens for out in outputs) > 50
    assert outputs[0].tokens == engine.plain().generate(prompts[:1], max_new_tokens=20, sampling=greedy)[0].tokens
    inputs = target(prompts[1], return_tensors="pt", add_special_tokens=True)
    alone = engine.parts.target.model.generate(
        input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"], do_sample=False, max_new_tokens=20
    )
    assert outputs[1].tokens == alone[0, inputs["input_ids"].shape[1] :].tolist()


@pytest.fixture(scope="module")
def permuted(tmp_path_factory) -> str:
    """The embedded draft model with its ids in another order: tokenizer, embeddings and special tokens."""
    place = tmp_path_factory.mktemp("permuted")
    order = np.random.default_rng(0).permutation(8192)
    model = LlamaForCausalLM.from_pretrained(EMBEDDED_DRAFT)
    with torch.no_grad():
        rows = model.model.embed_tokens.weight.clone()
        model.model.embed_tokens.weight[torch.from_numpy(order)] = rows
    model.save_pretrained(place)
    whole = json.loads((EMBEDDED_DRAFT / "tokenizer.json").read_text(encoding="utf-8"))
    whole["model"]["vocab"] = {text: int(order[id]) for text, id in whole["model"]["vocab"].items()}
    for token in whole["added_tokens"]:
        token["id"] = int(order[token["id"]])
    (place / "tokenizer.json").write_text(json.dumps(whole), encoding="utf-8")
    (place / "tokenizer_config.json").write_text((EMBEDDED_DRAFT / "tokenizer_config.json").read_text())
    return str(place)


@pytest.mark.parametrize("tree", ["chain", "gumbel:branching=3x2x1"])
def test_a_permuted_vocabulary_is_accepted_exactly_as_the_same_one(permuted, tree):
    own, other = (
        outrider.load(drafter=f"model:path={path}", tree=tree, length="fixed:4", dtype="float32")
        for path in (EMBEDDED_DRAFT, permuted)
    )
    assert isinstance(other.parts.drafter.lm, Translated)
    assert other.parts.drafter.lm.translation.share == 1
    sampling = [Sampling(temperature=0, seed=0), Sampling(temperature=1, seed=1), Sampling(temperature=0.8, seed=2)]
    prompts = ["Once upon a time", "One day, a dog", [{"role": "user", "content": "I need a taxi."}]]
    outputs = [engine.generate(prompts, max_new_tokens=40, sampling=sampling) for engine in (own, other)]
    for ours, theirs in zip(*outputs, strict=True):
        assert ours.tokens == theirs.tokens
        assert ours.accepted_per_position == theirs.accepted_per_position
        assert ours.num_steps == theirs.num_steps
    assert sum(out.num_accepted_tokens for out in outputs[0]) > 30


def test_a_draft_model_whose_context_ends_early_changes_nothing_but_speed(tmp_path):
    target, draft = byte_level(420), byte_level(290)
    place = saved(tmp_path / "target", tiny(target, 2, 0), target)
    other = saved(tmp_path / "draft", tiny(draft, 1, 1), draft)
    engine = outrider.load(place, drafter=f"model:path={other},max_context=40", length="fixed:3", dtype="float32")
    greedy = Sampling(temperature=0, seed=0)
    outputs = [e.generate([TEXT[:60]], max_new_tokens=40, sampling=greedy) for e in (engine, engine.plain())]
    assert outputs[0][0].tokens == outputs[1][0].tokens
    assert len(outputs[0][0].tokens) + outputs[0][0].prompt_tokens > 40


def test_vocabularies_with_too_little_in_common_are_refused_with_the_number(tmp_path):
    own = outrider.load(drafter="none")
    few = byte_level(257, text="")
    place = saved(tmp_path, tiny(few, 1, 0), few)
    with pytest.raises(
        InputError, match=r"257 of the target's 8192 tokens \(3\.1%\).*at least 5% of them, or drafter suffix"
    ):
        outrider.load(drafter=f"model:path={place}")
    assert own.tokenizer is not None


def test_without_a_tokenizer_widths_must_agree(tmp_path):
    model = llama()
    model.save_pretrained(tmp_path)
    with pytest.raises(InputError, match="64 token ids and the target 8192, and without both tokenizers"):
        outrider.load(drafter=f"model:path={tmp_path}")


def test_the_row_of_a_real_draft_model_is_its_own(tmp_path):
    """Logits of shared tokens, in the target's order, after the pieces of a text: no engine in between."""
    target, draft = byte_level(420), byte_level(300)
    words = translation(target, draft, width(target), width(draft))
    model = tiny(draft, 2, 3)
    lm = Translated(LanguageModel(model, vocab_size=width(draft)), words)
    slot = lm.open()
    ids = target(TEXT[:90])["input_ids"]
    found = lm.extend([Segment(slot=slot, tokens=torch.tensor(ids))]).logits
    pieces = [words.pieces(token) for token in ids]
    assert any(len(p) > 1 for p in pieces)
    ends = np.cumsum([len(p) for p in pieces]) - 1
    with torch.no_grad():
        alone = model(torch.tensor([[piece for p in pieces for piece in p]])).logits[0, torch.from_numpy(ends)]
    torch.testing.assert_close(found[:, words.ours], alone[:, words.theirs])
    outside = np.setdiff1d(np.arange(width(target)), words.ours)
    assert len(outside)
    assert (found[:, outside] == -torch.inf).all()
