"""What holds for every head of the catalog that is trained, with its default options: no head is named here."""

import json
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import PreTrainedModel

import outrider
from outrider import catalog
from outrider.core.option import bounds_of
from outrider.core.types import InputError, Sampling
from outrider.heads.objective import HeadContext, HeadObjective
from outrider.heads.spec import HeadSpec
from outrider.learning.options import LOSS, SIZE
from outrider.lm.model import LanguageModel
from outrider.lm.target_info import TargetInfo
from outrider.proof.rule import law_error
from outrider.setup import documentation
from outrider.training.loop.settings import TrainSettings
from outrider.training.loop.steps import FOLDER, train
from outrider.training.loop.watch import Evaluation
from tests.cli.runs import run
from tests.world.forced import forced_guesses
from tests.world.heads import TRAINED
from tests.world.learners import batch, documents, moved, repeated
from tests.world.packed import packed
from tests.world.tables import tables
from tests.world.verifiers import verifier
from tests.world.zoo import tiny

DEPTH = 3
SETTINGS = TrainSettings(
    steps=4, batch_size=3, max_length=24, learning_rate=3e-3, warmup=2, save_every=2, watch_every=4, log_every=1
)
every_head = pytest.mark.parametrize("kind", TRAINED)


def spec_of(kind: str) -> HeadSpec:
    return catalog.rows("drafter")[kind].kind


def target() -> PreTrainedModel:
    return tiny("llama").float().requires_grad_(False)


def learner(kind: str, **options: Any) -> HeadObjective:
    spec = spec_of(kind)
    return spec.learner(spec.options(**options), HeadContext(target=target(), documents=documents(), depth=DEPTH))


def weights(objective: HeadObjective) -> Mapping[str, torch.Tensor]:
    return objective.head.state_dict()


