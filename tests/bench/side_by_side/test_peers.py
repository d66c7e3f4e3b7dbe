"""Other engines take part where they are here, and say what the target says; others are left out with a sentence."""

import json
import re
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from huggingface_hub import constants
from transformers import AutoModelForCausalLM, AutoTokenizer

import outrider
from outrider import InputError, Sampling, Setup
from outrider.bench.engines.driver import EngineOutput
from outrider.bench.engines.engine import PeerEngine
from outrider.bench.engines.environments import Environment
from outrider.bench.side_by_side import peers
from outrider.bench.side_by_side.arrivals import ClosedLoop
from outrider.bench.side_by_side.page import findings, summary
from outrider.bench.side_by_side.peers import PeerOptions, Peers
from outrider.bench.side_by_side.player import Player
from outrider.bench.side_by_side.prompts import Encoder
from outrider.bench.side_by_side.session import BenchPlan, measure
from outrider.bench.side_by_side.ways import BatchWay, LeftOut
from outrider.bench.workloads.conversation import Conversation
from outrider.embedded import EMBEDDED_DRAFT, EMBEDDED_TARGET
from outrider.engine.generation import Generation
from tests.bench.engines import transformers_driver
from tests.bench.engines.recorded_server import wrapper
from tests.world.gguf_files import write_gguf

TOKENS = 5


@pytest.fixture(scope="module")
def engine():
    """The embedded draft model as a target."""
    return outrider.load(str(EMBEDDED_DRAFT), drafter="none", dtype="float32", max_slots=2)


@pytest.fixture
def some_of(engine, tmp_path):
    """The peers of a measurement with these options."""

    def made(**options) -> Peers:
        return Peers(
            options=PeerOptions(environments=tmp_path, **options),
            engine=engine,
            generation=Generation(max_new_tokens=TOKENS, sampling=Sampling(temperature=0), ignore_eos=True),
            greedy=[engine.encode("Once upon a time")],
            new_tokens=TOKENS,
            batch=2,
            threads=1,
        )

    return made


def scripted(*modes: str) -> PeerEngine:
    """A driver that answers as its mode says, and never as the target."""
    return PeerEngine(
        title="Scripted",
        modes=modes,
        command=lambda room: [sys.executable, "-m", "tests.bench.engines.scripted_driver"],
        environment=Environment(name="vllm", pins=(), make=lambda room: None),
    )


def test_an_engine_that_is_not_installed_is_left_out_with_a_sentence(some_of):
    with some_of(names=("vllm", "llama", "ik_llama", "openvino")) as made:
        assert made.ways() == []
    assert made.left_out == {
        "vLLM": "it is not installed; name a Python that has it with --vllm-python, or let `--make-environments` "
        "install it",
        "llama.cpp": "it is not installed; name its llama-server with --llama-server, or let `--make-environments` "
        "install it",
        "ik_llama.cpp": "it is not installed; name its llama-server with --ik-llama-server, or let "
        "`--make-environments` install it",
        "OpenVINO GenAI": "it is not installed; name a Python that has it with --openvino-python, or let "
        "`--make-environments` install it",
    }


def test_an_engine_that_says_something_else_or_does_not_start_is_left_out(some_of, monkeypatch):
    monkeypatch.setattr(peers, "OUTSIDE", {"vllm": scripted("plain", "does not start", "draft model")})
    with some_of(names=("vllm",), pythons={"vllm": Path(sys.executable)}) as made:
        assert made.ways() == []
    assert made.left_out["Scripted, plain"].startswith("it does not say what the target says: at temperature 0, token")
    assert made.left_out["Scripted, does not start"].endswith("RuntimeError: no such instruction")
    assert made.left_out["Scripted, draft model"] == "the setup has no draft model"


