"""Drivers answer or say why not, environments and models are made once, and what fails is told by a sentence."""

import json
import sys
import zipfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from outrider.bench.engines import llama, openvino
from outrider.bench.engines.agreement import Surprise, agreement, surprise
from outrider.bench.engines.driver import DriverRequest, Options
from outrider.bench.engines.engine import converted, state_of
from outrider.bench.engines.environments import CannotMake, Environment, EnvironmentFolder
from outrider.bench.engines.llama import add_vocabulary
from outrider.bench.engines.process import Process, Refused, Stopped
from outrider.bench.engines.vllm import requirements
from outrider.embedded import EMBEDDED_DRAFT, EMBEDDED_TARGET
from outrider.handoff.checks import openvino as openvino_check
from outrider.lm.hf.open import open_model
from tests.bench.engines import transformers_driver

PROMPTS = [[0, 100, 200, 300, 400], [0, 500, 600]]


def options(mode: str) -> Options:
    place = str(EMBEDDED_DRAFT)
    return Options(
        mode=mode, target=place, draft=place, dtype="float32", threads=1, draft_tokens=3, ngram=3, batch=2, context=64
    )


def asked(prompts: list[list[int]], temperature: float = 0.0) -> DriverRequest:
    return DriverRequest(prompts=prompts, new_tokens=12, temperature=temperature, seed=1)


def test_a_driver_decodes_until_its_input_ends():
    target = open_model(str(EMBEDDED_DRAFT), dtype="float32", device="cpu")
    with Process(transformers_driver.COMMAND) as driver:
        driver.start(options("draft model"))
        [output] = driver.ask(asked(PROMPTS[:1])).tokens
        assert len(output) == 12
        found = agreement(target, PROMPTS[0], output)
        assert (found.first, found.gap) == (None, 0)
        changed = [*output[:4], output[4] + 1, *output[5:]]
        found = agreement(target, PROMPTS[0], changed)
        assert found.first == 4
        assert found.gap > 0
        # transformers assists one prompt at a time; the driver says so and goes on.
        with pytest.raises(Refused, match="batch_size"):
            driver.ask(asked(PROMPTS))
        drawn = driver.ask(asked(PROMPTS[:1], temperature=1.0))
        assert [len(tokens) for tokens in drawn.tokens] == [12]
        assert drawn.seconds > 0


def test_drawn_tokens_are_judged_by_how_surprising_they_are_to_the_target():
    target, random = open_model(str(EMBEDDED_DRAFT), dtype="float32"), torch.Generator().manual_seed(0)

    def drawn(temperature: float) -> list[int]:
        ids = [*PROMPTS[0]]
        for _ in range(60):
            row = target(torch.tensor([ids])).logits[0, -1] / temperature
            ids.append(int(torch.multinomial(row.softmax(-1), 1, generator=random)))
        return ids[len(PROMPTS[0]) :]

    with torch.inference_mode():
        right = [surprise(target, PROMPTS[0], drawn(each), each) for each in (1.0, 0.7)]
        warm = surprise(target, PROMPTS[0], drawn(3.0), 1.0)
        words = torch.randint(target.config.vocab_size, (60,), generator=random).tolist()
        garbage = surprise(target, PROMPTS[0], words, 1.0)
    assert all(abs(each.deviations) < 4 for each in right)
    assert min(warm.deviations, garbage.deviations) > 8
    both = right[0] + garbage
    assert both == Surprise(excess=right[0].excess + garbage.excess, variance=right[0].variance + garbage.variance)


@pytest.mark.parametrize(
    ("program", "sentence"),
    [
        ("raise SystemExit('no such instruction')", "exit status 1; its last line: no such instruction"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGILL)", "SIGILL; its last line: none"),
        ("import time; time.sleep(60)", "no answer within 0.5 seconds"),
    ],
)
def test_a_driver_that_does_not_start_says_how_it_ended(program, sentence):
    with pytest.raises(Stopped, match=sentence):
        Process([sys.executable, "-c", program], patience=0.5 if "sleep" in program else 60).start(options("plain"))


def test_a_driver_that_does_not_exist_is_told_by_a_sentence():
    with pytest.raises(Stopped, match="cannot be started: No such file"):
        Process(["/no/such/driver"]).start(options("plain"))


