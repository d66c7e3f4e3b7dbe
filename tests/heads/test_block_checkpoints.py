"""Heads that guess blocks, read from every published layout: their guesses are those of a naive reference."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import PreTrainedModel

import outrider
from outrider import catalog
from outrider.core.types import Frontier, InputError, Running, Sampling
from outrider.decoding.protocol import Parts
from outrider.decoding.step import StepDecoding
from outrider.drafters.protocol import Drafter
from outrider.engine.engine import Engine
from outrider.heads.objective import HeadContext
from outrider.heads.parts.block_config import AttentionSpan, BlockConfig, CheckpointHints
from outrider.heads.trunks.blocks import BlockHead
from outrider.lengths.fixed import FixedLength
from outrider.lm.hf.checkpoint import Checkpoint
from outrider.lm.model import LanguageModel
from outrider.lm.slots.head_inputs import HeadInputs
from outrider.lm.target_info import TargetInfo
from tests.world.block_checkpoints import (
    BLOCK,
    HIDDEN,
    LAYER_CONFIG,
    MASK,
    authors,
    block_logits,
    checkpoints,
    guess_logits,
    markov,
    refinement,
    speculators,
    trunk,
)
from tests.world.block_heads import BLOCKS
from tests.world.zoo import VOCAB, tiny

pytestmark = pytest.mark.usefixtures("float64_stays_float64")
KINDS = tuple(checkpoints(VOCAB))
CAUSAL = ("jetspec", "jetspec-automodel")
"""Heads all of whose layers are causal."""
GREEDY = Sampling(temperature=0.0, seed=0)


@dataclass(frozen=True, kw_only=True)
class Recorded(Drafter):
    """Notes what a drafter guesses, by the text and by the draft tokens behind it."""

    inner: Drafter
    guesses: dict[tuple[tuple[int, ...], tuple[int, ...]], torch.Tensor] = field(default_factory=dict)
    drafted: dict[int, dict[int, tuple[int, ...]]] = field(default_factory=dict)

    def __getattribute__(self, name):
        ours = ("inner", "guesses", "drafted", "begin", "expand", "chain", "__class__", "__dict__")
        return object.__getattribute__(self, name) if name in ours else getattr(self.inner, name)

    def begin(self, states: Sequence[Running], depths: Sequence[int]):
        guess = self.inner.begin(states, depths)
        for state, row in zip(states, guess.logits, strict=True):
            self.guesses[tuple(state.tokens), ()] = row.clone()
            self.drafted[id(state)] = {0: ()}
        return guess

    def expand(self, states: Sequence[Running], frontier: Frontier):
        guess = self.inner.expand(states, frontier)
        for i, owner in enumerate(frontier.owners.tolist()):
            paths = self.drafted[id(states[owner])]
            path = (*paths[int(frontier.parents[i])], int(frontier.tokens[i]))
            paths[int(frontier.nodes[i])] = path
            self.guesses[tuple(states[owner].tokens), path] = guess.logits[i].clone()
        return guess

    def chain(self, states: Sequence[Running], counts: Sequence[int]):
        follow, left, paths = self.inner.chain(states, counts), list(counts), [() for _ in states]

        def step(tokens):
            logits = follow(tokens)
            alive = [i for i, count in enumerate(left) if count > 0]
            for i, token, row in zip(alive, tokens.tolist(), logits, strict=True):
                left[i], paths[i] = left[i] - 1, (*paths[i], token)
                self.guesses[tuple(states[i].tokens), paths[i]] = row.clone()
            return logits

        return step


def engine(drafter: Drafter, lm: LanguageModel, tree: str = "chain", verifier: str = "block") -> Engine:
    parts = Parts(
        target=lm,
        drafter=Recorded(inner=drafter),
        tree=catalog.make("tree", tree),
        verifier=catalog.make("verifier", verifier),
        length=FixedLength(num_speculative_tokens=BLOCK - 1),
        decoding=StepDecoding(),
    )
    return Engine(parts, max_slots=3)


def bound(place: str, lm: LanguageModel, **answers: object) -> Drafter:
    return catalog.rows("drafter")[kind_in(place)].build(path=place, **answers).bind(TargetInfo.of(lm, None))


def read(place: str, model: PreTrainedModel) -> BlockHead:
    """The head in a folder whose name begins with its kind."""
    spec = BLOCKS[kind_in(place)]
    return spec.head.load(Checkpoint(path=place), TargetInfo.of_model(model), spec.at(place))


def write(head: BlockHead, folder: Path, model: PreTrainedModel, dtype: torch.dtype | None = None) -> None:
    """Write a head as training does."""
    spec = BLOCKS[head.name]
    spec.objective(head, spec.options(), HeadContext(target=model, dtype=dtype)).write(folder)


def sizes_in(config: dict, **answers: object) -> BlockConfig:
    """The sizes in a config, read by the head that it is one of."""
    [spec] = [spec for spec in BLOCKS.values() if spec.published(config, ())]
    return spec.head.read_config(config, "here", CheckpointHints(**answers))


def kind_in(place: str) -> str:
    return Path(place).name.split("-")[0]


@pytest.mark.parametrize(("tree", "verifier"), [("chain", "block"), ("dynamic:width=2,num_nodes=6", "match")])
@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_of_each_layout_guesses_what_a_naive_reference_guesses(tmp_path, kind, tree, verifier):
    checkpoint, model = checkpoints(VOCAB)[kind], tiny("llama")
    lm = LanguageModel(model, max_slots=3)
    busy = engine(bound(checkpoint.save(tmp_path / kind), lm), lm, tree, verifier)
    dice = np.random.default_rng(0)
    busy.generate([dice.integers(3, VOCAB, size=n).tolist() for n in (4, 11)], max_new_tokens=6, sampling=GREEDY)
    guesses = busy.parts.drafter.guesses
    assert {len(drafted) for _, drafted in guesses} == set(range(BLOCK - 1))
    ends = model.get_input_embeddings().weight.detach(), model.get_output_embeddings().weight.detach()
    for (text, drafted), row in list(guesses.items())[::3]:
        with torch.no_grad():
            seen = model(torch.tensor([text[:-1]]), use_cache=False, output_hidden_states=True).hidden_states
        expected = guess_logits(checkpoint, tuple(each[0] for each in seen), text, drafted, *ends)
        assert torch.equal(row.isfinite(), expected.isfinite())
        difference = float((row - expected)[row.isfinite()].abs().max())
        # Rotary frequencies are made in float32.
        assert difference < 1e-6, (text, drafted, difference)


def test_passes_over_a_whole_block_settle_on_the_tokens_that_xpress_drafts_one_by_one(tmp_path):
    checkpoint, model = checkpoints(VOCAB)["xpress"], tiny("llama")
    lm, changed = LanguageModel(model, max_slots=3), 0
    busy = engine(bound(checkpoint.save(tmp_path / "xpress"), lm), lm)
    busy.generate([[5, 9, 3, 8], [7, 4, 4]], max_new_tokens=8, sampling=GREEDY)
    guesses = busy.parts.drafter.guesses
    ends = model.get_input_embeddings().weight.detach(), model.get_output_embeddings().weight.detach()
    for text in {text for text, _ in guesses}:
        with torch.no_grad():
            seen = model(torch.tensor([text[:-1]]), use_cache=False, output_hidden_states=True).hidden_states
        hidden, base = block_logits(checkpoint, tuple(each[0] for each in seen), text[-1], *ends)
        draft = first = base[1:].argmax(-1).tolist()
        for _ in range(BLOCK - 1):
            before = (*text[-2:], *draft)
            rows = [base[k] + refinement(checkpoint.tensors, hidden, before[: k + 1]) for k in range(1, BLOCK)]
            draft = [int(row.argmax()) for row in rows]
        drafted: tuple[int, ...] = ()
        while (text, drafted) in guesses:
            drafted = (*drafted, int(guesses[text, drafted].argmax()))
        assert drafted == tuple(draft[: len(drafted)])
        changed += draft[: len(drafted)] != first[: len(drafted)]
    assert changed


@pytest.mark.parametrize("kind", KINDS)
def test_a_head_that_is_written_and_read_again_is_the_same(tmp_path, kind):
    checkpoint, model = checkpoints(VOCAB)[kind], tiny("llama")
    head, folder = read(checkpoint.save(tmp_path / kind), model), tmp_path / "again" / kind
    write(head, folder, model)
    again = read(str(folder), model)
    assert replace(head.config, layers=again.config.layers) == again.config
    theirs = again.state_dict()
    assert head.state_dict().keys() == theirs.keys()
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in head.state_dict().items())
    assert {again.config.layers.rope_parameters["rope_theta"], LAYER_CONFIG["rope_theta"]} == {5000.0}


def test_a_head_that_was_trained_for_a_target_of_another_shape_is_refused(tmp_path):
    model = tiny("llama")
    write(read(checkpoints(VOCAB)["dflash"].save(tmp_path / "dflash"), model), tmp_path / "dflash", model)
    said = "trained for a target with 3 layers of width 32, and this target has 2 layers"
    with pytest.raises(InputError, match=said):
        bound(str(tmp_path / "dflash"), LanguageModel(tiny("qwen3"), max_slots=1))


def test_a_head_in_half_precision_keeps_its_frequencies_exact(monkeypatch, tmp_path):
    monkeypatch.undo()
    lm = LanguageModel(tiny("llama").to(torch.bfloat16), max_slots=1)
    drafter = bound(checkpoints(VOCAB)["dflash"].save(tmp_path / "dflash"), lm)
    wide = drafter.cast(replace(TargetInfo.of(lm, None), dtype=torch.float32))
    assert (drafter.lm.dtype, wide.lm.dtype) == (torch.bfloat16, torch.float32)
    far = torch.tensor([[100_000]])
    turned = [each.lm.module.rotary(torch.zeros(1, 1, 1), far) for each in (drafter, wide)]
    assert torch.equal(*turned)
    busy = engine(drafter, lm)
    [out] = busy.generate([[5, 6, 7]], max_new_tokens=6, sampling=GREEDY)
    assert out.num_draft_tokens > 0


def test_the_written_files_have_the_names_and_keys_that_vllm_reads(monkeypatch, tmp_path):
    monkeypatch.undo()
    model = tiny("llama")
    for kind in ("dflash", "dspark-rnn"):
        checkpoint = checkpoints(VOCAB)[kind]
        write(read(checkpoint.save(tmp_path / kind), model), tmp_path / "out", model, torch.bfloat16)
        tensors = load_file(tmp_path / "out" / "model.safetensors")
        assert tensors.keys() == checkpoint.tensors.keys()
        assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
        config = json.loads((tmp_path / "out" / "config.json").read_text())
        assert config["architectures"] == [BLOCKS[kind.split("-")[0]].head.speculators]
        assert config["torch_dtype"] == "bfloat16"
        assert config["sliding_window_non_causal"] is True
        if kind == "dspark-rnn":
            assert config["enable_confidence_head"]
            assert config["confidence_head_with_markov"]
        assert config["aux_hidden_state_layer_ids"] == [2, 1]
        assert config["transformer_layer_config"]["model_type"] == "qwen3"
        assert config["transformer_layer_config"]["vocab_size"] == VOCAB
        written = config["speculators_config"]
        assert written["proposal_methods"][0]["speculative_tokens"] == (BLOCK if kind == "dspark-rnn" else BLOCK - 1)
        assert written["verifier"]["architectures"] == ["LlamaForCausalLM"]


def refused(folder: Path, config: dict, tensors: dict | None = None, drafter: str = "dflash", **answers) -> str:
    """The sentence that a user reads."""
    checkpoint = replace(checkpoints(VOCAB)["dflash"], config=config)
    checkpoint.tensors = checkpoint.tensors if tensors is None else tensors
    place = checkpoint.save(folder / drafter)
    with pytest.raises(InputError) as error:
        bound(place, LanguageModel(tiny("llama"), max_slots=1), **answers)
    return str(error.value)


def test_what_a_file_leaves_open_is_asked_or_decided_by_the_rest_of_the_file(tmp_path):
    tensors = {**trunk(2, VOCAB), **markov("vanilla", VOCAB, VOCAB)}
    flat = authors("Qwen3DSparkModel", VOCAB, block_size=BLOCK, target_layer_ids=[0, 1], mask_token_id=MASK)
    flat["markov_rank"] = 6
    sentence = refused(tmp_path, flat, tensors, "dspark")
    assert "does not say whether the anchor's position" in sentence
    assert "sample_from_anchor=true or sample_from_anchor=false" in sentence
    lm = LanguageModel(tiny("llama"), max_slots=1)
    for answer in (True, False):
        assert bound(str(tmp_path / "dspark"), lm, sample_from_anchor=answer).from_anchor is answer
    for drafted, from_anchor in ((BLOCK, True), (BLOCK - 1, False)):
        config = speculators("dspark", VOCAB, markov_rank=6)
        config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] = drafted
        place = replace(checkpoints(VOCAB)["dspark-vanilla"], config=config).save(tmp_path / "dspark-decided")
        assert bound(place, lm).from_anchor is from_anchor
    config = speculators("dflash", VOCAB, mask_token_id=None)
    assert "say it with mask_token_id=..." in refused(tmp_path, config)
    assert bound(str(tmp_path / "dflash"), lm, mask_token_id=7).mask_id == 7


class Kept:
    """Keys and values of each layer, the context's first."""

    def __init__(self):
        self.layers = {}

    def update(self, keys, values, layer_idx):
        old = self.layers.get(layer_idx)
        if old is not None:
            keys, values = torch.cat([old[0], keys], 2), torch.cat([old[1], values], 2)
        self.layers[layer_idx] = keys, values
        return keys, values


