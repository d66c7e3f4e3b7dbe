"""Asking a drafter of one-token guesses for a chain, request by request, as the loop would."""

from collections.abc import Sequence

import numpy as np
import torch

from outrider.core.types import Frontier, Request, Running, Sampling
from outrider.drafters.ngram import NgramDrafter
from outrider.drafters.none import NoDrafter
from outrider.drafters.protocol import Observed
from outrider.drafters.suffix import SuffixDrafter

Lookup = NoDrafter | NgramDrafter | SuffixDrafter


def running(drafter: Lookup, tokens: Sequence[int], id: str = "r") -> Running:
    """A request whose prompt is `tokens`, new to the drafter."""
    request = Request(id=id, prompt=tuple(tokens), max_new_tokens=99, sampling=Sampling(seed=0))
    return Running(request=request, tokens=list(tokens), slot=0, drafter=drafter, drafter_state=drafter.open(request))


def chains(drafter: Lookup, states: Sequence[Running], depth: int) -> list[list[int]]:
    """What a batch is proposed, each chain up to where nothing is proposed, at most `depth` tokens."""
    found: list[list[int]] = [[] for _ in states]
    guess = drafter.begin(states, [depth] * len(states))
    owners = np.arange(len(states))
    for level in range(1, depth + 1):
        assert guess.tokens is not None
        alive = np.flatnonzero(guess.tokens >= 0)
        owners, tokens = owners[alive], guess.tokens[alive]
        if not len(owners):
            break
        for owner, token in zip(owners.tolist(), tokens.tolist(), strict=True):
            found[owner].append(token)
        guess = drafter.expand(
            states,
            Frontier(
                owners=owners,
                nodes=np.full(len(owners), level),
                parents=np.full(len(owners), level - 1),
                depths=np.full(len(owners), level),
                tokens=torch.from_numpy(tokens),
            ),
        )
    return found


def chain(drafter: Lookup, state: Running, depth: int) -> list[int]:
    """What one request is proposed."""
    return chains(drafter, [state], depth)[0]


def step(drafter: Lookup, state: Running, tokens: Sequence[int], num_accepted: int = 0) -> None:
    """Commit tokens in the loop's order: the drafter hears of the path before the tokens grow, and observes after."""
    known = [state.tokens[-1], *tokens[:-1]]
    drafter.commit([state], [list(range(1, num_accepted + 1))])
    state.tokens.extend(tokens)
    drafter.observe([state], Observed(tokens=np.array(known), offsets=np.array([0, len(known)])))
