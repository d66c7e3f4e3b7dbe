"""Which shape of a draft model pays: wide and shallow against narrow and deep at equal parameters (Yan et al. 2024).

`python -m recipes shapes --data TEXTS --work DIR --out DIR` distils draft models of one size and several depths from
random weights, with equal steps, rows and tokens and several seeds. Their block efficiency on held-out prompts, for
drafts of 1 to 5 tokens, is divided by the measured seconds of a step. Each shape counts with its best length. The
timing wants a quiet machine. `--target DIR --cut` begins with what is cut out of a target, the parts that matter most
on the texts, instead of random weights.
"""

import copy
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from jaxtyping import Float
from transformers import AutoModelForCausalLM, PreTrainedModel

import outrider
from outrider.bench.evidence import IntervalEstimate, Row, Sums
from outrider.bench.folder import Folder
from outrider.bench.report import Findings, Table
from outrider.bench.turns import Turn, turns
from outrider.core.progress import task
from outrider.core.types import Sampling
from outrider.engine.engine import Engine
from outrider.host.threads import use_threads
from outrider.learning.divergences import divergence
from outrider.learning.learner import Learner
from outrider.lengths.fixed import FixedLength
from outrider.lm.forwards.packed import uncompiled
from outrider.lm.hf.open import open_config, open_model, open_tokenizer
from outrider.surgery.family import Sized, same_size
from outrider.surgery.importance import measure_importance
from outrider.surgery.reshape import prune_shape
from outrider.surgery.shape import config_of
from outrider.training.distill import Distilled
from recipes import options, trained
from recipes.inquiry.papers import Paper
from recipes.label import Label
from recipes.trained import (
    DEPTH,
    TEMPERATURES,
    Budget,
    Contrast,
    Texts,
    Way,
    contrasted,
    efficiencies,
    efficiency,
    kept_states,
    made,
    seeds_of,
)

PAPER = Paper(name="Yan et al. 2024, Decoding speculative decoding", url="https://arxiv.org/abs/2402.01528")
PUBLISHED = 111
"""The paper's gain in throughput over earlier draft models, in percent."""
CALIBRATION = 64
"""Answers of the target that say which of its parts matter."""
QUICK = trained.QUICK | {
    "layers": "1,4",
    "rounds": 1,
    "timed_threads": 1,
    "max_new_tokens": 6,
    "timed_prompts": 1,
}


def shapes(target: str, parameters: int, layers: Sequence[int]) -> dict[str, Sized]:
    """A shape for each number of layers, by its name."""
    found = same_size(open_config(target), parameters, layers)
    return {f"{sized.shape.layers} x {sized.shape.width}": sized for sized in found}


def ways(family: dict[str, Sized], target: PreTrainedModel, texts: Texts, budget: Budget, *, cut: bool) -> list[Way]:
    """Every shape, distilled on the target's answers.

    Args:
        cut: Begin with the parts of the target that matter most on the texts; otherwise with random weights.
    """
    batches = budget.batches(texts.answers, kept_states(target, texts.answers))
    read = [each.tokens.tolist() for each in texts.answers[:CALIBRATION]]
    parts: dict[str, PreTrainedModel] = {}
    if cut:
        with task("which parts of the target matter", sum(map(len, read)), "tokens") as bar:
            importance = measure_importance(target, read, bar.advance)
        for name, sized in family.items():
            parts[name] = prune_shape(target, read, sized.shape, importance=importance).model

    def begin(name: str, sized: Sized, seed: int) -> PreTrainedModel:
        if cut:
            return copy.deepcopy(parts[name])
        torch.manual_seed(seed)
        fresh: PreTrainedModel = AutoModelForCausalLM.from_config(config_of(target.config, sized.shape))
        return fresh.float()

    def way(name: str, sized: Sized) -> Way:
        def learner(seed: int) -> Learner:
            return Distilled(begin(name, sized, seed).requires_grad_(True), target, loss=divergence("fkl"))

        return Way(name=name, learner=learner, batches=batches, settings=budget.settings)

    return [way(name, sized) for name, sized in family.items()]


def timed(
    place: Folder,
    target: str,
    family: dict[str, Sized],
    drafters: Path,
    *,
    rounds: int,
    num_tokens: int,
    num_prompts: int,
) -> list[Row]:
    """Seconds of a step of every shape and length, in turns."""
    engines: dict[str, Engine] = {}
    model, tokenizer = open_model(target), open_tokenizer(target)
    shared: dict[str, Any] = {"tokenizer": tokenizer, "forward": uncompiled(model), "max_slots": 1}
    prompts = ["Once upon a time", "The little dog", "def main(", "Question: Tom has 5 apples."][:num_prompts]
    drawn = Sampling(temperature=0.0)

    def run(turn: Turn[Label, Label]) -> Row:
        shape, length = turn.way.value
        if shape not in engines:
            path = drafters / shape / "seed-0"
            engines[shape] = outrider.load(model, drafter=f"model:path={path}", length="fixed:5", **shared)
        engine = engines[shape]
        engine.parts = replace(engine.parts, length=FixedLength(num_speculative_tokens=length))
        each = []
        for prompt in prompts:
            began = time.perf_counter()
            [output] = engine.generate([prompt], max_new_tokens=num_tokens, sampling=drawn)
            each.append((time.perf_counter() - began) / max(1, output.num_steps))
        return {"shape": shape, "length": length, "seconds": statistics.median(each)}

    ways = [Label(f"{name}, {length}", (name, length)) for name in family for length in range(1, DEPTH + 1)]
    todo = turns(ways, seeds_of(rounds + 1), seed="timed")
    return [row for row in place.take("timed", todo, run) if not row["turn"].split(" | ")[1].endswith("-0")]