def test_a_command_that_fails_is_told_by_its_last_error(tmp_path):
    room = EnvironmentFolder(place=tmp_path, pins=())
    program = "print('Collecting\\nERROR: No matching distribution found for vllm\\n'); raise SystemExit(1)"
    with pytest.raises(CannotMake, match=r"says: No matching distribution found for vllm$"):
        room.run(sys.executable, "-c", program)
    assert "Collecting" in (tmp_path / "log.txt").read_text()
    with pytest.raises(CannotMake, match="/no/such/compiler cannot be run: No such file"):
        room.run("/no/such/compiler")


def test_an_environment_is_made_once_and_again_for_other_pins(tmp_path):
    rooms = []
    first = Environment(name="one", pins=("a==1",), make=rooms.append)
    room = first.ready(tmp_path)
    assert room.python.exists()
    assert first.ready(tmp_path) == room
    assert len(rooms) == 1
    assert first.is_made(tmp_path)
    assert not replace(first, pins=("a==2",)).is_made(tmp_path)


def test_a_peer_whose_environment_cannot_be_made_is_left_out(tmp_path):
    (tmp_path / "file").write_text("")
    other = Environment(name="one", pins=(), make=lambda _: None)
    with pytest.raises(CannotMake, match="one cannot be written"):
        other.ready(tmp_path / "file")


def test_a_wheel_is_required_without_some_packages_and_extras(tmp_path):
    about = (
        "Name: x\nRequires-Dist: torch==2\nRequires-Dist: torchaudio\nRequires-Dist: pandas; extra == 'bench'\n\nText"
    )
    with zipfile.ZipFile(tmp_path / "x.whl", "w") as wheel:
        wheel.writestr("x-1.dist-info/METADATA", about)
    assert requirements(tmp_path / "x.whl", without=("torchaudio",)) == ["torch==2"]


class Pipeline:
    """OpenVINO's pipeline: each output takes a forward for its prompt, and three that emit four tokens each."""

    def __init__(self, *_: object) -> None:
        self.runs: list[int] = []

    def generate(self, prompts: list[object], laws: list[SimpleNamespace]) -> list[SimpleNamespace]:
        self.runs.append(len(prompts))
        forwards = SimpleNamespace(raw_metrics=SimpleNamespace(m_durations=[0.1] * 4))
        # Its own counts leave out the last draft.
        told = SimpleNamespace(
            main_model_metrics=forwards, get_num_draft_tokens=lambda: 6, get_num_accepted_tokens=lambda: 6
        )
        return [SimpleNamespace(m_generation_ids=[[7] * 13], extended_perf_metrics=told) for _ in prompts]


