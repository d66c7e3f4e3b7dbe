"""What needs no model comes without torch, and an interrupt on the way is no traceback."""

import os
import re
import subprocess
import sys

import pytest

import outrider
from tests.cli.runs import ROOT, run, run_apart

HEAVY = ("torch", "transformers", "numpy")


def imported(report: str) -> set[str]:
    """The packages that `python -X importtime` says were imported."""
    return set(re.findall(r"^import time:.*\| +([a-z_]+)", report, re.MULTILINE))


@pytest.mark.parametrize(
    ("arguments", "status"),
    [
        (["--version"], 0),
        (["--help"], 0),
        (["generate", "--help"], 0),
        (["chat", "--help"], 0),
        (["prove", "--help"], 0),
        (["serve", "--help"], 0),
        (["serve", "--max-queue", "-1"], 2),
        (["doctor", "--help"], 0),
        (["methods", "--help"], 0),
        (["train", "--help"], 0),
        (["train", "data", "--help"], 0),
        (["train", "distill", "--help"], 0),
        (["prune", "--help"], 0),
        (["prune", "experts", "--help"], 0),
        (["prune", "shape", "--layers", "many"], 2),
        (["generate", "--no-such-option"], 2),
        (["no-such-command"], 2),
        (["generate", "--max-slots", "many"], 2),
        (["generate", "--max-slots", "0"], 2),
        (["generate", "--config", "/no/such/file"], 2),
        (["--show-completion", "bash"], 0),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_what_needs_no_model_comes_without_torch(arguments, status):
    # typer takes the shell by its name, so that no shell must be among the parents of this process.
    done = run_apart(*arguments, flags=("-X", "importtime"), _TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION="1")
    assert done.returncode == status, done.stderr[-2000:]
    assert "typer" in imported(done.stderr)
    assert not imported(done.stderr).intersection(HEAVY)


def test_words_are_completed_without_torch():
    asked = {"_OUTRIDER_COMPLETE": "complete_bash", "COMP_WORDS": "outrider generate --draf", "COMP_CWORD": "2"}
    done = run_apart(flags=("-X", "importtime"), **asked)
    assert done.stdout.split() == ["--drafter"]
    assert not imported(done.stderr).intersection(HEAVY)


def test_the_package_is_imported_without_torch_and_all_its_names_work():
    code = "import outrider, sys; print([m for m in ('torch', 'transformers', 'numpy') if m in sys.modules])"
    code += (
        "; from outrider import *; print(outrider.load, outrider.Sampling(seed=1).seed, outrider.integrate.generate)"
    )
    code += "; import outrider.load; outrider.load(verifier='blok')"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=300)
    lines = done.stdout.splitlines()
    assert lines[0] == "[]"
    assert re.match(r"<function load at .*> 1 <function generate at", lines[1])
    assert done.stderr.splitlines()[-1].startswith("outrider.core.inputs.InputError: unknown verifier 'blok'")


def test_every_public_name_has_a_home():
    assert all(getattr(outrider, name) is not None for name in outrider.__all__)
    assert set(outrider.__all__) <= set(dir(outrider))
    with pytest.raises(AttributeError, match="module 'outrider' has no attribute 'lode'"):
        _ = outrider.lode


@pytest.mark.parametrize("module", ["typer", "torch"])
def test_an_interrupt_while_importing_is_no_traceback(tmp_path, module):
    (tmp_path / f"{module}.py").write_text("raise KeyboardInterrupt")
    done = run_apart("generate", "--prompt", "Once", path=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "interrupted\n")


@pytest.mark.parametrize("command", ["generate", "chat", "prove", "doctor"])
def test_every_command_has_every_option_of_a_setup(monkeypatch, capsys, command):
    monkeypatch.setenv("COLUMNS", "300")
    out = run(monkeypatch, capsys, command, "--help")[1]
    absent = (
        {"--tree", "--verifier", "--length", "--decoding", "--allow-lossy", "--reproducible"}
        if command == "doctor"
        else set()
    )
    options = {f"--{name.replace('_', '-')}" for name in outrider.setup.KINDS} - absent
    assert options <= set(re.findall(r"--[a-z-]+", out))
    assert not absent.intersection(re.findall(r"--[a-z-]+", out))


def test_help_says_what_the_setup_says(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "400")
    out = " ".join(run(monkeypatch, capsys, "generate", "--help")[1].split())
    for text in outrider.setup.documentation(outrider.Setup).values():
        assert text.partition(" In Python")[0] in out


def test_the_package_says_that_it_is_typed():
    assert (ROOT / "outrider" / "py.typed").exists()
    assert os.path.getsize(ROOT / "outrider" / "py.typed") == 0
