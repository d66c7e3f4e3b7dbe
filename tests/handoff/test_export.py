"""A drafter that is exported is read back with the same logits, and its folder says all that an engine needs."""

import json
import re
import shutil
import sys
import threading
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedModel

import outrider
from outrider import catalog
from outrider.core.types import InputError
from outrider.drafters.exports import ENGINES
from outrider.drafters.traits import exports_of
from outrider.embedded import EMBEDDED_DRAFT, EMBEDDED_TARGET
from outrider.handoff import smoke
from outrider.handoff.checks import check, openvino
from outrider.handoff.checks import llama as llama_check
from outrider.handoff.checks import transformers as transformers_check
from outrider.handoff.export import LAUNCH, export
from outrider.handoff.order import ExportRequest
from outrider.handoff.source import as_folder
from outrider.heads.parts.block_config import AttentionSpan, CheckpointHints
from outrider.heads.spec import HeadSpec
from outrider.heads.trunks.blocks import BlockHead
from outrider.lm.hf.checkpoint import TargetShape
from outrider.lm.hf.open import open_model
from outrider.lm.model import LanguageModel
from outrider.lm.target_info import TargetInfo
from tests.cli.runs import done, run
from tests.world.block_heads import block_head
from tests.world.forced import forced_guesses
from tests.world.full_disk import small_files
from tests.world.gguf_files import write_gguf
from tests.world.heads import CHECKPOINTS
from tests.world.learners import head_learner, moved
from tests.world.models import llama
from tests.world.own_heads import peagle
from tests.world.published import hydra
from tests.world.zoo import VOCAB, scrambled

DEPTH = 3
TEXT = [7, 3, 11, 5, 2, 9, 14, 6, 8]
DRAFTERS = {name: row.kind for name, row in catalog.rows("drafter").items()}
HEADS = {name: kind for name, kind in DRAFTERS.items() if isinstance(kind, HeadSpec)}
PAIRS = [(name, engine) for name, kind in HEADS.items() for engine in kind.exports.engines if name != "assistant"]
"""The heads of the catalog and the engines that read them. An assistant belongs to a target of its own."""
OPTIONS = {
    "dflash": {"block_size": 4, "layers": 2},
    "dflash2": {"block_size": 4, "layers": 2},
    "dflare": {"block_size": 4, "layers": 2},
    "dspark": {"block_size": 4, "layers": 2, "markov_rank": 6},
}
NO_PATH = re.compile(r"(?<![\w$])/(?:tmp|work|home|root|var)\b")


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Path:
    """A tiny target on disk, deep enough for every layout."""
    place = tmp_path_factory.mktemp("models") / "target"
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
    )
    scrambled(LlamaForCausalLM(config)).float().save_pretrained(place)
    return place


@pytest.fixture(scope="module")
def model(target) -> PreTrainedModel:
    return open_model(str(target), device="cpu")


@pytest.fixture(scope="module")
def heads(model, tmp_path_factory):
    """Makes the folder of a head as training leaves it; the weights are always the same."""
    place = tmp_path_factory.mktemp("heads")

    def made(name: str) -> Path:
        folder = place / name
        if folder.exists():
            return folder
        folder.mkdir()
        around = TargetInfo.of(LanguageModel(model, max_slots=1), None)
        if name == "parallel":
            peagle(folder, around, tokens=DEPTH)
        elif name == "hydra":
            # A prefix layer would need the target's config, whose place is not known there.
            hydra(folder, around, prefix=False)
        elif HEADS[name].options is None:
            CHECKPOINTS[name](folder, around)
        else:
            moved(head_learner(name, model, depth=DEPTH, **OPTIONS.get(name, {}))).write(folder)
        (folder / "training").mkdir()
        (folder / "training" / "log.jsonl").write_text("{}\n")
        return folder

    return made