@pytest.mark.parametrize("way", ["does not start", "vllm:does not start"])
def test_ways_that_were_not_asked_for_are_not_started(some_of, monkeypatch, way):
    monkeypatch.setattr(peers, "OUTSIDE", {"vllm": scripted("plain", "does not start", "draft model")})
    with some_of(names=("vllm",), pythons={"vllm": Path(sys.executable)}, ways=(way,)) as made:
        assert made.ways() == []
    assert set(made.left_out) == {"Scripted, does not start"}


@pytest.mark.parametrize(
    ("names", "sentence"),
    [
        (("llama",), "unknown way of the peers 'lookup'. Available: plain, ngram-simple, draft model"),
        (("transformers",), "--peer-ways chooses among the ways of vllm, "),
    ],
)
def test_a_way_that_no_peer_has_is_told(some_of, names, sentence):
    with pytest.raises(InputError, match=re.escape(sentence)):
        some_of(names=names, ways=("lookup",))


def test_an_engine_that_rounds_the_weights_is_measured_as_another_model(some_of, monkeypatch):
    asked = []

    def convert(room, source, out, dtype):
        asked.append(dtype)
        out.mkdir()

    rounded = replace(scripted("plain"), weights="int4", convert=convert)
    monkeypatch.setattr(peers, "OUTSIDE", {"vllm": scripted("plain"), "vllm_int4": rounded})
    with some_of(names=("vllm_int4",), pythons={"vllm": Path(sys.executable)}) as made:
        made.new_tokens, made.generation = 40, Generation(max_new_tokens=40, sampling=Sampling(temperature=1))
        assert [way.name for way in made.ways()] == ["Scripted, plain"]
    assert made.passed["Scripted, plain"].startswith("1 greedy texts come from other weights than the target's, up to")
    assert asked == ["int4"]


def test_an_engine_that_does_not_read_a_gguf_file_gets_the_folder_that_is_named_for_it(file, some_of, monkeypatch):
    read = []

    def convert(room, source, out, dtype):
        read.append(source)
        out.mkdir()

    given = {"names": ("vllm",), "pythons": {"vllm": Path(sys.executable)}}
    monkeypatch.setattr(peers, "OUTSIDE", {"vllm": replace(scripted("plain"), convert=convert)})
    with some_of(**given, target_folder=EMBEDDED_TARGET) as made:
        made.engine = outrider.load(str(file), drafter="none", dtype="float32", max_slots=2)
        assert [way.name for way in made.ways()] == ["Scripted, plain"]
    assert read == [EMBEDDED_TARGET.absolute()]
    assert "other weights" in made.passed["Scripted, plain"]
    with some_of(**given) as other:
        other.engine = made.engine
        assert other.ways() == []
    assert other.left_out["Scripted"] == "it reads no .gguf files; name folders with --peer-target and --peer-draft"


def test_an_engine_that_draws_something_else_is_left_out(some_of, monkeypatch):
    hot = replace(scripted("plain", "hot"), title="Behind", command=lambda _: transformers_driver.COMMAND)
    monkeypatch.setattr(peers, "OUTSIDE", {"vllm": hot})
    with some_of(names=("vllm",), pythons={"vllm": Path(sys.executable)}) as made:
        made.new_tokens, made.generation = 40, Generation(max_new_tokens=40, sampling=Sampling(temperature=1))
        assert [way.name for way in made.ways()] == ["Behind, plain"]
    assert made.left_out["Behind, hot"].startswith(
        "it does not draw what the target draws: at temperature 1 its tokens"
    )


