"""The target answers a corpus through the engine; a run that is killed anywhere ends with the same file."""

import json
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pytest

from outrider.core.types import InputError, Sampling
from outrider.learning.batch import Document
from outrider.training.data.records import read_documents
from outrider.training.data.regenerate import AnswerOptions, Regenerated, regenerate
from tests.world.forked import telling
from tests.world.models import CONTEXT, engine

GREEDY = AnswerOptions(sampling=Sampling(temperature=0), max_new_tokens=6, prompt_tokens=4)


def corpus(count: int = 9) -> list[Document]:
    """Prompts with and without answers, of several lengths."""
    draws = np.random.default_rng(5)
    documents = [Document(tokens=draws.integers(3, 30, size=5 + n % 4), start=(0, 3, 5)[n % 3]) for n in range(count)]
    return [replace(each, domain="sea" if each.start else None) for each in documents]


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_answers_are_those_of_plain_decoding_and_can_be_learnt_from(tmp_path: Path) -> None:
    out, documents = tmp_path / "out.jsonl", corpus()
    done = regenerate(engine("model", max_slots=3), documents, out, GREEDY)
    prompts = [document.tokens[: document.start or 4].tolist() for document in documents]
    plain = engine("none").generate(prompts, max_new_tokens=6, sampling=Sampling(temperature=0))
    assert [line["number"] for line in lines(out)] == list(range(9))
    assert [line["tokens"] for line in lines(out)] == [
        prompt + output.tokens for prompt, output in zip(prompts, plain, strict=True)
    ]
    read = read_documents(out, None)
    assert [(d.start, d.domain) for d in read] == [(len(p), d.domain) for p, d in zip(prompts, documents, strict=True)]
    assert (done.num_prompts, done.num_kept, done.num_answers, done.num_tokens) == (9, 0, 9, 54)


def test_a_sampled_answer_depends_on_its_prompts_number_and_the_seed_alone(tmp_path: Path) -> None:
    def made(name: str, slots: int, seed: int) -> list[list[int]]:
        generation = replace(GREEDY, sampling=Sampling(temperature=1, seed=seed), max_new_tokens=12)
        same = [Document(tokens=np.array([7, 8, 9]), start=3)] * 6
        regenerate(engine("ngram", max_slots=slots), same, tmp_path / name, generation)
        return [line["tokens"] for line in lines(tmp_path / name)]

    few = made("few", 1, 3)
    assert few == made("many", 4, 3)
    assert few != made("other", 4, 4)
    assert len({tuple(tokens) for tokens in few}) > 1


def test_a_file_cut_anywhere_is_completed_to_the_same_bytes(tmp_path: Path) -> None:
    out, used = tmp_path / "out.jsonl", engine("ngram", max_slots=4)
    regenerate(used, corpus(), out, GREEDY)
    whole = out.read_bytes()
    seen: list[int] = []
    for end in [0, 1, 5, len(whole) // 2, len(whole) - 1, len(whole)]:
        out.write_bytes(whole[:end])
        seen.clear()
        done = regenerate(used, corpus(), out, GREEDY, progress=lambda run: seen.append(run.num_done))
        assert out.read_bytes() == whole, end
        assert done.num_kept == whole[:end].count(b"\n")
        assert seen == list(range(done.num_kept, 10))


def answering(said: Connection, out: Path) -> None:
    """Answer prompts, and tell how many are answered."""
    regenerate(engine("ngram", max_slots=4), corpus(24), out, GREEDY, progress=lambda run: said.send(run.num_answers))


def test_a_process_killed_in_the_middle_ends_with_the_same_file(tmp_path: Path) -> None:
    regenerate(engine("ngram", max_slots=4), corpus(24), tmp_path / "whole.jsonl", GREEDY)
    out = tmp_path / "out.jsonl"
    with telling(answering, out) as (_, told):
        while told.recv() != 7:
            pass
    assert 7 <= out.read_bytes().count(b"\n") < 24
    regenerate(engine("ngram", max_slots=4), corpus(24), out, GREEDY)
    assert out.read_bytes() == (tmp_path / "whole.jsonl").read_bytes()


def test_other_settings_and_other_prompts_are_refused_and_the_file_stays(tmp_path: Path) -> None:
    out, used = tmp_path / "out.jsonl", engine("none", max_slots=4)
    regenerate(used, corpus(4), out, GREEDY)
    before = out.read_bytes()
    warm = replace(GREEDY, sampling=Sampling(temperature=0.5))
    for generation, documents, words in [
        (warm, corpus(4), r"line 1 of .*out\.jsonl was made with temperature=0 and not 0\.5; give another file"),
        (replace(GREEDY, max_new_tokens=7), corpus(4), "was made with max_new_tokens=6 and not 7"),
        (GREEDY, corpus(4)[::-1], "line 1 of .* answers another prompt than number 0 of this corpus"),
        (GREEDY, corpus(4)[:3], "line 4 of .* answers another prompt than number 3 of this corpus"),
    ]:
        with pytest.raises(InputError, match=words):
            regenerate(used, documents, out, generation)
        assert out.read_bytes() == before
    out.write_text('{"text": "a fish"}\n')
    with pytest.raises(InputError, match=r"line 1 of .* is no answer of `outrider train data`"):
        regenerate(used, corpus(4), out, GREEDY)
    assert out.read_text() == '{"text": "a fish"}\n'


def test_a_prompt_that_cannot_run_is_counted_and_the_others_are_answered(tmp_path: Path) -> None:
    long = Document(tokens=np.full(CONTEXT, 5), start=CONTEXT)
    out = tmp_path / "new" / "out.jsonl"
    done = regenerate(engine("none"), [corpus()[0], long, corpus()[1]], out, GREEDY)
    assert list(done.failed) == [1]
    assert "shorten it" in str(done.failed[1])
    assert [line["number"] for line in lines(out)] == [0, 2]
    with pytest.raises(InputError, match="no prompt could be answered; prompt 0: the prompt has 256 tokens"):
        regenerate(engine("none"), [long], tmp_path / "none.jsonl", GREEDY)


def test_an_interrupt_leaves_the_engine_idle_and_the_answers_on_disk(tmp_path: Path) -> None:
    used, out = engine("none", max_slots=2), tmp_path / "out.jsonl"

    def stop(run: Regenerated) -> None:
        if run.num_answers == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        regenerate(used, corpus(), out, GREEDY, progress=stop)
    assert not used.busy
    assert len(lines(out)) == 3


def test_wrong_wishes_are_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="max_new_tokens must be >= 1, got 0"):
        AnswerOptions(max_new_tokens=0)
    with pytest.raises(InputError, match="without logits processors"):
        AnswerOptions(sampling=Sampling(logit_bias={3: 1.0}))
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"file/out\.jsonl cannot be written: "):
        regenerate(engine("none"), corpus(), tmp_path / "file" / "out.jsonl", GREEDY)