def guesses(path: str, model: PreTrainedModel) -> dict[tuple[int, int], torch.Tensor]:
    """What Outrider guesses with a head that it reads."""
    lm = LanguageModel(model, max_slots=2)
    drafter = catalog.make("drafter", path).bind(TargetInfo.of(lm, None))
    for module in drafter.modules.values():
        for weight in module.parameters():
            # Products round by where a weight lies in memory, and files differ in that. Copies all lie alike.
            weight.data = weight.data.clone()
    return forced_guesses(drafter, lm, TEXT, 4, DEPTH)


def ordered(to: str, target: Path, drafter: str, out: Path, **more) -> ExportRequest:
    return ExportRequest(
        to=to, target=str(target), drafter=drafter, out=out, **{"measure": False, "device": "cpu"} | more
    )


def exported(head: BlockHead, engine: str) -> dict[str, object]:
    """The config of a head for an engine."""
    shape = TargetShape(num_layers=8, hidden_size=32, vocab_size=VOCAB, taps=head.config.taps)
    return head.exported(engine, shape, torch.float32, "org/target")[0]


def texts_in(folder: Path) -> dict[str, str]:
    """The files of a folder that hold text."""
    return {
        each.relative_to(folder).as_posix(): each.read_text(encoding="utf-8")
        for each in folder.rglob("*")
        if each.is_file() and each.suffix not in (".safetensors", ".pyc")
    }


@pytest.mark.parametrize("name, engine", PAIRS)
def test_an_exported_head_is_read_back_with_equal_logits(name, engine, target, model, heads, tmp_path):
    source, out = heads(name), tmp_path / "out"
    export(ordered(engine, target, f"{name}:path={source}", out, verifier_id="org/target"))
    here, back = guesses(f"{name}:path={source}", model), guesses(str(out), model)
    assert here.keys() == back.keys() != set()
    # Of specialists, other engines run the first alone; here it guesses the first token of a draft.
    alone = name == "poss" and engine != "transformers"
    assert [p for p, row in here.items() if not torch.equal(row, back[p]) and not (alone and p[1])] == []
    assert [each.name for each in out.rglob("*") if each.suffix in (".safetensors", ".bin", ".pt")] == [
        "model.safetensors"
    ]
    assert not (out / "training").exists()
    assert {name for name, text in texts_in(out).items() if NO_PATH.search(text)} == set()
    assert str(target) not in "".join(texts_in(out).values())


@pytest.mark.parametrize("engine", ENGINES)
def test_an_exported_draft_model_has_the_same_logits_and_one_file(engine, target, model, tmp_path):
    draft, out = tmp_path / "draft", tmp_path / "out"
    llama(num_layers=1).float().save_pretrained(draft, max_shard_size="20KB")
    assert len(list(draft.glob("*.safetensors"))) > 1
    export(ordered(engine, target, f"model:path={draft}", out, num_speculative_tokens=4))
    here, back = guesses(f"model:path={draft}", model), guesses(f"model:path={out}", model)
    assert all(torch.equal(row, back[place]) for place, row in here.items())
    assert [each.name for each in out.rglob("*.safetensors")] == ["model.safetensors"]
    assert {name for name, text in texts_in(out).items() if NO_PATH.search(text)} == set()
    config = json.loads((out / "config.json").read_text())
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"]
    if engine == "transformers":
        generation = json.loads((out / "generation_config.json").read_text())
        assert (generation["num_assistant_tokens"], generation["num_assistant_tokens_schedule"]) == (4, "constant")


@pytest.mark.parametrize("name", [name for name, kind in HEADS.items() if kind.options and kind.exports.vllm])
def test_a_dry_run_writes_the_layout_of_a_trained_head(name, target, heads, tmp_path):
    if name == "parallel":
        with pytest.raises(InputError, match="outrider train eagle3"):
            export(ordered("vllm", target, name, tmp_path / "out", dry_run=True))
        return
    options = ",".join(f"{key}={value}" for key, value in OPTIONS.get(name, {}).items())
    order = {"dry_run": True, "num_speculative_tokens": DEPTH}
    export(ordered("vllm", target, f"{name}:{options}", tmp_path / "dry", **order))
    trained = tmp_path / "trained"
    export(ordered("vllm", target, f"{name}:path={heads(name)}", trained, num_speculative_tokens=DEPTH))
    dry, real = (load_file(place / "model.safetensors") for place in (tmp_path / "dry", trained))
    assert {key: each.shape for key, each in dry.items()} == {key: each.shape for key, each in real.items()}
    assert json.loads((tmp_path / "dry" / "config.json").read_text()) == json.loads(
        (trained / "config.json").read_text()
    )


