"""What tests of several drafters for one request share: texts, what the target says alone, and what holds for all."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from outrider.core.types import Request, Sampling
from outrider.drafters.model import ModelDrafter
from outrider.drafters.none import NoDrafter
from outrider.drafters.protocol import Drafter
from outrider.engine.engine import Engine
from tests.world.models import prompts, target
from tests.world.parts import parts_of

GREEDY = Sampling(temperature=0.0, seed=0)
TEXTS = [*prompts(13, 5, 21), [5, 6, 7, 5, 6, 7, 5], [9, 8, 9, 8, 9]]


def plain(texts: Sequence[Sequence[int]], count: int, **options: bool) -> list[list[int]]:
    """What the target says behind texts without drafts."""
    busy = Engine(parts_of(target(), NoDrafter()), max_slots=8)
    return [out.tokens for out in busy.generate(texts, max_new_tokens=count, sampling=GREEDY, **options)]


@dataclass(frozen=True, kw_only=True)
class Recording(ModelDrafter):
    """Notes the first guess behind each text."""

    guesses: dict[tuple[int, ...], torch.Tensor] = field(default_factory=dict, compare=False)

    def begin(self, states, depths):
        guess = super().begin(states, depths)
        self.guesses.update({tuple(state.tokens): row for state, row in zip(states, guess.logits, strict=True)})
        return guess


def check_text_behind_the_context(drafter: Drafter, verifier: str) -> None:
    """Behind the context of 24 tokens of the last drafter, the text goes on as the target says, with drafts."""
    busy = Engine(parts_of(target(), drafter, verifier=verifier), max_slots=2)
    [made] = busy.generate([TEXTS[4]], max_new_tokens=40, sampling=GREEDY, ignore_eos=True)
    assert [made.tokens] == plain([TEXTS[4]], 40, ignore_eos=True)
    assert made.num_draft_tokens > 0


def check_prediction(drafter: Drafter, verifier: str) -> None:
    """What a client predicts is copied, and counted."""
    busy = Engine(parts_of(target(), drafter, verifier=verifier), max_slots=2)
    [said] = busy.generate([TEXTS[0]], max_new_tokens=16, sampling=GREEDY, ignore_eos=True)
    busy.add(Request(id="p", prompt=tuple(TEXTS[0]), max_new_tokens=16, sampling=GREEDY, prediction=tuple(said.tokens)))
    outputs = [update.output for _ in range(40) if busy.busy for update in busy.step() if update.output is not None]
    assert outputs[0].tokens == said.tokens
    assert outputs[0].accepted_prediction_tokens > 8
