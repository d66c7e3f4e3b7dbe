"""outrider.load puts fitting parts together and refuses the others with one that works."""

import inspect
import re
from dataclasses import dataclass, fields

import pytest
import torch
from safetensors.torch import save_file
from transformers import (
    EncodecConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MusicgenConfig,
    MusicgenDecoderConfig,
    ReformerConfig,
    T5Config,
)

import outrider
from outrider import InputError, catalog
from outrider.drafters.ngram import NgramDrafter
from outrider.refusals import Cell, refusal
from outrider.setup import Setup
from outrider.trees.chain import ChainTree
from outrider.verifiers.traits import KINDS
from tests.world.verifiers import LOSSLESS, LOSSY, verifier


def test_the_default_drafter_of_a_target_alone_is_suffix():
    config = LlamaConfig(
        vocab_size=50, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    engine = outrider.load(LlamaForCausalLM(config))
    assert catalog.name_of(engine.parts.drafter) == "suffix"
    greedy = outrider.Sampling(temperature=0)
    [output] = engine.generate([[1, 2, 3]], max_new_tokens=5, sampling=greedy, ignore_eos=True)
    assert len(output.tokens) == 5


def test_the_embedded_pair_drafts_with_its_own_model():
    assert catalog.name_of(outrider.load().parts.drafter) == "model"


def test_objects_and_names_make_the_same_parts():
    by_name = outrider.load(drafter="ngram:prompt_lookup_max=3", length="fixed:2").parts
    by_object = outrider.load(drafter=NgramDrafter(prompt_lookup_max=3), length="fixed:num_speculative_tokens=2").parts
    assert (by_name.drafter, by_name.length) == (by_object.drafter, by_object.length)


@dataclass(frozen=True, kw_only=True)
class Branching(ChainTree):
    """Declares chosen children, whatever it grows."""

    @property
    def structure(self):
        return "deterministic"


def test_a_chain_verifier_on_a_branching_tree_is_refused_with_one_that_works():
    with pytest.raises(InputError, match=r"verifier 'block' does not keep .* on a chosen tree; use verifier 'match'"):
        outrider.load(tree=Branching(), verifier="block")


def test_every_cell_of_the_matrix_is_lossless_or_names_a_verifier_that_is():
    for name in LOSSLESS:
        for structure in ("chain", *KINDS):
            for rows in ("sampled", "point"):
                reason = refusal(Cell(rows=rows, structure=structure, verifier=verifier(name)))
                assert reason is None or "'match'" in reason or "tree 'chain'" in reason


def test_every_verifier_of_the_catalog_is_in_the_matrix():
    known = catalog.rows("verifier")
    assert set(LOSSLESS) == {name for name, row in known.items() if row.guarantee == "exact law"}
    assert set(LOSSY) == {name for name, row in known.items() if row.guarantee == "lossy"}
    assert all(make.kinds for make in (LOSSLESS | LOSSY).values())


def test_a_padded_vocabulary_of_the_same_tokenizer_is_cut(tmp_path):
    own = outrider.load(drafter="none")
    config = LlamaConfig(
        vocab_size=8192 + 64, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(tmp_path)
    own.tokenizer.save_pretrained(tmp_path)
    padded = outrider.load(drafter=f"model:path={tmp_path}")
    greedy = outrider.Sampling(temperature=0.0, seed=0)
    outputs = [e.generate(["Once upon a time"], max_new_tokens=12, sampling=greedy)[0].tokens for e in (own, padded)]
    assert outputs[0] == outputs[1]


def test_a_cache_that_cannot_fit_is_refused_before_it_is_taken():
    with pytest.raises(InputError, match="lower max_slots or max_context"):
        outrider.load(drafter="none", max_slots=10_000_000, max_context=1024)


MUSIC = MusicgenConfig(text_encoder=T5Config(), audio_encoder=EncodecConfig(), decoder=MusicgenDecoderConfig())


@pytest.mark.parametrize(("config", "reason"), [(MUSIC, "encoder-decoder model"), (ReformerConfig(), "takes no cache")])
def test_a_model_over_which_transformers_stumbles_is_refused_with_the_reason(config, reason, tmp_path):
    config.save_pretrained(tmp_path)
    save_file({"unknown": torch.zeros(1)}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(InputError, match=f"cannot load a causal LM from .*: .*{reason}"):
        outrider.load(tmp_path)


def tiny_llama() -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=50, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    return LlamaForCausalLM(config)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"draftr": "ngram"}, "unknown option 'draftr'; did you mean 'drafter'? Available: target, drafter, tree"),
        ({"max_slots": "8"}, "max_slots must be a whole number, got '8'"),
        ({"target": 5}, "target must be a directory, a GGUF file, a hub id or a transformers model, got 5"),
        (
            {"target": torch.nn.Linear(1, 1)},
            "target must be a directory, a GGUF file, a hub id or a transformers model, got a Linear",
        ),
        ({"tree": 5}, "tree must be a name of the catalog or a part of that family, got 5"),
        ({"drafter": ChainTree()}, "drafter must be a name of the catalog or a part of that family, got ChainTree()"),
        ({"decoding": "pearl:3", "length": "fixed:3"}, "both length and pearl's num_speculative_tokens say how long"),
        ({"length": "tetris:criterion=original"}, "length 'tetris' is lossy: it drops drawn tokens because"),
    ],
    ids=str,
)
def test_options_that_do_not_fit_are_named(options, sentence):
    with pytest.raises(InputError) as refused:
        outrider.load(**options)
    assert sentence in str(refused.value)


