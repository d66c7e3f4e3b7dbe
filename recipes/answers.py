"""The answers of a real target to prompts made of texts, for training heads: compressed token ids, shard by shard.

`python -m recipes answers --target DIR --texts train.jsonl.gz --out DIR` makes prompts of many kinds out of the texts:
questions, word problems, functions to complete or to explain, stories to continue, to summarise or to rewrite. The
target answers them, half of them greedily and half at temperature 1. A run that is stopped goes on behind its last
complete shard, also on another machine. `--jsonl FILE` writes all shards as the records that `outrider train` reads.

A shard holds the answers alone: prompts are made anew from the same texts, whose licences may not allow to keep them.
"""

import ast
import gzip
import json
import os
import random
import re
import sys
import textwrap
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from numpy.typing import NDArray

import outrider
from outrider.assembly import completed, tokenizer_of
from outrider.core import files
from outrider.core.progress import task
from outrider.core.types import InputError, Sampling
from outrider.engine.prompts import encode
from outrider.setup import Setup
from recipes import options

SHARD = 256
"""Prompts of a shard."""
LONGEST = 6
"""Most times that the characters of a prompt may exceed those of a short one."""
STORY_TASKS = (
    "Continue this story.\n\n{}",
    "Summarise this text in three sentences.\n\n{}",
    "Rewrite this text for an adult reader.\n\n{}",
    "List the main events of this text as bullet points.\n\n{}",
    "Write a letter from one person in this text to another.\n\n{}",
    "What can be learnt from this text? Explain step by step.\n\n{}",
)
CODE_TASKS = (
    "Complete this Python function.\n```python\n{}```",
    "Explain what this Python function does.\n```python\n{}```",
    "Rewrite this Python function so that it is easier to read.\n```python\n{}```",
    "Write tests for this Python function.\n```python\n{}```",
)
QUESTION = re.compile(r"<\|user\|>(.*?)\n?<\|assistant\|>", re.DOTALL)
QUICK = {"num_shards": 1, "max_new_tokens": 4}


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A prompt and how it is answered.

    Attributes:
        text: One message of a user.
        temperature: At which the answer is drawn.
    """

    text: str
    temperature: float


def asked(texts: Path) -> list[Asked]:
    """All prompts that a file of texts gives, in an order that depends on the file alone."""
    found = sorted(set(_prompts(texts)))
    random.Random(0).shuffle(found)
    return [Asked(text=text, temperature=float(i % 2)) for i, text in enumerate(found)]


def _prompts(texts: Path) -> Iterator[str]:
    with gzip.open(texts, "rt", encoding="utf-8") as file:
        for n, line in enumerate(file):
            record = json.loads(line)
            domain, text = record["domain"], record["text"]
            if domain == "story":
                beginning = text[: 300 * (1 + n % LONGEST)]
                yield STORY_TASKS[n % len(STORY_TASKS)].format(beginning[: beginning.rfind(" ")])
            elif domain == "python":
                yield from _of_code(text)
            else:
                question = QUESTION.search(text)
                if question is not None and len(question[1]) > 20:
                    yield question[1].strip()


def _of_code(text: str) -> Iterator[str]:
    """Functions to complete, and whole ones to work on."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return
    lines = text.splitlines()
    for n, node in enumerate(ast.walk(tree)):
        if not isinstance(node, ast.FunctionDef) or node.end_lineno is None or node.end_lineno - node.lineno < 3:
            continue
        whole = textwrap.dedent("\n".join(lines[node.lineno - 1 : node.end_lineno])) + "\n"
        task = CODE_TASKS[n % len(CODE_TASKS)]
        if task is CODE_TASKS[0]:
            whole = "".join(whole.splitlines(keepends=True)[: 2 + n % 3])
        if len(whole) < 1500:
            yield task.format(whole)


def chat(prompt: Asked) -> list[dict[str, str]]:
    """A prompt as the messages of a chat."""
    return [{"role": "user", "content": prompt.text}]


def answered(engine: outrider.Engine, prompts: Sequence[Asked], seed: int, max_new_tokens: int) -> list[list[int]]:
    """The token ids of the answers to a shard of prompts."""
    sampling = [Sampling(temperature=each.temperature, seed=seed + i) for i, each in enumerate(prompts)]
    with task("answers", len(prompts), "answers") as bar:
        outputs = engine.generate(
            list(map(chat, prompts)),
            max_new_tokens=max_new_tokens,
            sampling=sampling,
            progress=lambda _: bar.advance(),
        )
    return [list(out.tokens) for out in outputs]


def write_shard(place: Path, answers: Sequence[Sequence[int]]) -> None:
    """Keep the answers to a shard of prompts."""
    ids = np.concatenate([np.asarray(each, np.int64) for each in answers])
    small = ids.astype(np.uint16 if ids.max() < 1 << 16 else np.uint32)
    with files.replaced(place) as fresh, fresh.open("wb") as file:
        np.savez_compressed(file, ids=small, counts=np.array([len(each) for each in answers], np.uint16))


def read_shard(place: Path) -> list[NDArray[np.int64]]:
    """The answers of a shard."""
    with np.load(place) as found:
        return np.split(found["ids"].astype(np.int64), np.cumsum(found["counts"])[:-1])


def main(
    texts: Annotated[Path, typer.Option(help="JSON lines with `domain` and `text`, gzipped.")],
    out: Annotated[Path, typer.Option(help="Folder of the shards.")],
    target: options.Target = None,
    num_shards: Annotated[int, typer.Option(min=1, help=f"Shards of {SHARD} answers that shall be there.")] = 100,
    first_shard: Annotated[
        int, typer.Option(min=0, help="Where to begin, so that two processes can share the work.")
    ] = 0,
    max_new_tokens: options.MaxNewTokens = 256,
    max_slots: Annotated[int, typer.Option(min=1, help="Answers at once.")] = 32,
    activations: Annotated[
        str, typer.Option(help="`int8` is faster with packed weights, and a little off.")
    ] = "bfloat16",
    jsonl: Annotated[Path | None, typer.Option(help="Also write all shards as records for training.")] = None,
) -> None:
    """Make the missing shards."""
    if not texts.is_file():
        raise InputError(f"there is no file {texts}; give JSON lines with `domain` and `text`, gzipped")
    prompts = asked(texts)
    num_shards = min(num_shards, len(prompts) // SHARD)
    out.mkdir(parents=True, exist_ok=True)
    places = [out / f"{n:04}.npz" for n in range(num_shards)]
    missing = [n for n, place in enumerate(places) if n >= first_shard and not place.exists()]
    if missing:
        engine = outrider.load(target, drafter="none", max_slots=max_slots, max_context=2048, activations=activations)
    for n in missing:
        place = places[n]
        began, shard = time.perf_counter(), prompts[n * SHARD : (n + 1) * SHARD]
        answers = answered(engine, shard, n * SHARD, max_new_tokens)
        write_shard(place, answers)
        count, seconds = sum(map(len, answers)), time.perf_counter() - began
        print(f"{place.name}: {count} tokens in {seconds:.0f} s", file=sys.stderr, flush=True)
    if jsonl is not None:
        tokenizer = tokenizer_of(completed(Setup(target)))
        with files.replaced(jsonl) as fresh, fresh.open("w", encoding="utf-8") as file:
            for n, place in enumerate(places):
                if not place.exists():
                    continue
                for each, answer in zip(prompts[n * SHARD :], read_shard(place), strict=False):
                    prompt = encode(chat(each), tokenizer)
                    record = {"tokens": [*prompt, *answer.tolist()], "start": len(prompt)}
                    file.write(json.dumps(record) + os.linesep)
