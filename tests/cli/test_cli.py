"""The command line: what it prints for programs, and one sentence with exit status 2 for wrong input."""

import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from outrider.cli.prompts import read_file, read_prompts
from outrider.core.types import InputError
from outrider.drafters.model import ModelDrafter
from outrider.embedded import EMBEDDED_TARGET
from outrider.lengths.costs import CostTable
from outrider.plan import table
from tests.cli.runs import done, refused, run

SHORT = ["--max-new-tokens", "8", "--temperature", "0"]


@pytest.fixture(scope="module")
def stranger(tmp_path_factory) -> Path:
    """A draft model with another vocabulary."""
    place = tmp_path_factory.mktemp("stranger")
    config = LlamaConfig(
        vocab_size=77, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    LlamaForCausalLM(config).save_pretrained(place)
    return place


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--drafter", "ngrm"], "unknown drafter 'ngrm'; did you mean 'ngram'?"),
        (["--verifier", "nothing-like-it"], "unknown verifier 'nothing-like-it'. Available: token, block, match"),
        (["--drafter", "ngram:lookup=3"], "unknown drafter 'ngram' field 'lookup'"),
        (["--length", "fixed:many"], "must be int, got 'many'"),
        (["--length", "fixed:0"], "num_speculative_tokens must be >= 1"),
        (["--decoding", "perl"], "unknown decoding 'perl'; did you mean 'pearl'? Available: step, pearl"),
        (["--decoding", "pearl", "--tree", "iid"], "use tree 'chain', or decoding 'step'"),
        (["--drafter", "model"], "drafter 'model' needs path"),
        (["--target", "/no/such/place"], "there is no directory /no/such/place"),
        (["--drafter", "model:path=/no/such/place"], "there is no directory /no/such/place"),
        (["--prompt-file", "/no/such/file"], "there is no prompt file /no/such/file"),
        (["--prompt", "word " * 1200], "the prompt has"),
        (["--prompt", "a", "--temperature", "-0.5"], "temperature must be >= 0 (0 means greedy), got -0.5"),
        (["--prompt", "a", "--top-p", "0"], "top_p must be in (0, 1], got 0"),
        (["--prompt", "a", "--top-p", "1.5"], "top_p must be in (0, 1], got 1.5"),
        (["--prompt", "a", "--max-new-tokens", "0"], "max_new_tokens must be >= 1, got 0"),
        (["--prompt", "a", "-n", "0"], "n must be >= 1, got 0"),
        (["--dtype", "float17"], "unknown dtype 'float17'; available: auto, float32"),
        (["--device", "warp"], "device 'warp' cannot be used"),
        (["--max-slots", "0"], "max_slots must be >= 1, got 0"),
        (["--threads", "0"], "threads must be >= 1, got 0"),
        (["--threads", "1000000"], "the number of this machine's cores, got 1000000"),
        (["--max-context", "5000"], "max_context must be <= 1024"),
        (["--prompt", "a", "--stop", ""], "a stop string must not be empty"),
        (["--prompt", "a", "--regex", "(a"], "the regex cannot be compiled"),
        (["--prompt", "a", "--regex", "a", "--json-schema", "{}"], "--json-schema and --regex were given together"),
        (["--prompt", "a", "--json-schema", "/no/such/schema"], "there is no JSON schema file /no/such/schema"),
        (["--prompt", "a", "--grammar", "/no/such/rules"], "there is no grammar file /no/such/rules"),
        (["--prompt", "a", "--regex", "a", "--compare"], "--compare measures plain texts"),
        (["--target", ""], "there is no directory ''"),
        (["--target", "x" * 5000], "give a model's directory or a hub id"),
        (["--drafter", ""], "unknown drafter ''"),
        (["--verifier", ""], "unknown verifier ''"),
        (["--length", ""], "unknown length ''"),
        (["--device", "meta"], "device 'meta' cannot be used"),
        (["--device", ""], "device '' cannot be used"),
        (["--tree", "gumbel:branching=2xx2"], "must be whole numbers joined by x, as in 4x2x2, got '2xx2'"),
        (["--tree", "gumbel:branching=²"], "must be whole numbers joined by x"),
        (["--length", "planned:draft_cost=nan"], "must be float, got 'nan'"),
        (["--prompt", "a", "--temperature", "inf"], "temperature must be >= 0 (0 means greedy), got inf"),
        (["--prompt", "a", "--frequency-penalty", "nan"], "frequency_penalty must be finite, got nan"),
        (["--prompt", "a", "--presence-penalty", "inf"], "presence_penalty must be finite, got inf"),
        (["--prompt", "a", "--repetition-penalty", "inf"], "repetition_penalty must be > 0 (1 means none), got inf"),
        (["--prompt", "\udcff"], "the prompt is not Unicode text"),
        (["--prompt", "a", "--json-schema", ""], "there is no JSON schema file"),
        (["--prompt", "a", "--json-schema", "x" * 5000], "there is no JSON schema file"),
        (["--prompt", "a", "--json-schema", "false"], "cannot accept any value"),
        (
            ["--prompt", "a", "--json-schema", '{"not": {}}'],
            'the JSON schema cannot be compiled: Unimplemented keys: ["not"]',
        ),
        (["--prompt", "a", "--grammar", "/"], "there is no grammar file /"),
        (["--prompt", "a", "--prompt-file", "b"], "--prompt and --prompt-file were given together"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_wrong_input_gets_one_sentence(monkeypatch, capsys, arguments, sentence):
    given = arguments if "--prompt" in arguments or "--prompt-file" in arguments else [*arguments, "--prompt", "a"]
    err = refused(monkeypatch, capsys, "generate", *given)
    assert sentence in err
    assert err.strip().count("\n") == 0


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--regex", "[a-c]{4}[.]"], lambda text: len(text) == 5 and text[4] == "." and set(text[:4]) <= set("abc")),
        (
            ["--json-schema", '{"type": "integer", "minimum": 5, "maximum": 7}'],
            lambda text: json.loads(text) in (5, 6, 7),
        ),
        (["--json-schema", "SCHEMA"], lambda text: json.loads(text) is True),
        (["--grammar", "RULES"], lambda text: text in ("yes", "no")),
    ],
    ids=["regex", "inline", "schema", "grammar"],
)
def test_the_output_follows_what_the_command_line_says(monkeypatch, capsys, tmp_path, arguments, says):
    (tmp_path / "SCHEMA").write_text('{"const": true}')
    (tmp_path / "RULES").write_text('root ::= "yes" | "no"')
    monkeypatch.chdir(tmp_path)
    out = done(monkeypatch, capsys, "generate", "--prompt", "Once", "--json", "--seed", "1", *arguments)
    assert says(json.loads(out)["text"])