@torch.no_grad()
def block_rows(head, size: int) -> torch.Tensor:
    """The rows of a block of some size behind a fixed context, without that of the anchor."""
    count, cache = 6, Kept()
    features = torch.randn(1, count, head.feature_size, generator=torch.Generator().manual_seed(1)).double()
    places = torch.arange(count + size)[None]
    before, sees = places[:, :count], torch.ones(1, 1, count, count, dtype=torch.bool)
    head(HeadInputs(tokens=before, features=features, positions=before, mask=sees, cache=cache))
    tokens = torch.tensor([[9] + [MASK] * (size - 1)])
    mask = torch.ones(1, 1, size, count + size, dtype=torch.bool)
    block = HeadInputs(tokens=tokens, features=None, positions=places[:, count:], mask=mask, cache=cache)
    return head(block)[0, 1:]


@pytest.mark.parametrize("kind", ["dflash-z-lab", "dflash-swa", "dspark-deepspec", *CAUSAL])
def test_the_rows_of_a_causal_head_alone_do_not_change_when_the_block_gets_shorter(tmp_path, kind):
    head = read(checkpoints(VOCAB)[kind].save(tmp_path / kind), tiny("llama"))
    long = block_rows(head, BLOCK)
    for size in range(2, BLOCK):
        short = block_rows(head, size)
        difference = float((long[: len(short)] - short).abs().max())
        assert (difference < 1e-12) == (kind in CAUSAL), (size, difference)


