"""DistillSpec: a draft model distilled from its target against the same draft model trained on text (Zhou et al. 2023).

`python -m recipes distill --data TEXTS --work DIR --out DIR` trains a small draft model on text. Then it trains copies
of it further, each in its own way: on the texts or the target's answers to the same prompts, by the tokens alone or by
one of the divergences, on texts that the draft model itself writes. All have the same number of steps, rows and tokens.
Every way is run with several seeds. The drafters are judged on held-out prompts at temperatures 0 and 1.

`--target DIR --draft DIR` does the same with another pair, such as a real model and what `outrider prune shape` has cut
out of it.
"""

from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import PreTrainedModel

from outrider.learning.batch import Document
from outrider.learning.divergences import divergence
from outrider.lm.hf.generation_config import eos_ids
from outrider.lm.hf.open import open_model
from outrider.training.data.shards import Captured
from outrider.training.distill import Distilled
from outrider.training.on_policy import Sampler
from recipes import options, trained
from recipes.inquiry.papers import Paper
from recipes.trained import Budget, Contrast, Texts, Way, compare, kept_states

PAPER = Paper(name="Zhou et al. 2023, DistillSpec", url="https://arxiv.org/abs/2310.08461")
PUBLISHED = "10 to 45, in speed"
"""The paper's gain of distillation, in percent."""
DIVERGENCES = ("fkl", "rkl", "jsd", "tvd", "nla", "lk")
UNTRAINED = "not trained further"
HARD = "text, its tokens"
ON_POLICY, MIXED, FIXED = "own texts, fkl", "own texts and answers, fkl", "text, fkl"
QUICK = trained.QUICK | {"text_steps": 2}


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
            sampler = Sampler(seed=seed, share=share, eos_ids=sorted(eos_ids(target))) if share else None
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


CONTRASTS = (
    Contrast(
        PAPER,
        "Distillation emits more tokens per step than training on text",
        answered("fkl"),
        HARD,
        published=PUBLISHED,
    ),
    Contrast(PAPER, "Distillation on the text emits more tokens per step than training on it", FIXED, HARD),
    Contrast(PAPER, "The target's answers are better data than the text", answered("fkl"), FIXED),
    Contrast(PAPER, "The draft model's own texts are better data than the text", ON_POLICY, FIXED, published="mostly"),
    Contrast(
        PAPER, "The draft model's own texts are better data than the target's answers", ON_POLICY, answered("fkl")
    ),
    Contrast(PAPER, "A mix of both is better data than the target's answers", MIXED, answered("fkl")),
    *(
        Contrast(
            PAPER,
            f"{loss} emits more tokens per step than fkl",
            answered(loss),
            answered("fkl"),
            published="none is best",
        )
        for loss in DIVERGENCES[1:]
    ),
)


@options.with_fields(Budget, text_steps=500)
def main(budget: Budget) -> None:
    """Train and compare."""
    compare("distill", budget, ways, CONTRASTS, f", {budget.num_tokens:,} tokens, in each way")