def test_another_vocabulary_is_refused_with_the_reason(monkeypatch, capsys, stranger):
    err = refused(monkeypatch, capsys, "generate", "--drafter", f"model:path={stranger}", "--prompt", "a")
    assert "77 token ids and the target 8192" in err


def test_an_unknown_option_is_exit_status_two(monkeypatch, capsys):
    assert run(monkeypatch, capsys, "generate", "--no-such-option")[0] == 2


def test_json_of_one_prompt_has_the_documented_fields(monkeypatch, capsys):
    found = json.loads(done(monkeypatch, capsys, "generate", "--prompt", "Once upon a time", *SHORT, "--json"))
    for field in ("text", "tokens", "num_steps", "num_draft_tokens", "num_accepted_tokens", "accepted_per_position"):
        assert field in found
    assert found["block_efficiency"] == pytest.approx(len(found["tokens"]) / found["num_steps"])
    assert found["seconds"] > 0
    assert found["tokens_per_second"] > 0


def test_where_nothing_is_drafted_the_last_line_and_json_say_why(monkeypatch, capsys, tmp_path):
    dear = CostTable.of_formula(lambda requests, length: 1.0 + 9 * length)
    dear = replace(dear, doubt=0.17, kept=False, measured=time.time())
    monkeypatch.setattr(table, "measure", lambda parts, **options: dear)
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))
    asked = ("generate", "--prompt", "Once upon a time", *SHORT, "--forward", "eager")
    status, _, err = run(monkeypatch, capsys, *asked)
    assert status == 0
    said = "nothing was drafted: drafts would have to gain 28%, because the costs of this machine are uncertain"
    assert said in err
    assert "measure again with `outrider prepare`" in err
    found = json.loads(run(monkeypatch, capsys, *asked, "--json")[1])
    assert found["num_draft_tokens"] == 0
    assert found["why_few_drafts"].startswith(said)
    drafting = json.loads(run(monkeypatch, capsys, *asked, "--json", "--length", "fixed:2")[1])
    assert "why_few_drafts" not in drafting


