"""Real drafting along a given text: every draft token is the text's own, and none is accepted."""

from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from outrider.core.types import Frontier, Guess, Request, Running, Sampling
from outrider.drafters.protocol import Drafter, Observed
from outrider.lm.model import LanguageModel
from outrider.lm.protocol import Segment


def forced_guesses(
    drafter: Drafter, target: LanguageModel, text: Sequence[int], prompt: int, gamma: int
) -> dict[tuple[int, int], Float[Tensor, " vocab"]]:
    """What a drafter guesses, by the place of the guessed token and by the number of the guess in its draft, from 0.

    Tokens that it cannot guess have the logit -inf.
    """
    request = Request(id="r", prompt=tuple(text[:prompt]), max_new_tokens=99, sampling=Sampling(seed=0))
    state = Running(request=request, tokens=list(text[:prompt]), slot=target.open(), drafter=drafter)
    state.drafter_state = drafter.open(request)
    found = {}

    def show(tokens: Sequence[int]) -> None:
        seen = target.extend([Segment(slot=state.slot, tokens=torch.tensor(tokens))], taps=drafter.taps)
        target.commit({state.slot: range(len(tokens))})
        observed = Observed(tokens=np.array(tokens), offsets=np.array([0, len(tokens)]), taps=seen.taps)
        drafter.observe([state], observed)

    show(text[: prompt - 1])
    for anchor in range(prompt - 1, len(text) - gamma):
        # `observe` is called when the newest token is the anchor, whose states are not known.
        state.tokens = list(text[: anchor + 1])
        found[anchor + 1, 0] = row(drafter.begin([state], [gamma]))
        for number in range(1, gamma):
            frontier = Frontier(
                owners=np.array([0]),
                nodes=np.array([number]),
                parents=np.array([number - 1]),
                depths=np.array([number]),
                tokens=torch.tensor([text[anchor + number]]),
            )
            found[anchor + number + 1, number] = row(drafter.expand([state], frontier))
        drafter.commit([state], [[]])
        show(text[anchor : anchor + 1])
    return found


def row(guess: Guess) -> Float[Tensor, " vocab"]:
    """The one row of a guess, over all tokens."""
    logits = guess.logits if guess.short_list is None else guess.short_list.widened(guess.logits, -torch.inf)
    return logits[0].clone()