def speeds(sums: Sums, times: Sequence[Row], shape: str, temperature: int) -> Float[np.ndarray, " samples"]:
    """Tokens per second of a shape with its best length."""
    found = []
    for length in range(1, DEPTH + 1):
        seconds = [row["seconds"] for row in times if (row["shape"], row["length"]) == (shape, length)]
        found.append(efficiency(sums, shape, temperature, length) / statistics.median(seconds))
    best = int(np.argmax([each[0] for each in found]))
    return found[best]


def findings(rows: Sequence[Row], times: Sequence[Row], family: dict[str, Sized], about: str) -> Findings:
    """Tables and claims."""
    sums = Sums(rows, crossed=True)
    lines: list[Sequence[object]] = []
    by_depth = sorted(family, key=lambda name: family[name].shape.layers)
    for name in by_depth:
        steps = [1000 * row["seconds"] for row in times if (row["shape"], row["length"]) == (name, DEPTH)]
        line: list[object] = [name, f"{family[name].num_parameters:,}", f"{statistics.median(steps):.1f}"]
        line += [IntervalEstimate.of(speeds(sums, times, name, t)).text(".0f") for t in TEMPERATURES]
        lines.append(line)
    contrasts = [
        Contrast(
            PAPER,
            f"One wide layer is faster than {family[deep].shape.layers} narrow ones of equal size",
            by_depth[0],
            deep,
            published=PUBLISHED,
            note="each with its best length; the interval is that of block efficiency over medians of seconds",
        )
        for deep in by_depth[1:]
    ]
    claims = contrasted(contrasts, sums, lambda shape, t: speeds(sums, times, shape, t), unit="% of tokens per second")
    head = ("shape", "parameters", f"ms of a step, {DEPTH} tokens", *(f"tokens/s, T {t}" for t in TEMPERATURES))
    speed = Table(title="Tokens per second at the best length", head=head, lines=lines)
    return Findings(tables=[efficiencies(sums, by_depth, rows), speed], claims=claims, text=about)


@options.with_fields(Budget, without=("text_steps", "draft"), steps=400, learning_rate=3e-3)
def main(
    budget: Budget,
    parameters: Annotated[int, typer.Option(min=1, help="Parameters of every shape.")] = 3_300_000,
    layers: Annotated[str, typer.Option(help="Numbers of layers, with commas.")] = "1,2,4,12",
    rounds: options.Rounds = 3,
    max_new_tokens: options.MaxNewTokens = 48,
    timed_prompts: Annotated[int, typer.Option(min=1, max=4, help="Prompts that steps are timed on.")] = 4,
    timed_threads: Annotated[int, typer.Option(min=1, help="Threads while steps are timed.")] = 2,
    cut: Annotated[
        bool, typer.Option("--cut", help="Begin with parts of the target, not with random weights.")
    ] = False,
) -> None:
    """Train, time and compare."""
    given = {"layers": layers, "parameters": parameters, "max_new_tokens": max_new_tokens}
    given |= {"timed_prompts": timed_prompts, "timed_threads": timed_threads, "rounds": rounds}
    given |= {"cut": True} if cut else {}
    with budget.folder("shapes", **given) as place:
        texts, drafters = budget.texts(), budget.drafters("shapes-cut" if cut else "shapes")
        family, model = shapes(budget.target, parameters, options.whole_numbers("--layers", layers)), budget.model()
        judge = texts.with_states(model).judge
        rows = made(place, ways(family, model, texts, budget, cut=cut), budget.seeds, drafters, judge)
        use_threads(timed_threads)
        amounts = {"rounds": rounds, "num_tokens": max_new_tokens, "num_prompts": timed_prompts}
        times = timed(place, budget.target, family, drafters, **amounts)
        about = (
            f"Draft models distilled from {'parts of the target' if cut else 'random weights'} on "
            f"{budget.num_tokens:,} tokens of the target's "
            f"answers, with {budget.seeds} seeds. Held-out prompts: {Sums(rows).num_prompts}. Steps are timed with "
            f"{timed_threads} threads, in {rounds} rounds."
        )
        place.finish(findings(rows, times, family, about))