def test_a_file_that_leaves_open_whether_blocks_are_causal_is_refused_with_the_question(tmp_path):
    inner = {"mask_token_id": MASK, "target_layer_ids": [0, 1]}
    window = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "sliding_window": 5}
    layers = {**LAYER_CONFIG, "vocab_size": VOCAB}
    for config, says, causal in (
        (speculators("dflash", VOCAB, sliding_window_non_causal=False), "vLLM does not", [True] * 3),
        (speculators("dflash", VOCAB, transformer_layer_config=layers | window), "vLLM for true", [True, False, True]),
        (authors("DFlashDraftModel", VOCAB, {**inner, "causal": True}, is_causal=False), "says both", [True] * 3),
        (authors("DFlashDraftModel", VOCAB, {**inner, "causal_head": True, "causal": False}), "says both", [True] * 3),
        (authors("Qwen3DFlashDraftModel", VOCAB, {**inner, "causal": False}, is_causal=True), "says both", [True] * 3),
    ):
        with pytest.raises(InputError, match=f"{says}.*say causal=true"):
            sizes_in(config)
        for answer in (True, False):
            sights = sizes_in(config, causal=answer).sights or (AttentionSpan(),) * 3
            assert [sight.causal for sight in sights] == [answer and each for each in causal]
    place = checkpoints(VOCAB)["dflash"]
    place.config = speculators("dflash", VOCAB, sliding_window_non_causal=False)
    drafter = bound(place.save(tmp_path / "dflash"), LanguageModel(tiny("llama"), max_slots=1), causal=True)
    assert drafter.lm.module.config.sights == (AttentionSpan(causal=True),) * 3