def test_a_dry_run_of_a_draft_model_is_a_smaller_target(target, tmp_path):
    export(ordered("vllm", target, "model", tmp_path / "out", dry_run=True))
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["num_hidden_layers"], config["vocab_size"], config["architectures"]) == (
        2,
        VOCAB,
        ["LlamaForCausalLM"],
    )


@pytest.mark.parametrize(
    "name, engine, nearest",
    [
        ("griffin", "vllm", "eagle"),
        ("jakiro", "sglang", "eagle"),
        ("poss", "llama.cpp", "eagle3"),
        ("domino", "vllm", "dspark"),
        ("xpress", "vllm", "dspark"),
        ("dflash2", "sglang", "dflash"),
        ("jetspec", "sglang", "dflash"),
        ("hydra", "vllm", "medusa"),
        ("hydra", "llama.cpp", "eagle3"),
        ("dflare", "vllm", "dflash"),
        ("dflash", "openvino", "eagle3"),
        ("blockwise", "vllm", "medusa"),
        ("steered", "vllm", "distill"),
        ("medusa", "openvino", "eagle3"),
    ],
)
def test_what_an_engine_cannot_load_is_refused_with_the_nearest_that_it_can(name, engine, nearest, target, tmp_path):
    assert exports_of(DRAFTERS[name]).method(engine) is None
    with pytest.raises(InputError, match=rf"{engine} cannot load .*'{name}'.*`outrider train {nearest} --target"):
        export(ordered(engine, target, f"{name}:path=nowhere", tmp_path / "out"))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["eagle3", "model"])
def test_a_place_that_is_none_is_told_before_the_target_is_read(name, tmp_path):
    # The target is nowhere either.
    with pytest.raises(InputError, match=r"there is no directory .*drafter"):
        export(ordered("vllm", tmp_path / "target", f"{name}:path={tmp_path / 'drafter'}", tmp_path / "out"))


@pytest.mark.parametrize(("trunk", "engine", "method"), [("eagle", "vllm", "eagle"), ("eagle3", "sglang", "EAGLE3")])
def test_the_first_specialist_is_exported_as_the_head_that_it_is(trunk, engine, method, model, target, tmp_path):
    source = tmp_path / "poss"
    moved(head_learner("poss", model, depth=DEPTH, trunk=trunk, unrolled=4, stride=2)).write(source)
    found = export(ordered(engine, target, f"poss:path={source}", tmp_path / "out"))
    assert (found.drafter.method, found.drafter.length) == (method, 2)
    assert any(
        "runs the first of 2 specialists alone" in line and "learnt 2 draft steps" in line for line in found.losses
    )
    assert catalog.name_of(catalog.make("drafter", str(tmp_path / "out"))) == trunk
    here, back = guesses(f"poss:path={source}", model), guesses(str(tmp_path / "out"), model)
    same = {number for (_, number), row in here.items() if torch.equal(row, back[_, number])}
    assert {number for _, number in here} - same == {2}
    longer = export(ordered(engine, target, f"poss:path={source}", tmp_path / "longer", num_speculative_tokens=4))
    assert longer.drafter.length == 4