def test_a_loaded_target_takes_no_options_of_loading():
    given = {"dtype": "float32", "device": "cpu", "revision": "main"}
    with pytest.raises(InputError, match="the target is loaded already; leave out device, dtype, revision, or name"):
        outrider.load(tiny_llama(), **given)


def test_the_arguments_of_load_are_the_options_of_a_setup():
    assert list(inspect.signature(outrider.load).parameters) == [field.name for field in fields(Setup)]


def test_an_engine_is_what_its_setup_says(tmp_path):
    tiny_llama().save_pretrained(tmp_path)
    options = {"drafter": "ngram", "length": "heuristic", "max_slots": 3, "max_context": 40, "max_prefill_tokens": 7}
    options |= {"vocab_size": 48, "pad_to": 2, "dtype": "float64"}
    engine = outrider.load(tmp_path, **options)
    assert [catalog.name_of(part) for part in (engine.parts.drafter, engine.parts.length)] == ["ngram", "heuristic"]
    assert (engine.max_slots, engine.max_prefill_tokens) == (3, 7)
    target = engine.parts.target
    assert (target.max_slots, target.max_context, target.vocab_size, target.pad_to) == (3, 40, 48, 2)
    assert target.dtype == torch.float64


def test_reproducible_outputs_take_coupled_draws_and_a_seed():
    busy = outrider.load(reproducible=True)
    assert catalog.name_of(busy.parts.verifier) == "coupled"
    with pytest.raises(InputError, match="above temperature 0 needs a seed; give one with --seed"):
        busy.generate(["Once"], max_new_tokens=2, sampling=outrider.Sampling())
    [greedy] = busy.generate(["Once"], max_new_tokens=2, sampling=outrider.Sampling(temperature=0.0))
    seeded = outrider.Sampling(seed=3)
    drafted, plain = (e.generate(["Once upon"], max_new_tokens=12, sampling=seeded)[0] for e in (busy, busy.plain()))
    assert len(greedy.tokens) == 2
    assert drafted.tokens == plain.tokens
    assert drafted.num_draft_tokens > 0


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"verifier": "block"}, "need verifier 'coupled', got 'block', whose draws depend on what is drafted"),
        ({"decoding": "pearl:2"}, "verifier 'coupled' counts the positions of draft tokens from the newest judged one"),
    ],
)
def test_what_cannot_be_reproducible_is_refused(options, sentence):
    with pytest.raises(InputError, match=re.escape(sentence)):
        outrider.load(reproducible=True, **options)
