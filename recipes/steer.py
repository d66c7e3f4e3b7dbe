"""SD2: a draft model steered by the target's hidden states against distillation alone (Berdoz et al. 2025).

`python -m recipes steer --data TEXTS --work DIR --out DIR` begins with the draft model that `recipes distill` trains on
text. One copy of it is distilled, one is distilled together with a module that steers it. Of two further copies, which
stay as they are, one is steered. All have the same number of steps, rows and tokens. `--target DIR --draft DIR` does
the same with another pair.
"""

from pathlib import Path

import torch
from transformers import PreTrainedModel

from outrider.drafters.steering import usual_taps
from outrider.learning.divergences import divergence
from outrider.learning.learner import Learner
from outrider.lm.hf.open import open_model
from outrider.training.data.capture import capture
from outrider.training.data.shards import Contents
from outrider.training.distill import Distilled
from outrider.training.steer import steered_learner
from recipes import options, trained
from recipes.inquiry.papers import Paper
from recipes.trained import DEPTH, Budget, Contrast, Texts, Way, compare

PAPER = Paper(name="Berdoz et al. 2025, SD2", url="https://arxiv.org/abs/2511.09844")
PUBLISHED = {0: "up to 22", 1: "up to 35"}
"""The paper's gain in accepted tokens over distillation, in percent, by temperature."""
DISTILLED, STEERED = "distilled", "distilled and steered"
FROZEN, FROZEN_STEERED = "frozen", "frozen and steered"
CONTRASTS = (
    Contrast(
        PAPER,
        "Steering and distillation emit more tokens per step than distillation alone",
        STEERED,
        DISTILLED,
        published=PUBLISHED,
        note="the paper's figure is the gain in accepted tokens",
    ),
    Contrast(
        PAPER,
        "A frozen draft model emits more tokens per step when it is steered",
        FROZEN_STEERED,
        FROZEN,
        published="up to 100",
        note="the paper doubles the accepted tokens for Vicuna-7B with a draft model of 160M",
    ),
)
QUICK = trained.QUICK | {"text_steps": 2}


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


@options.with_fields(Budget, text_steps=500)
def main(budget: Budget) -> None:
    """Train and compare."""
    compare("steer", budget, ways, CONTRASTS, " of the target's answers")