def test_a_dflash_2_head_has_the_names_and_keys_that_vllm_reads(heads, target, tmp_path):
    """As in vLLM 0.32: qwen3_dflash2.py reads them, and its architecture chooses the speculator with the selector."""
    found = export(ordered("vllm", target, f"dflash2:path={heads('dflash2')}", tmp_path / "out"))
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    inner = config["dflash_config"]
    assert (found.drafter.method, config["architectures"], config["model_type"]) == (
        "dflash",
        ["DFlash2DraftModel"],
        "qwen3",
    )
    assert {"conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k"} <= inner.keys()
    assert (config["is_causal"], inner["causal"]) == (False, False)
    names = load_file(tmp_path / "out" / "model.safetensors").keys()
    parts = ("base_kernel", "kernel_projection.weight")
    own = {f"layers.{i}.{conv}.{part}" for i in range(2) for conv in ("attention_conv", "mlp_conv") for part in parts}
    codes = ("predecessor_codebook", "successor_codebook", "hidden_projection.weight")
    assert own | {f"candidate_selector.{code}" for code in codes} <= names
    assert any("needs vLLM's newer model runner" in line for line in found.losses)


def test_blocks_whose_anchor_guesses_are_refused_where_vllm_would_read_them_otherwise(model):
    head = head_learner("dspark", model, depth=DEPTH, **OPTIONS["dspark"]).head
    assert head.config.from_anchor
    assert exported(head, "vllm")["sample_from_anchor"] is True
    around = TargetInfo.of(LanguageModel(model, max_slots=1), None)
    with pytest.raises(InputError, match="the anchor's position does; train one: outrider train dflash"):
        exported(block_head("dflash", around, from_anchor=True), "vllm")


def test_every_kind_has_a_way_or_a_nearest_one():
    for name, kind in DRAFTERS.items():
        exports = exports_of(kind)
        assert exports.engines or name == "none"
        assert exports.instead is None or exports.instead in DRAFTERS


def test_sequential_heads_that_no_engine_has_are_refused(model, target, tmp_path):
    head = head_learner("dspark", model, depth=DEPTH, markov="rnn", **OPTIONS["dspark"]).head
    with pytest.raises(InputError, match="outrider train dspark --markov vanilla"):
        exported(head, "vllm")
    assert exported(head, "sglang")["markov_head_type"] == "rnn"


@pytest.mark.parametrize(
    "sights, keys",
    [
        ((), None),
        ((AttentionSpan(window=5), AttentionSpan()), None),
        ((AttentionSpan(window=5, causal=True), AttentionSpan()), (None, None)),
        ((AttentionSpan(causal=True), AttentionSpan(causal=True)), (True, True)),
        ((AttentionSpan(window=5, causal=True), AttentionSpan(window=5, causal=True)), (True, True)),
    ],
)
def test_what_a_block_sees_is_said_so_that_vllm_reads_the_same(sights, keys, model):
    """Without keys the layout is that of speculators, whose one key would make all layers causal."""
    around = TargetInfo.of(LanguageModel(model, max_slots=1), None)
    head = block_head("dflash", around)
    config = head.config
    for layer, sight in enumerate(sights):
        config.layers.layer_types = [*(config.layers.layer_types or ["full_attention"] * 2)]
        config.layers.layer_types[layer] = "full_attention" if sight.window is None else "sliding_attention"
        config.layers.sliding_window = sight.window or config.layers.sliding_window
    head.config = replace(config, sights=sights)
    written = exported(head, "vllm")
    assert head.read_config(written, "there", CheckpointHints()).sights == sights
    if keys is None:
        assert written["sliding_window_non_causal"] is True
        return
    assert "speculators_config" not in written
    assert (written.get("is_causal"), written["dflash_config"].get("causal")) == keys
    assert written["dflash_config"]["target_layer_ids"] == [tap - 1 for tap in config.taps]
    assert written["sample_from_anchor"] is False


def test_the_launch_of_vllm_says_every_key(target, heads, tmp_path):
    found = export(ordered("vllm", target, f"eagle3:path={heads('eagle3')}", tmp_path / "out"))
    script = (tmp_path / "out" / LAUNCH).read_text()
    config = json.loads(re.search(r"<<JSON\n(.*)\nJSON", script)[1])
    assert config == {
        "method": "eagle3",
        "model": "$HERE",
        "num_speculative_tokens": 5,
        "rejection_sample_method": "standard",
        "draft_sample_method": "probabilistic",
    }
    assert ': "${TARGET:?' in script
    assert any("rejection_sample_method" in line for line in found.losses)