def test_several_prompts_give_a_line_each(monkeypatch, capsys, tmp_path):
    lines = [{"prompt": "One day"}, {"turns": ["Hello, I need a taxi."]}]
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n".join(json.dumps(line) for line in lines))
    out = done(monkeypatch, capsys, "generate", "--prompt-file", str(file), *SHORT, "--json")
    assert [len(json.loads(line)["tokens"]) > 0 for line in out.splitlines()] == [True, True]


def test_a_broken_prompt_file_names_the_line(monkeypatch, capsys, tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "One day"}\n{"prompt"')
    status, _, err = run(monkeypatch, capsys, "generate", "--prompt-file", str(file))
    assert (status, "line 2" in err) == (2, True)


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("[]", "line 1 of the prompts is not a JSON object with `prompt`, a text, or `turns`"),
        ('{"prompt": 3}', "line 1"),
        ('{"prompt": null}', "line 1"),
        ('{"turns": "abc"}', "line 1"),
        ('{"turns": []}', "line 1"),
        ('\n{"turns": ["a", null]}', "line 2"),
        ('{"prompt": "a"', "line 1 of the prompts is not JSON: Expecting"),
        ("\n \n", "the prompt file is empty"),
    ],
)
def test_prompts_that_are_none_are_named(line, sentence):
    with pytest.raises(InputError) as refused:
        read_prompts(line)
    assert sentence in str(refused.value)


def test_lines_of_prompts_may_hold_what_json_strings_may_hold(tmp_path):
    file = tmp_path / "prompts.jsonl"
    lines = ['{"prompt": "a\u2028b\x85c"}', "", '{"turns": ["d", "e"]}']
    file.write_text("\r\n".join(lines), encoding="utf-8-sig")
    turns = [{"role": "user", "content": "d"}, {"role": "assistant", "content": "e"}]
    assert read_file(file) == ["a\u2028b\x85c", turns]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
@pytest.mark.parametrize("command", [["methods", "--json"], ["generate", "--prompt", "Once", *SHORT]])
def test_what_cannot_be_written_is_one_sentence(monkeypatch, capsys, command):
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        status, _, err = run(monkeypatch, capsys, *command)
    assert (status, err) == (1, "error: [Errno 28] No space left on device\n")


def test_a_reader_that_leaves_ends_the_command_quietly(monkeypatch, capsys):
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as pipe:
        monkeypatch.setattr(sys, "stdout", pipe)
        status, _, err = run(monkeypatch, capsys, "methods", "--json")
    assert (status, err) == (1, "")


@pytest.mark.parametrize(("options", "said"), [([], "???\n"), (["--json"], "\\u00e9\\u65e5")])
def test_text_that_a_terminal_cannot_show_ends_nothing(monkeypatch, capsys, options, said):
    terminal = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(terminal, encoding="ascii"))
    done(monkeypatch, capsys, "generate", "--prompt", "é", *SHORT, "--regex", "é日", *options)
    assert said in terminal.getvalue().decode("ascii")


def test_streamed_text_is_the_text_of_json(monkeypatch, capsys):
    prompt = [
        "generate",
        "--prompt",
        "Once upon a time",
        "--max-new-tokens",
        "40",
        "--temperature",
        "0.9",
        "--seed",
        "3",
    ]
    streamed = run(monkeypatch, capsys, *prompt)[1]
    whole = json.loads(run(monkeypatch, capsys, *prompt, "--json")[1])["text"]
    assert streamed == "Once upon a time" + whole + "\n"


def test_a_stop_string_ends_the_text_before_it(monkeypatch, capsys):
    prompt = ["generate", "--prompt", "Once upon a time", "--max-new-tokens", "60", "--temperature", "0", "--json"]
    whole = json.loads(run(monkeypatch, capsys, *prompt)[1])["text"]
    stop = whole[12:18]
    cut = json.loads(run(monkeypatch, capsys, *prompt, "--stop", stop)[1])
    assert cut["text"] == whole[: whole.index(stop)]
    assert cut["finish_reason"] == "stop"


