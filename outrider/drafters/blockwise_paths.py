"""Blockwise heads, and the best paths through their guesses by an n-gram model (Kim et al. 2024, global rescoring)."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from outrider.core.types import Frontier, Guess, Running
from outrider.drafters.blockwise import BlockwiseDrafter
from outrider.drafters.protocol import Rows
from outrider.drafters.state_heads import HeadsState, heads_state
from outrider.heads.parts.backoff import BackoffModel
from outrider.heads.parts.best_paths import Paths, best_paths
from outrider.trees.chained import Follow

LOWEST = -1e4
"""A logit so low that its token has the probability 0 beside any path, at any usual temperature."""


@dataclass(kw_only=True)
class PathsState(HeadsState):
    """What the heads keep of a request, and the paths of the last draft; changes in place.

    Attributes:
        paths: The best paths; None before any draft.
        prefixes: For the root and each expanded node, the draft tokens up to it.
    """

    paths: Paths | None = None
    prefixes: dict[int, tuple[int, ...]] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class PathsDrafter(BlockwiseDrafter):
    r"""Find the best paths through the `top_k` likeliest tokens of every head, and guess what follows in them.

    A path $y$ has the score $\sum_i a_i(y_i) + \mu \sum_i \log G(y_i \mid \text{tokens before})$, with $a_i$ the
    logarithms of the head's probabilities and $G$ an n-gram model. The row behind a prefix is the law of the next token
    if a path is drawn with probability proportional to $e^s$. So a tree of chosen tokens that is wide enough (`dynamic`
    with a `width` of at least the number of paths) is all paths together, each of them once; and a chain, or a drawn
    tree, draws among the paths.

    Attributes:
        model: $G$.
        paths: How many paths.
        mu: $\mu$.
        top_k: How many tokens of each head may stand in a path.
        beam: Prefixes that the search keeps at each depth.

    References:
        Kim et al. 2024, Exploring and improving drafts in blockwise parallel decoding.
        https://arxiv.org/abs/2404.09221
    """

    rows: ClassVar[Rows] = "sampled"

    model: BackoffModel | None
    paths: int
    mu: float
    top_k: int
    beam: int

    def fresh(self, num_seen: int = 0, newest: Float[Tensor, " hidden"] | None = None) -> PathsState:
        return PathsState(num_seen=num_seen, newest=newest)

    @torch.inference_mode()
    def begin(self, states: Sequence[Running], depths: Sequence[int]) -> Guess:
        super().begin(states, depths)
        logs = _wide(torch.stack([_guessed(state) for state in states])).log_softmax(-1)
        best = logs.topk(min(self.top_k, logs.shape[-1]), -1)
        tokens, scores = best.indices.cpu().numpy(), best.values.double().cpu().numpy()
        for i, (state, depth) in enumerate(zip(states, depths, strict=True)):
            own = _own(state)
            own.prefixes = {0: ()}
            own.paths = best_paths(
                tokens[i, :depth],
                scores[i, :depth],
                count=self.paths,
                beam=self.beam,
                context=state.tokens[-3:],
                model=self.model,
                mu=self.mu,
            )
        return Guess(logits=torch.stack([self._behind(state, ()) for state in states]))

    def expand(self, states: Sequence[Running], frontier: Frontier) -> Guess:
        rows = []
        nodes = zip(frontier.owners.tolist(), frontier.parents.tolist(), frontier.nodes.tolist(), strict=True)
        for (owner, parent, node), token in zip(nodes, frontier.tokens.tolist(), strict=True):
            own = _own(states[owner])
            own.prefixes[node] = (*own.prefixes[parent], token)
            rows.append(self._behind(states[owner], own.prefixes[node]))
        return Guess(logits=torch.stack(rows))

    def chain(self, states: Sequence[Running], counts: Sequence[int]) -> Follow:
        drafted: list[tuple[int, ...]] = [()] * len(states)

        def step(tokens: Int[Tensor, " n"]) -> Float[Tensor, "n width"]:
            alive = [i for i, count in enumerate(counts) if count > len(drafted[i])]
            for i, token in zip(alive, tokens.tolist(), strict=True):
                drafted[i] = (*drafted[i], token)
            return torch.stack([self._behind(states[i], drafted[i]) for i in alive])

        return step

    def on_tables(self, vocab_size: int, seed: int) -> "PathsDrafter":
        text = np.random.default_rng(seed).integers(vocab_size, size=40)
        model = None if self.model is None else BackoffModel.count([text], vocab_size=vocab_size, least=1)
        made = super().on_tables(vocab_size, seed)
        return replace(
            self, heads=made.heads, running=None, tap=made.tap, vocab_size=vocab_size, norm=made.norm, model=model
        )

    def _behind(self, state: Running, prefix: tuple[int, ...]) -> Float[Tensor, " width"]:
        """Logits behind a prefix of a draft; -inf for tokens that follow it in no path."""
        own = _own(state)
        if own.paths is None:
            raise RuntimeError("paths are found before nodes are expanded")
        tokens, scores = own.paths.behind(prefix)
        marginal = _wide(self.row(state, len(prefix)))
        if not len(tokens):
            return marginal
        sampling = state.request.sampling
        # A processor may forbid the tokens of all paths. Then others are drawn.
        forbids = bool(sampling.processors or sampling.logit_bias)
        row = torch.full_like(marginal, LOWEST if forbids else -torch.inf)
        row[torch.from_numpy(tokens).to(row.device)] = torch.from_numpy(scores).to(row)
        return row


def _wide(logits: Float[Tensor, "*batch width"]) -> Float[Tensor, "*batch width"]:
    """Logits in float32; float64 stays."""
    return logits if logits.dtype == torch.float64 else logits.float()


def _guessed(state: Running) -> Float[Tensor, "depth width"]:
    rows = _own(state).rows
    if rows is None:
        raise RuntimeError("all depths are guessed before paths are found")
    return rows


def _own(state: Running) -> PathsState:
    own = heads_state(state.drafter_state)
    if not isinstance(own, PathsState):
        raise TypeError(f"this drafter keeps a PathsState, got {type(own).__name__}")
    return own