def test_a_file_that_says_whether_blocks_are_causal_is_not_asked():
    inner = {"mask_token_id": MASK, "target_layer_ids": [0, 1]}
    for config, causal in (
        (authors("DFlashDraftModel", VOCAB, {**inner, "causal_head": True}, is_causal=False), True),
        (authors("DFlashDraftModel", VOCAB, {**inner, "causal_head": False}), False),
        (authors("Qwen3DFlashDraftModel", VOCAB, inner, is_causal=False), False),
        (authors("DFlashDraftModel", VOCAB, inner, is_causal=True), True),
        (authors("DFlashDraftModel", VOCAB, inner), False),
        (speculators("dflash", VOCAB, sliding_window_non_causal=True), False),
        (speculators("dflash", VOCAB), False),
    ):
        sights = sizes_in(config, causal=not causal).sights
        assert sights == ((AttentionSpan(causal=True),) * 3 if causal else ())


def flat(inner: dict, **outer: object) -> dict:
    """A config as its authors write it, which says all that must be said."""
    return authors("DFlashDraftModel", VOCAB, {"target_layer_ids": [0, 1], "mask_token_id": 0, **inner}, **outer)


WRONG = {
    "DFlash 2": (
        speculators("dflash", VOCAB, selector_rank=8),
        "has selector_rank, which is not known of dflash heads",
    ),
    "DFly": (authors("Qwen3DFlyModel", VOCAB, target_layer_ids=[0]), "is a DFly head, which is not supported"),
    "LiLiCorr": (
        authors("LiLiCorrDraftModel", VOCAB, {"target_layer_ids": [0], "lilicorr_enabled": True}),
        "is a LiLiCorr head, which is not supported",
    ),
    "unknown key": (flat({"gate_rank": 8}), "has gate_rank, which is not known of dflash heads"),
    "unknown projector": (
        flat({"projector_type": "mamba"}),
        "is no dflash head: its config names 'mamba'; give its path alone",
    ),
    "domino": (speculators("dflash", VOCAB, projector_type="domino"), "the projector 'domino'"),
    "xpress selector": (
        speculators("xpress", VOCAB, xpress_selector=True),
        "the convolutions or the selector of DFlash 2, which are not supported of xpress heads",
    ),
    "xpress trunk": (speculators("xpress", VOCAB, xpress_backbone="dflash2"), "the convolutions or the selector"),
    "xpress width": (
        speculators("xpress", VOCAB, xpress_rank=6, xpress_mlp_hidden=8),
        "xpress_mlp_hidden in config.json",
    ),
    "xpress passes": (speculators("xpress", VOCAB, num_jacobi_passes="all"), "num_jacobi_passes in config.json"),
    "other": ({"architectures": ["LlamaForCausalLM"]}, "is no dflash head: its config names 'LlamaForCausalLM'"),
    "kind": (speculators("dspark", VOCAB, sample_from_anchor=True, markov_rank=0), "markov_rank must be >= 1"),
    "gru": (
        speculators("dspark", VOCAB, sample_from_anchor=True, markov_rank=6, markov_head_type="gru"),
        "unknown sequential head 'gru'",
    ),
    "layers": (
        speculators("dflash", VOCAB, transformer_layer_config="qwen3"),
        "transformer_layer_config in config.json",
    ),
    "taps": (speculators("dflash", VOCAB, aux_hidden_state_layer_ids=[2, 9]), "reads the hidden states [2, 9]"),
    "no taps": (speculators("dflash", VOCAB, aux_hidden_state_layer_ids=None), "which layers of the target"),
    "normed": (flat({"target_layer_ids": [2, 0]}, num_target_layers=3), "before or after the final norm"),
    "width": (speculators("dflash", VOCAB, target_hidden_size=HIDDEN * 2), f"hidden states of width {HIDDEN * 2}"),
    "mask": (speculators("dflash", VOCAB, mask_token_id=VOCAB), "the mask token"),
    "window": (flat({}, layer_types=["sliding_attention"] * 3, sliding_window=None), "does not say how long it is"),
    "layer types": (flat({}, layer_types=["full_attention"] * 2), "layer"),
    "truth": (flat({"causal_head": "yes"}), "causal_head in config.json"),
    "sinks": (flat({"attention_sink_bias": True}), "attention sinks"),
    "swa": (flat({"use_swa": True}), "does not say how long it is"),
    "block": (speculators("dflash", VOCAB, block_size=1), "block_size in config.json of"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_config_that_does_not_fit_gets_one_sentence(tmp_path, case):
    config, message = WRONG[case]
    tensors = trunk(4, VOCAB) if case == "width" else None
    drafter = "dspark" if case in ("kind", "gru") else "xpress" if case.startswith("xpress") else "dflash"
    sentence = refused(tmp_path, config, tensors, drafter=drafter)
    assert message in sentence
    assert "\n" not in sentence


def test_a_head_that_the_layout_cannot_describe_is_not_written(tmp_path):
    model = tiny("llama")
    inner = {"mask_token_id": MASK, "target_layer_ids": [0, 1], "input_embedding_scale": 2.0}
    for kind, more in (("dflash", {}), ("jetspec", {"causal_head": True})):
        config = authors("DFlashDraftModel", VOCAB, {**inner, **more}, block_size=BLOCK)
        place = replace(checkpoints(VOCAB)["dflash"], config=config).save(tmp_path / kind)
        with pytest.raises(InputError, match="cannot be written"):
            write(read(place, model), tmp_path / "out", model)
    assert not (tmp_path / "out").exists()


def test_tensors_that_do_not_fit_get_one_sentence(tmp_path):
    config, whole, separate = speculators("dflash", VOCAB), trunk(2, VOCAB), trunk(2, VOCAB, separate=True)
    for tensors, sentence in (
        ({name: tensor for name, tensor in whole.items() if name != "fc.weight"}, "fc.weight is missing"),
        ({**whole, "more.weight": torch.ones(3)}, "more.weight is not part of such a head"),
        (trunk(3, VOCAB), "fc.weight is of another shape"),
        ({name: tensor for name, tensor in separate.items() if name != "d2t"}, "has no list (d2t)"),
        ({**separate, "d2t": separate["d2t"] + 1}, "d2t) of the head"),
    ):
        assert sentence in refused(tmp_path, config, tensors)
    whole["lm_head.weight"] = torch.randn(VOCAB + 3, HIDDEN).double()
    whole["d2t"] = torch.zeros(VOCAB + 3, dtype=torch.long)
    wide = replace(checkpoints(VOCAB)["dflash"], tensors=whole).save(tmp_path / "dflash-wide")
    assert bound(wide, LanguageModel(tiny("llama"), max_slots=1)).short_list is None
    small = speculators("dflash", VOCAB)
    small["transformer_layer_config"]["vocab_size"] = VOCAB - 1
    assert f"knows {VOCAB - 1} tokens, and this target has {VOCAB}" in refused(tmp_path, small)


def test_the_head_of_another_method_names_the_drafter_that_fits(tmp_path):
    checkpoint = checkpoints(VOCAB)["dflash"]
    checkpoint.save(tmp_path / "dflare")
    with pytest.raises(InputError, match="is no dflare head: its config names 'dflash'; give its path alone"):
        bound(str(tmp_path / "dflare"), LanguageModel(tiny("llama"), max_slots=1))


@pytest.mark.parametrize("kind", ["dflash", "dflare", "dspark-gated"])
def test_a_folder_is_loaded_by_its_name_on_the_command_line(tmp_path, kind):
    place = checkpoints(VOCAB)[kind].save(tmp_path / kind)
    busy = outrider.load(tiny("llama"), drafter=f"{kind.split('-')[0]}:path={place}", length="fixed:3")
    these = [[5, 6, 7], [9, 8, 7, 6, 5]]
    drafted = busy.generate(these, max_new_tokens=12, sampling=GREEDY)
    assert sum(out.num_draft_tokens for out in drafted) > 0
    plain = busy.plain().generate(these, max_new_tokens=12, sampling=GREEDY)
    assert [out.tokens for out in drafted] == [out.tokens for out in plain]