def test_layers_of_the_target_itself_need_no_files(target, tmp_path):
    found = export(ordered("vllm", target, "mtp", tmp_path / "out", num_speculative_tokens=2))
    assert list((tmp_path / "out").glob("*.safetensors")) == []
    config = json.loads(re.search(r"<<JSON\n(.*)\nJSON", "\n".join(found.command))[1])
    assert (config["method"], config["num_speculative_tokens"], "model" in config) == ("mtp", 2, False)
    with pytest.raises(InputError, match="takes mtp from the target's own checkpoint"):
        export(ordered("vllm", target, f"mtp:path={target}", tmp_path / "no"))


def test_a_plan_gives_lengths_by_batch_size_and_the_price_of_a_chain(target, heads, tmp_path):
    drafter = f"eagle3:path={heads('eagle3')}"

    def way(name: str, tokens: float, speed: float, **options) -> dict:
        return {"name": name, "block_efficiency": {"value": tokens}, "speedup": {"value": speed}, **options}

    tree = way("a tree", 3.5, 2.0, drafter=drafter, tree="gumbel:2x2", verifier="recursive", length="fixed:2")
    own = {"drafter": drafter, "tree": "chain", "length": "fixed:4"}
    chains = [way("blocks", 2.7, 1.5, verifier="block", **own), way("tokens", 2.5, 1.5, verifier="token", **own)]
    plain = way("plain", 1.0, 1.0, drafter="none")
    plans = [
        {"requests": 1, "predictions": [tree, *chains, plain]},
        {"requests": 8, "predictions": [plain, tree, *chains]},
    ]
    (tmp_path / "plan.json").write_text(json.dumps({"plans": plans}))
    found = export(ordered("vllm", target, drafter, tmp_path / "out", plan=tmp_path / "plan.json"))
    config = json.loads(re.search(r"<<JSON\n(.*)\nJSON", (tmp_path / "out" / LAUNCH).read_text())[1])
    assert config["num_speculative_tokens_per_batch_size"] == [[1, 7, 4], [8, 8, 0]]
    assert config["num_speculative_tokens"] == 4
    told = " ".join(found.losses)
    assert "2.70 tokens per step instead of 3.50" in told
    assert "2.50 tokens per step instead of 2.70" in told
    (tmp_path / "other.json").write_text("[]")
    with pytest.raises(InputError, match="is no plan; give what `outrider plan --json` printed"):
        export(ordered("vllm", target, drafter, tmp_path / "no", plan=tmp_path / "other.json"))


