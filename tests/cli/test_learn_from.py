"""`outrider learn`: answers of a server or of a log become new weights, which the server gets."""

import json
import shutil
from dataclasses import replace

import httpx
import pytest
from safetensors.torch import load_file, save_file

import outrider
from outrider.cli.learn_from import LearnSettings, LearnTask, SourceOptions, learn, swapped
from outrider.cli.serve import ServeOptions, renewal_of
from outrider.core.inputs import InputError
from outrider.embedded import EMBEDDED_DRAFT, EMBEDDED_HEAD, EMBEDDED_TARGET
from outrider.handoff.export import export
from outrider.handoff.order import ExportRequest
from outrider.serve.settings import HttpSettings
from outrider.serve.vllm.launch import Launch, VllmSpeculation
from outrider.serve.vllm.options import EngineOptions
from outrider.serve.vllm.process import VllmProcess
from outrider.serve.vllm.python import VllmPython
from outrider.setup import Setup
from outrider.training.options import WatchOptions
from tests.cli.runs import done, refused, run
from tests.serve.served import loaded, serving
from tests.serve.vllm.fakes import fake_python

DRAFTER = f"model:path={EMBEDDED_DRAFT}"
SMALL = ("--steps", "1", "--batch-size", "2", "--warmup", "0", "--json")


def task_of(url: str, out, drafter: str = DRAFTER) -> LearnTask:
    return LearnTask(
        source=url,
        options=SourceOptions(admin_key="admin"),
        target=str(EMBEDDED_TARGET),
        drafter=drafter,
        out=out,
        settings=LearnSettings(),
        watch=WatchOptions(),
    )


def test_a_server_of_ours_keeps_answers_teaches_with_them_and_takes_the_weights(monkeypatch, capsys, tmp_path):
    setup = Setup(dtype="float32", probe=False, length="fixed:3")
    engine: outrider.Engine = loaded(length="fixed:3")
    renewal = renewal_of(setup, ServeOptions(), engine, "model")
    settings = HttpSettings(admin_key="admin", answers=tmp_path / "answers.jsonl")
    with serving(engine, settings, renewal=renewal, drafter="model") as url:
        for prompt in ("Once upon a time", "One day"):
            body = {"prompt": prompt, "max_tokens": 8, "temperature": 0, "stream": prompt == "One day"}
            assert httpx.post(f"{url}/v1/completions", json=body, timeout=60).status_code == 200
        out = tmp_path / "learnt"
        given = ("--from", url, "--admin-key", "admin", "--target", str(EMBEDDED_TARGET), "--out", str(out))
        record = json.loads(done(monkeypatch, capsys, "learn", *given, "--drafter", DRAFTER, *SMALL))
        assert record["swapped"] == record["improved"]
        assert load_file(out / "model.safetensors").keys() == load_file(EMBEDDED_DRAFT / "model.safetensors").keys()
        before = engine.parts.drafter
        assert swapped(task_of(url, out))
        assert engine.parts.drafter is not before


def test_a_vllm_by_itself_takes_weights_from_a_file(tmp_path):
    python = VllmPython.of(fake_python(tmp_path / "fake"))
    launch = Launch(
        target="t", names=("mine",), updates_weights=True, speculation=VllmSpeculation(method="draft_model")
    )
    save_file(load_file(EMBEDDED_DRAFT / "model.safetensors"), tmp_path / "model.safetensors")
    with VllmProcess(python, launch) as process:
        assert swapped(task_of(process.remote.url, tmp_path))
        size = (tmp_path / "model.safetensors").stat().st_size
        assert process.remote.get("/seen")["steps"] == [
            "pause?mode=wait",
            "init_weight_transfer_engine",
            "start_draft_weight_update",
            "update_weights",
            size,
            "finish_weight_update",
            "resume",
        ]


