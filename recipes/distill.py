"""DistillSpec: a draft model distilled from its target against the same draft model trained on text (Zhou et al. 2023).

`python -m recipes distill --data TEXTS --work DIR --out DIR` trains a small draft model on text. Then it trains copies
of it further, each in its own way: on the texts or the target's answers to the same prompts, by the tokens alone or by
one of the divergences, on texts that the draft model itself writes. All have the same number of steps, rows and tokens.
Every way is run with several seeds. The drafters are judged on held-out prompts at temperatures 0 and 1.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from transformers import PreTrainedModel

from outrider.bench.claims import Claim, Paper
from outrider.bench.evidence import Row, Sums
from outrider.bench.folder import folder
from outrider.bench.report import Findings
from outrider.host.threads import use_threads
from outrider.learning.batch import Document
from outrider.learning.divergences import divergence
from outrider.lm.hf.open import open_model
from outrider.training.data.shards import Captured
from outrider.training.distill import Distilled
from outrider.training.on_policy import Sampler
from recipes import options
from recipes.trained import (
    TEMPERATURES,
    Budget,
    Texts,
    Way,
    against,
    efficiencies,
    embedded_target,
    kept_states,
    made,
)

PAPER = Paper(name="Zhou et al. 2023, DistillSpec", url="https://arxiv.org/abs/2310.08461")
PUBLISHED = "10 to 45, in speed"
"""The paper's gain of distillation, in percent."""
SHAPE = {
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
}
DIVERGENCES = ("fkl", "rkl", "jsd", "tvd", "nla", "lk")
UNTRAINED = "not trained further"
HARD = "text, its tokens"
ON_POLICY, MIXED, FIXED = "own texts, fkl", "own texts and answers, fkl", "text, fkl"
QUICK = {"num_texts": 24, "steps": 2, "text_steps": 2, "num_prompts": 4, "length": 48, "batch_size": 4, "seeds": 1}


def answered(loss: str) -> str:
    """The name of the way that learns the target's answers by a divergence, or by their tokens."""
    return f"answers, {'their tokens' if loss == 'ce' else loss}"


def ways(base: Path, target: PreTrainedModel, texts: Texts, budget: Budget) -> list[Way]:
    """All ways to train the draft model further."""
    states = {id(documents): kept_states(target, documents) for documents in (texts.texts, texts.answers)}

    def way(name: str, documents: Sequence[Document], loss: str, share: float = 0.0) -> Way:
        captured: Captured | None = states[id(documents)] if share == 0 and loss != "ce" else None

        def learner(seed: int) -> Distilled:
            model = open_model(str(base), dtype=torch.float32, device="cpu")
            sampler = Sampler(seed=seed, share=share, eos_ids=[0]) if share else None
            return Distilled(model, target, loss=None if loss == "ce" else divergence(loss), sampler=sampler)

        return Way(name=name, learner=learner, batches=budget.batches(documents, captured), settings=budget.settings)

    untrained = way(UNTRAINED, texts.texts, "ce")
    return [
        Way(name=UNTRAINED, learner=untrained.learner),
        way(HARD, texts.texts, "ce"),
        way(FIXED, texts.texts, "fkl"),
        way(answered("ce"), texts.answers, "ce"),
        *(way(answered(loss), texts.answers, loss) for loss in DIVERGENCES),
        way(ON_POLICY, texts.texts, "fkl", share=1.0),
        way(MIXED, texts.answers, "fkl", share=0.5),
    ]


def findings(rows: Sequence[Row]) -> Findings:
    """The table and the claims."""
    sums = Sums(rows, crossed=True)
    claims: list[Claim] = []
    for t in TEMPERATURES:
        sentences = (
            ("Distillation emits more tokens per step than training on text", answered("fkl"), HARD, PUBLISHED),
            ("Distillation on the text emits more tokens per step than training on it", FIXED, HARD, None),
            ("The target's answers are better data than the text", answered("fkl"), FIXED, None),
            ("The draft model's own texts are better data than the text", ON_POLICY, FIXED, "mostly"),
            ("The draft model's own texts are better data than the target's answers", ON_POLICY, answered("fkl"), None),
            ("A mix of both is better data than the target's answers", MIXED, answered("fkl"), None),
            *(
                (
                    f"{loss} emits more tokens per step than fkl",
                    answered(loss),
                    answered("fkl"),
                    "none is best",
                )
                for loss in DIVERGENCES[1:]
            ),
        )
        claims += [against(PAPER, sums, said, ours, theirs, t, published=p) for said, ours, theirs, p in sentences]
    return Findings(tables=[efficiencies(sums, sums.methods, rows)], claims=claims)


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
    with folder(out, "distill", {**vars(budget), "out": out}) as place:
        texts = budget.texts(work, data, prompts)
        found = ways(budget.draft(work, texts, SHAPE), embedded_target(), texts, budget)
        rows = made(place, found, seeds, texts, work / "distill")
        about = (
            f"A draft model of {SHAPE['num_hidden_layers']} layer of width {SHAPE['hidden_size']}, first trained on "
            f"{budget.num_text_tokens:,} tokens of text, then {steps} steps of {batch_size} rows, "
            f"{budget.num_tokens:,} tokens, in each way, with {seeds} seeds. "
            f"Held-out prompts: {Sums(rows).num_prompts}."
        )
        place.finish(replace(findings(rows), text=about))