def same(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() != set() and all(torch.equal(one[name], other[name]) for name in one)


@every_head
def test_a_head_that_is_written_is_recognised_and_guesses_the_same_when_read(kind, tmp_path):
    objective, text = moved(learner(kind)), documents(1)[0].tokens.tolist()
    objective.write(tmp_path)
    path = catalog.make("drafter", str(tmp_path))
    assert catalog.name_of(path) == kind
    lm = LanguageModel(target(), max_slots=2)
    around = TargetInfo.of(lm, None)
    read = forced_guesses(path.bind(around), lm, text, 4, DEPTH)
    here = forced_guesses(spec_of(kind).drafter.of(objective.head, around, path), lm, text, 4, DEPTH)
    assert read.keys() == here.keys() != set()
    for place, row in here.items():
        torch.testing.assert_close(read[place], row, rtol=1e-5, atol=1e-5)


@every_head
def test_a_written_head_drafts_greedily_what_plain_decoding_says(kind, tmp_path):
    drafts_as_plain_decoding(kind, target(), tmp_path)


@every_head
def test_a_written_head_drafts_for_packed_weights_what_plain_decoding_says(kind, tmp_path):
    drafts_as_plain_decoding(kind, packed(target()), tmp_path)


def drafts_as_plain_decoding(kind, model, tmp_path):
    learner(kind).write(tmp_path)
    engine = outrider.load(model, drafter=str(tmp_path), length=f"fixed:{DEPTH}")
    prompts, greedy = [text.tokens[:7].tolist() for text in documents(3)], Sampling(temperature=0.0)
    drafted = engine.generate(prompts, max_new_tokens=12, sampling=greedy)
    assert sum(out.num_draft_tokens for out in drafted) > 0
    plain = engine.plain().generate(prompts, max_new_tokens=12, sampling=greedy)
    assert [out.tokens for out in drafted] == [out.tokens for out in plain]


@every_head
def test_sampling_with_a_written_head_keeps_the_law(kind, tmp_path):
    learner(kind).write(tmp_path)
    drafter = catalog.make("drafter", str(tmp_path)).bind(TargetInfo.of(LanguageModel(target(), max_slots=1), None))
    errors = {
        rule: law_error(tables(2, verifier(rule), drafter=drafter.on_tables(2, seed=1)))
        for rule in ("block", "lenient")
    }
    assert errors["block"] < 1e-12, errors
    assert errors["lenient"] > 1e-3, errors


@every_head
def test_the_loss_falls_in_twenty_steps(kind, tmp_path):
    objective = learner(kind)
    with torch.no_grad():
        first = objective(batch())
    more = asdict(SETTINGS) | {"steps": 20, "keep_best": False}
    train(objective, repeated(batch()), TrainSettings(**more), tmp_path)
    with torch.no_grad():
        last = objective(batch())
    assert float(last.total / last.weight) < 0.95 * float(first.total / first.weight), (first, last)


@every_head
def test_a_run_that_stopped_goes_on_bit_for_bit(kind, tmp_path):
    watch = Evaluation(documents(4), depth=DEPTH - 1, max_length=24)
    train(learner(kind), repeated(batch()), SETTINGS, tmp_path / "alone", watch)
    stopped, forward = learner(kind), type(learner(kind)).forward

    def stopping(train_batch):
        if train_batch.step == 3:
            raise KeyboardInterrupt
        return forward(stopped, train_batch)

    stopped.forward = stopping
    with pytest.raises(KeyboardInterrupt):
        train(stopped, repeated(batch()), SETTINGS, tmp_path / "stopped", watch)
    # The weights come from the checkpoint.
    train(moved(learner(kind)), repeated(batch()), SETTINGS, tmp_path / "stopped", watch)
    assert same(*(load_file(tmp_path / each / "model.safetensors") for each in ("alone", "stopped")))
    logs = [(tmp_path / each / FOLDER / "log.jsonl").read_text().splitlines() for each in ("alone", "stopped")]
    assert [json.loads(line).get("loss") for line in logs[0]] == [json.loads(line).get("loss") for line in logs[1]]


@every_head
def test_a_head_on_disk_trains_further_and_says_its_sizes_itself(kind, tmp_path):
    objective = moved(learner(kind))
    objective.write(tmp_path)
    assert same(weights(learner(kind, init_from=str(tmp_path))), weights(objective))
    options = spec_of(kind).options
    sizes = options.of_kinds(SIZE)
    fixed = {each.name: each.default for each in fields(options) if each.name in sizes}
    for name, value in fixed.items():
        with pytest.raises(InputError, match=f"^{name}: the head in {tmp_path} says it; leave it out"):
            # A size at its default counts too where options come by name, as from a command line.
            options.of({"init_from": str(tmp_path), name: value})


def test_a_size_of_another_value_is_refused_beside_a_head_on_disk():
    with pytest.raises(InputError, match=r"^layers: the head in there says it; leave it out"):
        spec_of("medusa").options(init_from="there", layers=2).check()


@every_head
def test_what_a_run_must_keep_is_json_and_has_every_option_that_changes_the_head(kind):
    options = spec_of(kind).options
    identity = options(init_from="there").identity()
    assert json.loads(json.dumps(identity)) == identity
    assert identity.keys() == {name for name, bounds in bounds_of(options).items() if bounds.kind in (SIZE, LOSS)}
    assert identity["init_from"] == "there"


@every_head
def test_the_help_of_its_command_shows_every_option_with_its_words(kind, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "120")
    status, out, _ = run(monkeypatch, capsys, "train", kind, "--help")
    out, words = " ".join(out.split()), documentation(spec_of(kind).options)
    assert status == 0
    assert {each.name for each in fields(spec_of(kind).options)} <= words.keys()
    for name, about in words.items():
        assert f"--{name.replace('_', '-')}" in out, name
        assert " ".join(about.partition(" In Python")[0].split()) in out, name


@every_head
def test_an_option_that_does_not_fit_is_refused_before_anything_is_read(kind, monkeypatch, capsys, tmp_path: Path):
    place = tmp_path / "out"
    texts = ("--target", "nowhere", "--data", "nowhere", "--out", str(place))
    for wrong, message in (
        (("--divergence", "kl"), "unknown divergence 'kl'"),
        (("--no-such-option", "1"), "No such option: --no-such-option"),
    ):
        status, _, err = run(monkeypatch, capsys, "train", kind, *texts, *wrong)
        assert (status, message in " ".join(err.split())) == (2, True), err
    assert not place.exists()