def test_another_engine_answers_the_same_tokens_for_as_long(some_of, engine, monkeypatch):
    # transformers behind a driver stands for an engine of its own.
    behind = replace(scripted("plain"), title="Behind", command=lambda _: transformers_driver.COMMAND)
    monkeypatch.setattr(peers, "OUTSIDE", {"vllm": behind})
    player = Player(encoder=Encoder(engine.tokenizer, engine.parts.target.vocab_size), max_new_tokens=TOKENS, room=200)
    first, second = ({"role": "user", "content": text} for text in ("Hello", "Why?"))
    talk = Conversation(id="a", category="", opening=[first], replies=((second,),))
    with some_of(names=("transformers", "vllm"), pythons={"vllm": Path(sys.executable)}) as made:
        inside, behind = made.ways()
        one, other = (way.play(player, [talk], ClosedLoop(), seed=0) for way in (inside, behind))
    assert made.left_out == {}
    assert (inside.outside, behind.outside) == (False, True)
    # Equal answers make equal second prompts.
    assert [each.prompt_tokens for each in one.served] == [each.prompt_tokens for each in other.served]
    assert [(each.id, each.num_tokens) for each in other.served] == [("a#1", TOKENS), ("a#2", TOKENS)]
    assert other.served[0].ended == other.served[1].arrived < other.served[1].ended == other.seconds


PROMPTS = {"one": "Once upon a time", "other": "The dog was"}


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    """A GGUF file, beside which lie its own greedy answers, and a program that answers them."""
    pytest.importorskip("gguf")
    model = AutoModelForCausalLM.from_pretrained(EMBEDDED_DRAFT)
    tokenizer = AutoTokenizer.from_pretrained(EMBEDDED_TARGET)
    file = write_gguf(tmp_path_factory.mktemp("gguf") / "target.gguf", model, tokenizer)
    engine = outrider.load(str(file), drafter="none", dtype="float32")
    prompts = [list(engine.encode(text)) for text in PROMPTS.values()]
    outputs = engine.generate(prompts, max_new_tokens=TOKENS, sampling=Sampling(temperature=0), ignore_eos=True)
    answers = {json.dumps(prompt): list(out.tokens) for prompt, out in zip(prompts, outputs, strict=True)}
    file.with_suffix(".json").write_text(json.dumps(answers))
    wrapper(file.parent)
    return file


def test_servers_answer_the_same_file_and_tell_start_memory_prompt_and_decoding(file, tmp_path):
    lines = [{"id": id, "category": id, "prompt": text} for id, text in PROMPTS.items()]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    server = file.parent / "llama-server"
    plan = BenchPlan(
        setup=Setup(str(file), drafter="ngram", dtype="float32", length="fixed:3", ignore_generation_config=True),
        generation=Generation(max_new_tokens=TOKENS, sampling=Sampling(temperature=0)),
        workload=str(tmp_path / "prompts.jsonl"),
        rounds=2,
        peers=PeerOptions(
            names=("llama", "ik_llama"), environments=tmp_path, servers={"llama": server, "ik_llama": server}
        ),
    )
    found = measure(plan)
    theirs = ["llama.cpp, plain", "llama.cpp, ngram-simple"]
    theirs += [f"ik_llama.cpp, {mode}" for mode in ("plain", "ngram-simple", "plain -rtr", "ngram-simple -rtr")]
    assert [way for way in found.ways if way in found.outside] == theirs
    assert found.drafting == {"default", *(way for way in theirs if "ngram" in way)}
    # A text that ends before the other is another text.
    for way in theirs:
        changed = "; 2 of them are not those of its own plain decoding" if "llama.cpp, ngram" in way else ""
        assert found.passed[way].endswith(" logits" + changed)
        assert found.passed[way].startswith("2 greedy texts are the target's, up to gaps of ")
    why = "it ended with exit status 1; its last line: RuntimeError: the server ended with exit status 1: "
    assert found.left_out["ik_llama.cpp, suffix -rtr"] == why + "unknown speculative decoding type"
    assert found.left_out["ik_llama.cpp, draft model"] == "the setup has no draft model"
    assert set(found.starts) == set(theirs)
    figures = {each["way"]: each for each in summary(found)}
    for way in theirs:
        assert figures[way]["ttft"]["mean"] == pytest.approx(0.05)
        # Of five tokens four come after the first one, within a tenth of a second.
        assert figures[way]["decode_throughput"] == pytest.approx(40)
        assert figures[way]["num_tokens"] == 2 * 2 * TOKENS
        assert figures[way]["start"] > 0
    [table] = [each for each in findings(found).tables if each.title == "Prompt and decoding"]
    assert table.head == ("load", "way", "start, s", "prompt", "all", "one", "other", "accepted")
    cells = {line[1]: line[4:] for line in table.lines}
    assert cells["llama.cpp, plain"] == ["40.0 (40.0 to 40.0)"] * 3 + ["-"]
    assert cells["ik_llama.cpp, ngram-simple"][-1] == "8 of 32"
    # Ours takes part in that table, transformers does not: it tells no first token.
    assert "default" in cells