def test_a_head_that_learnt_is_exported_before_vllm_gets_its_weights(tmp_path):
    python = VllmPython.of(fake_python(tmp_path / "fake"))
    launch = Launch(target="t", names=("mine",), updates_weights=True, speculation=VllmSpeculation(method="eagle"))
    head = f"eagle:path={EMBEDDED_HEAD}"
    shutil.copytree(EMBEDDED_HEAD, tmp_path / "learnt")
    own = load_file(EMBEDDED_HEAD / "model.safetensors")
    # Files of EAGLE's authors may hold the target's embedding, which vLLM's head shares with the target.
    save_file(
        own | {"embed_tokens.weight": load_file(EMBEDDED_TARGET / "model.safetensors")["model.embed_tokens.weight"]},
        tmp_path / "learnt" / "model.safetensors",
    )
    made = export(
        ExportRequest(to="vllm", target=str(EMBEDDED_TARGET), drafter=head, out=tmp_path / "made", measure=False)
    )
    with VllmProcess(python, launch) as process:
        assert swapped(task_of(process.remote.url, tmp_path / "learnt", head))
        steps = process.remote.get("/seen")["steps"]
    assert (made.drafter.method, steps[2:4]) == ("eagle", ["start_draft_weight_update", "update_weights"])
    assert steps[4] == (tmp_path / "made" / "model.safetensors").stat().st_size
    assert steps[5:] == ["finish_weight_update", "resume"]


def test_a_head_is_exported_on_its_way_to_vllm(tmp_path):
    engine = EngineOptions(engine="vllm", vllm_python=fake_python(tmp_path / "fake"))
    process = engine.process(Setup(drafter="eagle:path=" + str(EMBEDDED_DRAFT.parent / "head")), engine.vllm_python)
    try:
        speculation = process.launch.speculation
        assert speculation is not None
        folder = process.folder / "drafter"
        assert speculation.config["model"] == str(folder)
        assert {file.name for file in folder.iterdir()} > {"config.json", "model.safetensors"}
    finally:
        process.stop()
    assert not folder.exists()


@pytest.mark.parametrize(
    ("source", "drafter", "sentence"),
    [
        ("none.jsonl", DRAFTER, "there is no log of answers file"),
        ("none.jsonl", "suffix", "the drafter suffix cannot be trained on"),
        ("http://127.0.0.1:9", DRAFTER, "new weights need the server's admin key"),
    ],
)
def test_learning_from_nothing_is_one_sentence(monkeypatch, capsys, tmp_path, source, drafter, sentence):
    given = ["--from", source, "--target", str(EMBEDDED_TARGET), "--out", str(tmp_path / "o"), "--drafter", drafter]
    assert sentence in refused(monkeypatch, capsys, "learn", *given)


def test_a_vllm_takes_weights_without_an_admin_key_where_a_server_of_ours_asks_for_one(tmp_path):
    log = tmp_path / "log.jsonl"
    log.write_text('{"prompt": "a", "completion": "b"}\n' * 2)
    python = VllmPython.of(fake_python(tmp_path / "fake"))
    with VllmProcess(python, Launch(target="t"), keys=()) as process, serving(loaded()) as ours:
        for url, wanted in ((process.remote.url, True), (ours, False)):
            task = replace(task_of(str(log), tmp_path / "out"), options=SourceOptions(url=url))
            if wanted:
                assert callable(learn(task))
            else:
                with pytest.raises(InputError, match="new weights need the server's admin key"):
                    learn(task)


def test_a_log_with_too_little_or_no_json_is_refused(monkeypatch, capsys, tmp_path):
    log = tmp_path / "log.jsonl"
    given = ["--from", str(log), "--target", str(EMBEDDED_TARGET), "--out", str(tmp_path / "o"), "--drafter", DRAFTER]
    for text, sentence in (('{"prompt": "a", "completion": "b"}\n', "holds 1 answers"), ("no\n\n", "line 1 of")):
        log.write_text(text)
        status, _, err = run(monkeypatch, capsys, "learn", *given)
        assert (status, sentence in err) == (2, True), err


def test_fewer_than_two_answers_are_no_limit():
    with pytest.raises(InputError, match="limit must be >= 2, got 1"):
        SourceOptions(limit=1)