@pytest.fixture(scope="module")
def measured(target, heads, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("measured") / "out"
    order = ordered("vllm", target, f"medusa:path={heads('medusa')}", out, measure=True, prompts=2, new_tokens=8)
    export(order)
    return out


def test_the_smoke_test_passes_what_outrider_says_and_fails_other_tokens(measured, capsys):
    expected = json.loads((measured / smoke.EXPECTED).read_text())
    assert expected["tokens_per_step"] == expected["verified_tokens"] / expected["steps"] >= 1
    assert expected["verified_tokens"] == 2 * 7
    right = {"tokens": expected["tokens"], "steps": expected["steps"]}
    assert check.judged(expected, right)[1]
    assert not check.judged(expected, {**right, "steps": 2 * expected["steps"]})[1]
    other = [[*expected["tokens"][0][:-1], 99], expected["tokens"][1]]
    lines, good = check.judged(expected, {**right, "tokens": other})
    assert (good, lines[1]) == (False, f"output 0 differs at token 7: [99], not [{expected['tokens'][0][7]}]")
    assert check.judged({**expected, "dtype": "bfloat16"}, {**right, "tokens": other})[1]


def test_a_drafter_of_hidden_states_is_compared_from_the_step_behind_the_prompt_on(
    target, heads, tmp_path, monkeypatch
):
    """Its first step has no draft, and emits what the other engine emits with the prompt."""
    asked: list[list[list[int]]] = []
    generate = outrider.Engine.generate

    def noted(self, prompts, **more):
        asked.append([list(prompt) for prompt in prompts])
        return generate(self, prompts, **more)

    monkeypatch.setattr(outrider.Engine, "generate", noted)
    llama(num_layers=1).float().save_pretrained(tmp_path / "draft")
    found = {}
    for name, path in (("eagle", heads("eagle")), ("model", tmp_path / "draft")):
        asked.clear()
        order = {"measure": True, "prompts": 2, "new_tokens": 8, "num_speculative_tokens": DEPTH}
        export(ordered("vllm", target, f"{name}:path={path}", tmp_path / name, **order))
        found[name] = json.loads((tmp_path / name / smoke.EXPECTED).read_text())
        assert found[name]["verified_tokens"] == 2 * 7
        plain, drafted = asked[:2]
        first = 0 if name == "eagle" else 1
        assert [len(prompt) for prompt in drafted] == [len(prompt) + first for prompt in plain]
    assert 2 <= found["eagle"]["steps"] <= 14


def test_the_smoke_test_runs_where_outrider_is_not_installed(measured, tmp_path):
    """The engine is a fake: it says what is expected."""
    place = tmp_path / "export"
    shutil.copytree(measured, place)
    fake = "def decode(expected, target, url):\n    return {'tokens': expected['tokens'], 'steps': expected['steps']}\n"
    (place / smoke.ENGINE).write_text(fake)
    done = smoke.run_check(place, Path(sys.executable), ["--target", "there"])
    assert (done.returncode, "2 of 2 outputs" in done.stdout) == (0, True), done.stdout
    (place / smoke.ENGINE).write_text(fake.replace("expected['steps']}", "expected['steps'] * 2}"))
    assert smoke.run_check(place, Path(sys.executable), ["--target", "there"]).returncode == 1


@pytest.mark.parametrize(
    "options, said",
    [
        (("--to", "vlm"), "unknown engine 'vlm'; did you mean 'vllm'?"),
        ((), "give --to"),
        (("--to", "vllm", "--drafter", "eagle3:path=nowhere"), "nowhere"),
        (("--to", "vllm", "--drafter", "eagle3"), "needs path"),
        (("--to", "vllm", "--drafter", "suffix", "--dry-run"), "no weights of its own"),
        (("--to", "vllm", "--drafter", "egle", "--dry-run"), "did you mean 'eagle'"),
        (("--to", "vllm", "--drafter", "medusa", "--dry-run", "--check"), "give its Python with --vllm-python"),
        (("--to", "sglang", "--drafter", "eagle3", "--vllm-python", "python"), "--vllm-python goes with --to vllm"),
        (("--to", "openvino", "--drafter", "eagle3", "--check"), "give its Python with --engine-python"),
        (("--to", "vllm", "--drafter", "suffix", "--no-measure", "--check-url", "x"), "leave out --no-measure"),
        (("--to", "vllm", "--drafter", "medusa", "--dry-run", "--verifier-id", "/models/x"), "a public name"),
    ],
)
def test_wrong_input_gets_a_sentence_and_leaves_nothing(options, said, target, tmp_path, monkeypatch, capsys):
    out = tmp_path / "out"
    own = () if "--drafter" not in options else ("--target", str(target))
    status, _, err = run(monkeypatch, capsys, "export", *options, "--out", str(out), *own)
    assert (status, said in " ".join(err.split())) == (2, True), err
    assert list(tmp_path.iterdir()) == []


def test_the_command_prints_for_people_and_for_programs(target, tmp_path, monkeypatch, capsys):
    order = ("--target", str(target), "--drafter", "eagle", "--dry-run", "--no-measure", "--verifier-id", "org/target")
    status, out, _ = run(
        monkeypatch, capsys, "export", "--to", "sglang", *order, "--out", str(tmp_path / "one"), "--json"
    )
    found = json.loads(out)
    assert (status, found["method"], found["untrained"]) == (0, "EAGLE", True)
    assert "--speculative-algorithm EAGLE" in found["launch"][-1]
    out = done(monkeypatch, capsys, "export", "--to", "vllm", *order, "--out", str(tmp_path / "two"))
    assert "with weights drawn at random" in out
    assert 'TARGET="${TARGET:-org/target}"' in out
    assert "what is lost:" in out


def test_with_only_a_target_the_drafter_is_suffix_which_draws_nothing_and_does_not_branch(
    target, tmp_path, monkeypatch, capsys
):
    where = ("--target", str(target), "--out", str(tmp_path / "out"), "--no-measure", "--json")
    found = json.loads(done(monkeypatch, capsys, "export", "--to", "vllm", *where))
    assert (found["drafter"], found["method"]) == ("suffix", "suffix")
    told = " ".join(found["losses"])
    assert not any(line.startswith("_") for line in found["losses"])
    assert "drawn drafts" not in told
    assert "branch" not in told
    assert not (tmp_path / "out" / smoke.CHECK).exists()


@pytest.mark.parametrize("engine", ["openvino", "transformers"])
def test_what_starts_an_engine_without_a_server_answers_a_prompt(engine, target, tmp_path):
    llama(num_layers=1).float().save_pretrained(tmp_path / "draft")
    draft = f"model:path={tmp_path / 'draft'}"
    export(ordered(engine, target, draft, tmp_path / "out", verifier_id="org/target"))
    assert (tmp_path / "out" / LAUNCH).read_text().splitlines()[-1].startswith('exec python "$HERE/engine.py"')
    assert (tmp_path / "out" / smoke.ENGINE).is_file()
    page = (tmp_path / "out" / "README.md").read_text()
    assert "--prompt TEXT" in page
    assert {"openvino": "genai.LLMPipeline(", "transformers": "model.generate(**inputs"}[engine] in page


def test_the_check_in_transformers_reads_prompts_that_hold_the_pad_token(target, tmp_path):
    """Every prompt of a chat may hold it."""
    place, out = tmp_path / "target", tmp_path / "out"
    shutil.copytree(target, place)
    llama(num_layers=1).float().save_pretrained(tmp_path / "draft")
    order = ordered("transformers", place, f"model:path={tmp_path / 'draft'}", out, measure=True, prompts=2)
    export(replace(order, new_tokens=6))
    expected = json.loads((out / smoke.EXPECTED).read_text())
    pad = expected["prompts"][0][3]
    (place / "generation_config.json").write_text(json.dumps({"pad_token_id": pad, "eos_token_id": VOCAB - 1}))
    done = smoke.run_check(out, Path(sys.executable), ["--target", str(place)])
    assert (done.returncode, "2 of 2 outputs" in done.stdout) == (0, True), done.stdout


def test_outputs_are_compared_up_to_their_first_end_token(target, tmp_path):
    """llama.cpp says nothing behind one, and cannot be told to."""
    place = tmp_path / "target"
    shutil.copytree(target, place)
    llama(num_layers=1).float().save_pretrained(tmp_path / "draft")
    found = []
    for name, end in (("whole", VOCAB - 1), ("cut", None)):
        end = found[0]["tokens"][0][3] if end is None else end
        (place / "generation_config.json").write_text(json.dumps({"eos_token_id": end}))
        order = ordered("transformers", place, f"model:path={tmp_path / 'draft'}", tmp_path / name, measure=True)
        export(replace(order, prompts=2, new_tokens=6))
        found.append(json.loads((tmp_path / name / smoke.EXPECTED).read_text()))
    whole, cut = found
    assert cut["tokens"] == [ours[: [*ours, end].index(end) + 1] for ours in whole["tokens"]]
    assert len(cut["tokens"][0]) <= 4
    assert cut["verified_tokens"] == sum(map(len, cut["tokens"]))
    done = smoke.run_check(tmp_path / "cut", Path(sys.executable), ["--target", str(place)])
    assert (done.returncode, "2 of 2 outputs" in done.stdout) == (0, True), done.stdout


def test_llama_cpp_may_end_with_the_end_token_and_is_asked_for_no_more():
    asked = []

    class Server(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            tokens = [5, 6, 2][: asked[-1]["n_predict"]]
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps({"tokens": tokens, "timings": {"draft_n_accepted": 1}}).encode())

        def log_message(self, *args: object) -> None:
            pass

    expected = {"prompts": [[7], [8]], "tokens": [[5, 6, 2], [5, 6]], "verified_tokens": 3, "tokens_per_step": 3.0}
    with HTTPServer(("127.0.0.1", 0), Server) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        decoded = llama_check.decode(expected, "target", f"http://127.0.0.1:{server.server_port}")
        server.shutdown()
    assert [body["n_predict"] for body in asked] == [3, 2]
    assert not any(body.get("ignore_eos") for body in asked)
    assert decoded == {"tokens": expected["tokens"], "steps": 1}
    assert check.judged({**expected, "dtype": "float32"}, decoded)[1]


def test_an_exported_draft_model_has_a_tokenizer_that_older_versions_of_transformers_read(tmp_path):
    order = ordered("openvino", EMBEDDED_TARGET, f"model:path={EMBEDDED_DRAFT}", tmp_path / "out", verifier_id="org/t")
    export(order)
    found = json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())
    assert found["tokenizer_class"] != "TokenizersBackend"
    assert (tmp_path / "out" / "tokenizer.json").is_file()