def test_answers_end_at_end_tokens_unless_an_engine_takes_part_that_cannot_end_there():
    assert not PeerOptions(names=("llama", "ik_llama", "transformers")).ignore_eos
    assert PeerOptions(names=("llama", "openvino")).ignore_eos


def test_the_files_of_a_hub_id_lie_in_the_hubs_cache(some_of, tmp_path, monkeypatch):
    kept, commit = tmp_path / "models--org--name", "0" * 40
    shutil.copytree(EMBEDDED_DRAFT, kept / "snapshots" / commit)
    (kept / "refs").mkdir()
    (kept / "refs" / "old").write_text(commit)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    behind = replace(scripted("plain"), title="Behind", command=lambda _: transformers_driver.COMMAND)
    monkeypatch.setattr(peers, "OUTSIDE", {"vllm": behind})
    with some_of(names=("vllm",), pythons={"vllm": Path(sys.executable)}) as made:
        made.engine = outrider.load("org/name", revision="old", drafter="none", dtype="float32", max_slots=2)
        made.revision = "old"
        names = [way.name for way in made.ways()]
    assert (names, made.left_out) == (["Behind, plain"], {})


def test_transformers_own_speculation_takes_one_prompt_at_a_time(some_of, engine):
    with some_of(names=("assisted",)) as made:
        [lookup] = made.ways()
    assert made.left_out == {"transformers, assisted": "the setup has no draft model"}
    player = Player(encoder=Encoder(engine.tokenizer, engine.parts.target.vocab_size), max_new_tokens=TOKENS, room=200)
    asked = [Conversation(id=id, category="", opening="Once upon a time") for id in "ab"]
    played = lookup.play(player, asked[:1], ClosedLoop(), seed=0)
    assert [each.num_tokens for each in played.served] == [TOKENS]
    with pytest.raises(LeftOut, match="takes one prompt at a time"):
        lookup.play(player, asked, ClosedLoop(concurrency=2), seed=0)


def test_a_batch_is_as_large_as_the_load_has_at_once():
    sizes = []

    def answer(prompts, num_tokens, seed):
        sizes.append(len(prompts))
        return EngineOutput(tokens=[[1] * num_tokens for _ in prompts], seconds=2.0)

    class OneToken(Encoder):
        def __init__(self) -> None:
            self.template = None

        def prompt(self, conversation, answers=()):
            return [1]

    way = BatchWay(name="batches", answer=answer, decode=lambda tokens: "", drafts=False, outside=False)
    asked = [Conversation(id=str(i), category="", opening="x") for i in range(5)]
    player = Player(encoder=OneToken(), max_new_tokens=3, room=9)
    played = way.play(player, asked, ClosedLoop(concurrency=2), seed=0)
    assert sizes == [2, 2, 1]
    assert played.seconds == 6.0
    assert [(each.arrived, each.ended) for each in played.served] == [(0, 2), (0, 2), (2, 4), (2, 4), (4, 6)]


def test_what_is_no_peer_is_refused(tmp_path):
    with pytest.raises(InputError, match="unknown peer 'vlm'; did you mean 'vllm'"):
        PeerOptions(names=("vlm",))
    with pytest.raises(InputError, match="--vllm-python must name a Python that has vLLM"):
        PeerOptions(pythons={"vllm": tmp_path / "none"})
    with pytest.raises(InputError, match="--peer-target must name the folder of a checkpoint, got "):
        PeerOptions(target_folder=tmp_path)
