"""SD2: a draft model steered by the target's hidden states against distillation alone (Berdoz et al. 2025).

`python -m recipes steer --data TEXTS --work DIR --out DIR` begins with the draft model that `recipes distill` trains on
text. One copy of it is distilled, one is distilled together with a module that steers it. Of two further copies, which
stay as they are, one is steered. All have the same number of steps, rows and tokens.
"""

from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import PreTrainedModel

from outrider.bench.claims import Claim, Paper
from outrider.bench.evidence import Row, Sums
from outrider.bench.folder import folder
from outrider.bench.report import Findings
from outrider.drafters.steering import usual_taps
from outrider.host.threads import use_threads
from outrider.learning.divergences import divergence
from outrider.learning.learner import Learner
from outrider.lm.hf.open import open_model
from outrider.training.data.capture import capture
from outrider.training.data.shards import Contents
from outrider.training.distill import Distilled
from outrider.training.steer import steered_learner
from recipes import options
from recipes.distill import SHAPE
from recipes.trained import (
    DEPTH,
    TEMPERATURES,
    Budget,
    Texts,
    Way,
    against,
    efficiencies,
    embedded_target,
    made,
)

PAPER = Paper(name="Berdoz et al. 2025, SD2", url="https://arxiv.org/abs/2511.09844")
PUBLISHED = {0: "up to 22", 1: "up to 35"}
"""The paper's gain in accepted tokens over distillation, in percent, by temperature."""
DISTILLED, STEERED = "distilled", "distilled and steered"
FROZEN, FROZEN_STEERED = "frozen", "frozen and steered"
QUICK = {"num_texts": 24, "steps": 2, "text_steps": 2, "num_prompts": 4, "length": 48, "batch_size": 4, "seeds": 1}


def ways(base: Path, target: PreTrainedModel, texts: Texts, budget: Budget) -> list[Way]:
    """The draft model with and without steering, learning and frozen."""
    layers = target.config.num_hidden_layers
    states = capture(target, texts.answers, Contents(taps=tuple(sorted({*usual_taps(layers), layers}))))

    batches = budget.batches(texts.answers, states)

    def plain(seed: int) -> Learner:
        return Distilled(open_model(str(base), dtype=torch.float32, device="cpu"), target, loss=divergence("fkl"))

    def steered(frozen: bool) -> Way:
        def learner(seed: int) -> Learner:
            return steered_learner(
                str(base),
                target,
                None,
                loss="fkl",
                num_speculative_tokens=DEPTH,
                device=torch.device("cpu"),
                frozen=frozen,
                seed=seed,
            )

        name = FROZEN_STEERED if frozen else STEERED
        return Way(name=name, learner=learner, batches=batches, settings=budget.settings)

    return [
        Way(name=FROZEN, learner=plain),
        Way(name=DISTILLED, learner=plain, batches=batches, settings=budget.settings),
        steered(frozen=False),
        steered(frozen=True),
    ]


def findings(rows: Sequence[Row], about: str) -> Findings:
    """The table and the claims."""
    sums = Sums(rows, crossed=True)
    claims: list[Claim] = []
    for t in TEMPERATURES:
        sentence = "Steering and distillation emit more tokens per step than distillation alone"
        claims.append(
            against(
                PAPER,
                sums,
                sentence,
                STEERED,
                DISTILLED,
                t,
                published=PUBLISHED[t],
                note="the paper's figure is the gain in accepted tokens",
            )
        )
        sentence = "A frozen draft model emits more tokens per step when it is steered"
        note = "the paper doubles the accepted tokens for Vicuna-7B with a draft model of 160M"
        claims.append(against(PAPER, sums, sentence, FROZEN_STEERED, FROZEN, t, published="up to 100", note=note))
    return Findings(tables=[efficiencies(sums, sums.methods, rows)], claims=claims, text=about)


def main(
    data: options.Data,
    work: options.Work,
    prompts: options.Prompts,
    out: options.Out = None,
    num_texts: options.NumTexts = 3000,
    length: options.Length = 128,
    steps: options.Steps = 150,
    text_steps: options.TextSteps = 500,
    batch_size: options.NumRows = 8,
    learning_rate: options.LearningRate = 1e-3,
    seeds: options.Seeds = 3,
    num_prompts: options.NumPrompts = 1000,
    threads: options.Threads = 1,
) -> None:
    """Train and compare."""
    use_threads(threads)
    budget = Budget(
        num_texts=num_texts,
        length=length,
        steps=steps,
        batch_size=batch_size,
        learning_rate=learning_rate,
        seeds=seeds,
        num_prompts=num_prompts,
        text_steps=text_steps,
    )
    with folder(out, "steer", {**vars(budget), "out": out}) as place:
        texts = budget.texts(work, data, prompts)
        found = ways(budget.draft(work, texts, SHAPE), embedded_target(), texts, budget)
        rows = made(place, found, seeds, texts, work / "steer")
        about = (
            f"A draft model of {SHAPE['num_hidden_layers']} layer of width {SHAPE['hidden_size']}, first trained on "
            f"{budget.num_text_tokens:,} tokens of text, then {steps} steps of {batch_size} rows of the target's "
            f"answers, with {seeds} seeds. Held-out prompts: {Sums(rows).num_prompts}."
        )
        place.finish(findings(rows, about))