def openvino_without_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its modules, as far as they are called."""
    pieces = ("SchedulerConfig", "GenerationConfig")
    genai = SimpleNamespace(
        ContinuousBatchingPipeline=Pipeline, draft_model=lambda *_, **__: None, **dict.fromkeys(pieces, SimpleNamespace)
    )
    monkeypatch.setitem(sys.modules, "openvino", SimpleNamespace(Tensor=lambda tokens: tokens))
    monkeypatch.setitem(sys.modules, "openvino_genai", genai)


@pytest.mark.parametrize(
    ("counts", "runs", "told"),
    [(True, [1, 1], {"drafts": 6, "draft_tokens": 12, "accepted_tokens": 18}), (False, [2], {})],
)
def test_steps_of_openvino_are_forwards_of_its_target(monkeypatch, counts, runs, told):
    openvino_without_models(monkeypatch)
    driver = openvino.OpenvinoDriver()
    driver.start(replace(options("draft model"), counts=counts))
    answer = driver.ask(asked(PROMPTS))
    assert (answer.tokens, answer.counts, driver._pipeline.runs) == ([[7] * 13] * 2, told, runs)


def test_the_check_of_an_export_counts_the_same_steps(monkeypatch, tmp_path):
    openvino_without_models(monkeypatch)
    monkeypatch.setattr(openvino_check, "HERE", tmp_path)
    for name in ("target", "draft-openvino"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "openvino_model.xml").touch()
    expected = {"dtype": "float32", "new_tokens": 13, "num_speculative_tokens": 3, "prompts": PROMPTS}
    expected |= {"method": "draft_model", "tokens": [[7] * 13] * 2}
    assert openvino_check.decode(expected, str(tmp_path / "target"), None) == {"tokens": [[7] * 13] * 2, "steps": 6}


def test_a_model_is_converted_once(tmp_path):
    (tmp_path / "one").mkdir()
    calls = []

    def convert(room, source, out, dtype):
        calls.append(dtype)
        out.write_text(dtype)

    engine = replace(openvino.ENGINE, convert=convert)
    room = EnvironmentFolder(place=tmp_path / "one", pins=())
    places = [converted(engine, room, EMBEDDED_DRAFT, tmp_path, dtype) for dtype in ("float32", "float32", "bfloat16")]
    assert calls == ["float32", "bfloat16"]
    assert [place.read_text() for place in places] == ["float32", "float32", "bfloat16"]
    rounded = replace(openvino.ROUNDED_ENGINES["openvino_int4"], convert=convert)
    assert converted(rounded, room, EMBEDDED_DRAFT, tmp_path, "bfloat16").read_text() == "int4"


@pytest.mark.parametrize("weights", ["float32", "int8", "int4"])
def test_openvino_is_told_to_round_weights_only_where_its_name_says_so(monkeypatch, tmp_path, weights):
    options, read = {}, []

    class Model:
        @classmethod
        def from_pretrained(cls, source, **given):
            options.update(given)
            read.append(json.loads(Path(source, "config.json").read_text())["rope_theta"])
            return cls()

        def save_pretrained(self, place):
            place.mkdir()

    saved = []
    intel = SimpleNamespace(OVModelForCausalLM=Model, OVWeightQuantizationConfig=lambda **given: given)
    monkeypatch.setitem(sys.modules, "optimum.intel", intel)
    monkeypatch.setitem(
        sys.modules, "openvino_tokenizers", SimpleNamespace(convert_tokenizer=lambda *_, **__: ("there", "back"))
    )
    monkeypatch.setitem(
        sys.modules, "openvino", SimpleNamespace(save_model=lambda model, place: saved.append((model, place.name)))
    )
    openvino.write_model(str(EMBEDDED_TARGET), str(tmp_path / "out"), weights)
    bits = options.get("quantization_config", {}).get("bits")
    assert (bits, options.get("load_in_8bit")) == {"float32": (None, False), "int8": (8, None), "int4": (4, None)}[
        weights
    ]
    assert read == [10000.0]
    assert saved == [("there", "openvino_tokenizer.xml"), ("back", "openvino_detokenizer.xml")]


@pytest.mark.parametrize("kind", ["bpe", "unigram", "none"])
def test_every_kind_of_vocabulary_is_written_for_llama_with_the_same_ids(tmp_path, kind):
    gguf = pytest.importorskip("gguf")
    texts = ["<s>", "a", "b", "ab"]
    models = {
        "bpe": {"vocab": {text: i for i, text in enumerate(texts)}, "merges": [["a", "b"]]},
        "unigram": {"vocab": [[text, -1.0] for text in texts]},
    }
    if kind in models:
        tokenizer = {"model": models[kind], "added_tokens": [{"id": 0, "content": "<s>"}]}
        (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    add_vocabulary(writer, tmp_path, {"vocab_size": 6, "bos_token_id": None, "eos_token_id": [3, 1]})
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    fields = gguf.GGUFReader(tmp_path / "model.gguf").fields
    written = fields["tokenizer.ggml.tokens"].contents()
    assert len(written) == 6
    assert written[:4] == (texts if kind in models else [f"<unused {i}>" for i in range(4)])
    assert fields["tokenizer.ggml.eos_token_id"].contents() == 3
    assert "tokenizer.ggml.bos_token_id" not in fields


def test_an_engine_gets_the_very_file_that_it_reads_by_itself(tmp_path):
    file, room = tmp_path / "model.gguf", EnvironmentFolder(place=tmp_path, pins=())
    file.write_bytes(b"GGUF")
    assert converted(llama.ENGINE, room, file, tmp_path / "elsewhere", "float32") == file
    with pytest.raises(CannotMake, match=r"reads no \.gguf files"):
        converted(openvino.ENGINE, room, file, tmp_path / "elsewhere", "float32")


def test_a_model_that_was_written_since_is_converted_again(tmp_path):
    (tmp_path / "weights.safetensors").write_bytes(b"1")
    first = state_of(tmp_path)
    assert state_of(tmp_path) == first
    (tmp_path / "weights.safetensors").write_bytes(b"12")
    assert state_of(tmp_path) != first