def test_version_and_methods(monkeypatch, capsys):
    assert run(monkeypatch, capsys, "--version")[:2] == (0, "0.1.0\n")
    found = json.loads(run(monkeypatch, capsys, "methods", "--json")[1])
    assert {"ngram", "suffix", "model", "none"} <= {row["name"] for row in found["methods"]}
    assert found["matrix"]["token"]["chosen tree"] == "refused"
    assert found["matrix"]["match"]["chosen tree"] == "exact law, default"


def test_methods_show_the_traits_that_the_classes_of_drafters_state(monkeypatch, capsys):
    found = json.loads(run(monkeypatch, capsys, "methods", "--json")[1])
    traits = {row["name"]: row["traits"] for row in found["methods"] if row["family"] == "drafter"}
    assert traits["suffix"] == {
        "rows": "point",
        "context_pure": True,
        "reads_hidden_states": False,
        "keeps_cache": False,
        "trainer": None,
        "exports": ["vllm", "transformers"],
    }
    assert traits["model"]["keeps_cache"] is ModelDrafter.keeps_cache is True
    assert traits["model"]["rows"] == ModelDrafter.rows == "sampled"
    assert all("traits" not in row for row in found["methods"] if row["family"] != "drafter")
    monkeypatch.setenv("COLUMNS", "200")
    for options in ([], ["--markdown"]):
        page = run(monkeypatch, capsys, "methods", *options)[1]
        [line] = [line for line in page.splitlines() if re.match(r"\|? *`?model\b.*sampled", line)]
        assert re.findall(r"[\w.-]+", line) == [
            *("model", "sampled", "yes", "no", "yes"),
            ModelDrafter.trainer,
            *ModelDrafter.exports.engines,
        ]


def test_prove_holds_for_the_embedded_pair(monkeypatch, capsys):
    # The README's command proves the default length.
    status, out, _ = run(monkeypatch, capsys, "prove", "--length", "fixed:3", "--num-draws", "100", "--json")
    found = json.loads(out)
    assert found["law_error"] < 1e-12
    assert found["greedy_identical"]["holds"]
    assert (status, found["proven"]) == (0, True)


def test_compare_prints_a_speedup_behind_the_gate(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))
    prompt = ["generate", "--prompt", "Once upon a time", *SHORT, "--compare", "--profile"]
    status, _, err = run(monkeypatch, capsys, *prompt)
    assert status == 0
    assert "speedup" in err
    assert "where the time" in err
    assert len(list(tmp_path.glob("gate-*.json"))) == 1


def test_a_conversation_that_fills_the_context_can_begin_anew(monkeypatch, capsys):
    lines = iter(["Hello.", "What? " * 1200, "/reset", "Hello."])
    monkeypatch.setattr("builtins.input", lambda: next(lines, "/quit"))
    status, _, err = run(monkeypatch, capsys, "chat", *SHORT)
    assert status == 0
    assert "/reset begins anew" in err
    assert err.count("block efficiency") == 2


def test_chat_answers_every_line(monkeypatch, capsys):
    lines = iter(["I need a taxi to the station.", "", "For two people.", "/quit"])
    monkeypatch.setattr("builtins.input", lambda: next(lines))
    status, out, err = run(monkeypatch, capsys, "chat", *SHORT)
    assert status == 0
    assert len(out.strip().splitlines()) >= 2
    assert err.count("block efficiency") == 2


def test_an_interrupt_says_how_far_it_came():
    command = [sys.executable, "-m", "outrider.cli.app", "generate", "--prompt", "Once upon a time"]
    command += ["--max-new-tokens", "900", "--temperature", "1.5", "--seed", "1", "--drafter", "none"]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment) as process:
        assert process.stdout is not None
        first = process.stdout.read(20)
        time.sleep(0.2)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert first.startswith(b"Once upon")
    if process.returncode != 0:  # an end token may come first
        assert process.returncode == 130
        assert b"interrupted after" in err
        assert b"Traceback" not in err


def test_the_embedded_pair_is_small_and_complete():
    package = EMBEDDED_TARGET.parent
    assert sum(path.stat().st_size for path in package.rglob("*") if path.is_file()) < 60e6
    prompts = [json.loads(line) for line in (package / "prompts.jsonl").read_text(encoding="utf-8").splitlines()]
    kinds = [prompt["category"] for prompt in prompts]
    assert {kind: kinds.count(kind) for kind in set(kinds)} == dict.fromkeys(
        ("story", "dialogue", "math", "python"), 10
    )