@pytest.mark.parametrize("engine", ["vllm", "transformers"])
def test_a_gguf_target_is_checked_as_the_engine_takes_it(engine, tmp_path):
    model, tokenizer = llama().float(), AutoTokenizer.from_pretrained(EMBEDDED_TARGET)
    file = write_gguf(tmp_path / "target.gguf", model, tokenizer)
    (tmp_path / "room").mkdir()
    place = as_folder(str(file), engine, tmp_path / "room")
    if engine == "transformers":
        assert place == str(file)
        assert transformers_check.place(place)["gguf_file"] == "target.gguf"
    else:
        assert all(map(torch.equal, open_model(place).parameters(), open_model(str(file)).parameters()))
        assert AutoTokenizer.from_pretrained(place)("Once").input_ids == tokenizer("Once").input_ids


def test_openvino_gets_the_names_that_older_versions_of_transformers_read(target, tmp_path):
    place = tmp_path / "target"
    shutil.copytree(target, place)
    (place / "tokenizer_config.json").write_text('{"tokenizer_class": "TokenizersBackend"}')
    copy = Path(openvino.readable(str(place), tmp_path / "copy"))
    here, there = (json.loads((each / "config.json").read_text()) for each in (place, copy))
    assert there["rope_theta"] == here["rope_parameters"]["rope_theta"]
    assert json.loads((copy / "tokenizer_config.json").read_text())["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert load_file(copy / "model.safetensors").keys() == load_file(place / "model.safetensors").keys()


def test_openvino_gets_both_rotations_of_a_model_with_sliding_windows():
    kinds = {"full_attention": {"rope_theta": 1e6, "rope_type": "default"}, "sliding_attention": {"rope_theta": 1e4}}
    told = openvino.renamed("config.json", {"rope_parameters": kinds})
    assert (told["rope_theta"], told["rope_local_base_freq"], told["rope_scaling"]) == (1e6, 1e4, None)


def test_a_head_of_another_target_and_a_folder_in_use_are_refused(target, heads, tmp_path):
    narrow = tmp_path / "narrow"
    llama().float().save_pretrained(narrow)
    with pytest.raises(InputError, match="this target has 2 layers"):
        export(ordered("vllm", narrow, f"eagle3:path={heads('eagle3')}", tmp_path / "out"))
    assert not (tmp_path / "out").exists()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("mine")
    with pytest.raises(InputError, match="exists already"):
        export(ordered("vllm", target, f"eagle3:path={heads('eagle3')}", tmp_path / "full"))
    assert [each.name for each in (tmp_path / "full").iterdir()] == ["mine.txt"]


def test_a_full_disk_leaves_nothing(target, heads, tmp_path):
    source = heads("eagle3")
    with small_files(20_000), pytest.raises(InputError, match="out cannot be written: "):
        export(ordered("vllm", target, f"eagle3:path={source}", tmp_path / "out"))
    assert list(tmp_path.iterdir()) == []
