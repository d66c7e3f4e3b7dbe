"""Whether texts stay the same whatever drafts, batches and threads there are, and how they leave the float32 model.

`python -m recipes same_texts --target FILE.gguf --prompts PROMPTS.jsonl --drafters suffix,ngram` lets the target answer
with each drafter, one request at a time and in batches, with one thread and with two. Each text is compared with the
one of plain decoding, one request at a time, one thread: one that differs in any token is counted, and its first
difference shown. Then the float32 model of the same file reads the plain texts. Where its likeliest token is another,
the gap says by how much its logit is higher: a tie to within the rounding of the target's forwards is a small gap.

Threads are set as a process starts, so each number of them has a process of its own. Nothing is timed.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

import outrider
from outrider.bench.evidence import Row
from outrider.bench.folder import folder
from outrider.bench.report import Findings, Table
from outrider.bench.workloads.workload import PROMPTS
from outrider.core.progress import shown, task
from outrider.core.types import Sampling
from outrider.engine.prompts import encode
from outrider.lm.hf.open import open_model, open_tokenizer
from recipes import options
from recipes.fresh import row_of
from recipes.questions import read_prompts

SLOTS = 4
"""Requests of a batch."""
PLAIN = "none"
OF_WAY = ("drafter", "batch", "threads")
"""What one way differs from another in."""
PROGRAM = "import sys; from recipes.same_texts import print_texts; print_texts(sys.argv[1])"
"""What a fresh process runs."""
SHOWN = 5
"""Differences that are shown."""
QUICK = {"num_prompts": 2, "max_new_tokens": 8, "threads": "1", "drafters": "suffix"}


def print_texts(asked: str) -> None:
    """Print the tokens of all answers as JSON: by drafter and batch.

    Args:
        asked: JSON: `target`, `drafters`, `prompts` as token ids, `max_new_tokens`, `temperature`.
    """
    wanted = json.loads(asked)
    prompts = wanted["prompts"]
    samplings = [Sampling(temperature=wanted["temperature"], seed=seed) for seed in range(len(prompts))]
    found: list[dict[str, Any]] = []
    with shown(), task("texts", 2 * len(wanted["drafters"]) * len(prompts), "texts") as bar:
        for drafter in wanted["drafters"]:
            # A length that depends on costs would depend on the clock.
            engine = outrider.load(wanted["target"], drafter=drafter, length="fixed:5", max_slots=SLOTS, probe=False)
            for size in (1, SLOTS):
                texts, drafted = [], 0
                for first in range(0, len(prompts), size):
                    chunk = slice(first, first + size)
                    outputs = engine.generate(
                        prompts[chunk], max_new_tokens=wanted["max_new_tokens"], sampling=samplings[chunk]
                    )
                    texts += [output.tokens for output in outputs]
                    drafted += sum(output.num_accepted_tokens for output in outputs)
                    bar.advance(len(outputs))
                found.append({"drafter": drafter, "batch": size, "texts": texts, "accepted": drafted})
    print(json.dumps({"forward": getattr(engine.parts.target, "forward", "-"), "texts": found}))


def differences(rows: Sequence[Row], *, greedy: bool = True) -> list[Row]:
    """The texts that differ from those of plain decoding, one request at a time, in the first process.

    Args:
        greedy: Whether texts are greedy. Texts that are drawn depend on the drafter, so they are compared with those of
            the same drafter.

    Example:
        >>> plain = {"drafter": "none", "batch": 1, "threads": 1, "texts": [[5, 6], [7, 8]]}
        >>> differences([plain, plain | {"drafter": "suffix", "texts": [[5, 6], [7, 9]]}])
        [{'drafter': 'suffix', 'batch': 1, 'threads': 1, 'prompt': 1, 'token': 1}]
    """
    found = []
    for row in rows:
        base = next(each for each in rows if greedy or each["drafter"] == row["drafter"])
        for i, (text, other) in enumerate(zip(base["texts"], row["texts"], strict=True)):
            if text != other:
                token = next(k for k in range(len(text) + 1) if text[: k + 1] != other[: k + 1])
                found.append({name: row[name] for name in OF_WAY} | {"prompt": i, "token": token})
    return found


@torch.inference_mode()
def gaps(target: str, prompts: Sequence[Sequence[int]], texts: Sequence[Sequence[int]]) -> list[Row]:
    """Where greedy texts leave the float32 model of the same weights: for each text that does, its first such token,
    and how much higher the model's likeliest logit is there.
    """
    model, found = open_model(target, dtype="float32"), []
    for i, (prompt, text) in enumerate(zip(prompts, texts, strict=True)):
        logits = model(torch.tensor([[*prompt, *text]])).logits[0, len(prompt) - 1 : -1]
        here = logits.gather(1, torch.tensor(text, dtype=torch.long)[:, None])[:, 0]
        gap = logits.amax(1) - here
        if (apart := gap > 0).any():
            token = int(apart.nonzero()[0])
            found.append({"prompt": i, "token": token, "gap": float(gap[token])})
    return found


def findings(target: str, rows: Sequence[Row], apart: Sequence[Row], left: Sequence[Row] | None) -> Findings:
    """A line for each way, and what differed."""
    lines = []
    for row in rows:
        own = [each for each in apart if all(each[name] == row[name] for name in OF_WAY)]
        lines.append(
            [row["drafter"], row["batch"], row["threads"], row["accepted"], f"{len(own)} of {len(row['texts'])}"]
        )
    head = ("drafter", "requests at once", "threads", "accepted draft tokens", "texts that differ")
    count = sum(len(row["texts"]) for row in rows) - len(rows[0]["texts"])
    text = f"{Path(target).name}, {rows[0]['forward']} forwards: {len(apart)} of {count} texts differ."
    text += "".join(
        f"\n{each['drafter']}, {each['batch']} at once, {each['threads']} threads: prompt {each['prompt']} from token "
        f"{each['token']}"
        for each in apart[:SHOWN]
    )
    if left is not None:
        text += f"\nOf {len(rows[0]['texts'])} plain texts, {len(left)} leave the float32 model's"
        text += "; token and gap of its logits: " * bool(left)
        text += ", ".join(f"{each['token']} ({each['gap']:.3f})" for each in left) + "."
    return Findings(tables=[Table(head=head, lines=lines)], text=text)


def main(
    target: Annotated[str, typer.Option(help="Directory, GGUF file or hub id of the target.")],
    out: options.Out = None,
    prompts: options.Prompts = PROMPTS,
    num_prompts: options.NumPrompts = 10,
    max_new_tokens: options.MaxNewTokens = 64,
    drafters: Annotated[str, typer.Option(help="Drafters, with semicolons between them.")] = "suffix;ngram",
    threads: Annotated[str, typer.Option(help="Numbers of threads.")] = "1,2",
    temperature: Annotated[float, typer.Option(min=0.0, help="Above 0, texts are drawn with seeds.")] = 0.0,
    reference: Annotated[bool, typer.Option(help="Compare with the float32 model too.")] = True,
) -> None:
    """Count the texts that differ."""
    if (tokenizer := open_tokenizer(target)) is None:
        raise outrider.InputError(f"{target} has no tokenizer")
    ids = [encode(prompt, tokenizer) for _, _, prompt in read_prompts(prompts)[:num_prompts]]
    names = [PLAIN, *(name.strip() for name in drafters.split(";") if name.strip())]
    wanted: dict[str, Any] = {"target": target, "drafters": names, "prompts": ids}
    wanted |= {"max_new_tokens": max_new_tokens, "temperature": temperature}
    with folder(out, "same_texts", {**wanted, "prompts": str(prompts), "threads": threads}) as place:
        rows: list[Row] = []
        numbers = options.whole_numbers("--threads", threads)
        with task("processes", len(numbers), "processes") as bar:
            for number in numbers:
                printed = row_of(["-c", PROGRAM, json.dumps(wanted)], number)
                for each in printed["texts"]:
                    turn = f"{each['drafter']}, {each['batch']} at once, {number} threads"
                    rows.append({"phase": "texts", "turn": turn, "threads": number, **each})
                    rows[-1]["forward"] = printed["forward"]
                    place.add(rows[-1])
                bar.advance()
        left = gaps(target, ids, rows[0]["texts"]) if reference and temperature == 0 else None
        apart = differences(rows, greedy=temperature == 0)
        place.finish(findings(target, rows, apart, left))
    if apart:
        raise typer.Exit(1)
