"""How vLLM is started for a setup, what it may see of ours, and what it has no form for."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from outrider import InputError
from outrider.embedded import EMBEDDED_DRAFT, EMBEDDED_HEAD, EMBEDDED_TARGET
from outrider.serve.vllm.error_line import error_line, last_words
from outrider.serve.vllm.launch import Launch, check_clients, check_request
from outrider.serve.vllm.options import EngineOptions
from outrider.serve.vllm.process import VllmProcess
from outrider.serve.vllm.python import VllmPython
from outrider.setup import Setup
from tests.serve.vllm.conftest import DRAFTS
from tests.serve.vllm.fakes import fake_python


def config_of(arguments: list[str]) -> dict:
    return json.loads(arguments[arguments.index("--speculative-config") + 1])


def test_a_setup_without_options_runs_the_pair_that_ships_with_outrider(python):
    arguments = Launch.of(Setup(), python).arguments(81)
    assert arguments[:6] == ["serve", str(EMBEDDED_TARGET), "--host", "127.0.0.1", "--port", "81"]
    assert config_of(arguments) == {
        "method": "draft_model",
        "model": str(EMBEDDED_DRAFT),
        "num_speculative_tokens": 5,
        "rejection_sample_method": "standard",
        "draft_sample_method": "probabilistic",
    }


def test_options_of_a_setup_become_flags_and_the_users_own_flags_come_last(python):
    setup = Setup(
        "org/target",
        drafter="ngram",
        length="fixed:3",
        dtype="float32",
        max_slots=4,
        max_context=512,
        revision="main",
        trust_remote_code=True,
        ignore_generation_config=True,
    )
    arguments = Launch.of(setup, python, "--tensor-parallel-size 2 --dtype bfloat16").arguments(81)
    assert config_of(arguments)["num_speculative_tokens"] == 3
    assert "model" not in config_of(arguments)
    for flag, value in (("--max-num-seqs", "4"), ("--max-model-len", "512"), ("--generation-config", "vllm")):
        assert arguments[arguments.index(flag) + 1] == value
    assert arguments[-4:] == ["--tensor-parallel-size", "2", "--dtype", "bfloat16"]


@pytest.mark.parametrize(
    ("drafter", "method"),
    [("none", None), (f"eagle:path={EMBEDDED_HEAD}", "eagle"), (f"model:path={EMBEDDED_DRAFT}", "draft_model")],
)
def test_each_drafter_has_vllms_name(python, drafter, method):
    launch = Launch.of(Setup(drafter=drafter), python)
    found = launch.speculation
    # vLLM refuses to count drafts where there are none.
    assert ("--per-request-spec-decode-metrics" in launch.arguments(81)) == (method is not None)
    assert (None if found is None else found.method) == method


def test_a_target_alone_drafts_by_suffixes_where_vllm_can_and_by_ngrams_elsewhere(python):
    target = Setup("org/target")
    assert Launch.of(target, python).method == "ngram"
    assert Launch.of(target, replace(python, has=frozenset({"arctic_inference"}))).method == "suffix"


def test_a_speculative_config_of_the_user_replaces_ours(python):
    own = """--speculative-config '{"method": "mtp"}'"""
    assert Launch.of(Setup("org/target"), python, own).speculation is None
    with pytest.raises(InputError, match="--engine-args has --speculative-config and --drafter was given too"):
        Launch.of(Setup("org/target", drafter="ngram"), python, own)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"tree": "dynamic"}, "vLLM has no tree 'dynamic'; it drafts chains step by step: leave out --tree"),
        ({"decoding": "pearl"}, "vLLM has no decoding 'pearl'"),
        ({"verifier": "coupled"}, "vLLM has no verifier 'coupled'; it has token and block"),
        ({"verifier": "block"}, "needs Triton on a GPU, and this build has none; use --verifier token"),
        ({"length": "planned"}, "vLLM has no length policy 'planned'; it drafts a fixed number"),
        ({"drafter": "griffin:path=/a/head"}, "vLLM has no drafter like 'griffin'"),
        ({"drafter": "domino:path=/a/head"}, "vLLM has no drafter like 'domino'; it has those of ngram, suffix"),
        ({"drafter": "dspark:path=/a/head"}, "vLLM drafts with dspark heads in its second model runner alone"),
        ({"drafter": "dflash2:path=/a/head"}, "and this build has none; use a head of another kind, such as dflash"),
        ({"drafter": "suffix"}, "vLLM's drafter suffix needs arctic-inference"),
        ({"dtype": "float64"}, "vLLM does not compute in float64"),
    ],
)
def test_what_vllm_has_no_form_for_is_refused_by_name(python, options, sentence):
    with pytest.raises(InputError) as refused:
        Launch.of(Setup(**options), python)
    assert sentence in str(refused.value)


def test_vllm_on_a_gpu_verifies_blocks_and_has_heads_of_its_second_model_runner(python):
    gpu = replace(python, package="vllm", has=frozenset({"triton"}))
    assert Launch.of(Setup(drafter="dflash2:path=/a/head"), gpu).method == "dflash"
    found = Launch.of(Setup(verifier="block"), gpu).speculation
    assert found is not None
    assert found.config["rejection_sample_method"] == "block"


@pytest.mark.parametrize("text", ["--port 9", "serve --x", "'--x", "--api-key=a"])
def test_flags_that_outrider_owns_or_that_are_none_are_refused(python, text):
    with pytest.raises(InputError, match="--engine-args must"):
        Launch.of(Setup(), python, text)


def test_settings_that_vllm_drops_while_it_drafts_are_refused(gpu_python):
    drafts = Launch(target="/a/target", engine_args=("--speculative-config", "{}"))
    plain = Launch(target="/a/target")
    check_request({"min_p": 0.0, "logit_bias": None, "top_p": 0.5}, drafts, gpu_python)
    check_request({"min_p": 0.1}, plain, gpu_python)
    for name, value in (("min_p", 0.1), ("logit_bias", {"3": 1.0})):
        with pytest.raises(InputError, match=f"vLLM does not keep {name} while it drafts"):
            check_request({name: value}, drafts, gpu_python)


def test_a_build_for_cpus_that_drafts_is_asked_for_greedy_outputs_alone(python, gpu_python):
    drafts = Launch(target="/a/target", speculation=DRAFTS)
    for fields in ({}, {"temperature": 1.0}):
        with pytest.raises(InputError, match="wrong tokens above temperature 0 while it drafts; give --temperature 0"):
            check_request(fields, drafts, python)
        check_request(fields, drafts, gpu_python)
        check_request(fields, Launch(target="/a/target"), python)
    check_request({"temperature": 0.0}, drafts, python)


def test_a_build_for_cpus_that_drafts_serves_others_only_where_wrong_tokens_are_allowed(python, gpu_python):
    drafts, plain = Launch(target="/a/target", speculation=DRAFTS), Launch(target="/a/target")
    with pytest.raises(InputError, match="serve plainly with --drafter none, or give --allow-lossy"):
        check_clients(drafts, python, lossy=False)
    for launch, where, lossy in ((drafts, python, True), (plain, python, False), (drafts, gpu_python, False)):
        check_clients(launch, where, lossy=lossy)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"engine": "vlm"}, "unknown engine 'vlm'; did you mean 'vllm'"),
        ({"engine_args": "--x"}, "--engine-args are vLLM's flags; give --engine vllm too"),
        ({"vllm_python": Path("p")}, "--vllm-python is where vLLM is installed; give --engine vllm too"),
    ],
)
def test_options_of_an_engine_need_the_engine(options, sentence):
    with pytest.raises(InputError) as refused:
        EngineOptions(**options)
    assert sentence in str(refused.value)


def test_pythons_without_vllm_are_refused(tmp_path):
    broken = tmp_path / "broken"
    broken.write_text("#!/bin/sh\nexit 3\n")
    broken.chmod(0o755)
    for place, sentence in (
        (tmp_path / "none", "and there is no program"),
        (tmp_path, "is a folder; its bin/python may be one"),
        (broken, "does not run as one"),
        (fake_python(tmp_path / "bare", package=None), "has no vLLM; install it in that environment"),
    ):
        with pytest.raises(InputError) as refused:
            VllmPython.of(place)
        assert sentence in str(refused.value)


def test_vllm_sees_nothing_of_our_python(python, monkeypatch):
    for name in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "LD_PRELOAD", "OUTRIDER_API_KEY"):
        monkeypatch.setenv(name, "/ours")
    library = python.prefix / "lib" / "libiomp5.so"
    library.parent.mkdir(exist_ok=True)
    library.touch()
    found = python.environment(threads=1)
    assert "/ours" not in found.values()
    assert found["LD_PRELOAD"] == str(library)
    assert found["PATH"].startswith(str(python.prefix / "bin"))
    assert len(found["VLLM_CPU_OMP_THREADS_BIND"].split(",")) == 1


def test_a_start_that_fails_tells_the_real_error_and_leaves_nothing(python):
    process = VllmProcess(python, Launch(target="t", engine_args=("--no-such",)))
    with pytest.raises(InputError, match=r"^vLLM did not start: no such layer$"), process:
        raise AssertionError
    assert not process.alive
    assert not process.folder.exists()


def test_vllm_takes_one_key_and_never_by_its_arguments(python):
    with pytest.raises(InputError, match="vLLM takes one key, and 2 were given"):
        VllmProcess(python, Launch(target="t"), keys=("a", "b"))
    for keys in (None, ("mine",), ()):
        with VllmProcess(python, Launch(target="t"), keys=keys) as process:
            seen = process.remote.get("/seen")
            key = seen["environment"].get("VLLM_API_KEY")
            assert (key == process.remote.key, key is None) == (True, keys == ())
            assert key not in seen["arguments"]
            assert keys != ("mine",) or key == "mine"


def test_errors_are_found_in_logs_without_addresses():
    log = (
        "INFO 11-24 23:00:00 [api.py:1] start\n"
        "(EngineCore pid=9) OSError: cannot load /a/b; see https://huggingface.co/docs for more\n"
        "(APIServer pid=8) RuntimeError: Engine core initialization failed. See root cause above.\n"
    )
    assert error_line(log) == "cannot load /a/b; see for more"
    assert error_line("vllm serve: error: unrecognized arguments: --no") == "unrecognized arguments: --no"
    assert error_line("all is well\n") is None
    assert last_words("(EngineCore pid=9) Terminated\n") == "Terminated"
