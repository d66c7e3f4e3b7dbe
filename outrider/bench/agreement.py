"""How well a drafter knows its target: along a given text, into drafts of its own, and when it runs freely."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from outrider.core.deadline import ENDLESS, Deadline
from outrider.core.dice import Dice
from outrider.core.metrics import block_efficiency, conditional_acceptance
from outrider.core.progress import ProgressTask, task
from outrider.core.types import Draft, InputError, Request, Running, Sampling, Step, Verdict
from outrider.decoding.progress import begin, end
from outrider.decoding.protocol import Cycle, Parts
from outrider.decoding.step import StepDecoding
from outrider.engine.engine import Engine
from outrider.engine.output import succeeded
from outrider.lengths.fixed import FixedLength
from outrider.trees.chain import ChainTree
from outrider.verifiers.match import MatchVerifier
from outrider.verifiers.protocol import child_rows
from outrider.verifiers.token import TokenVerifier

FIRST_POSITIONS = 16
"""Positions of a text are reported in groups: so many, then as many again, then twice as many, and so on."""
LEAST_TEXT = 3
"""Fewest tokens of a text that can be compared along: one to begin with, one to draft, one that comes after it."""


@dataclass(frozen=True, kw_only=True)
class RowAgreement:
    r"""How two kinds of rows agree: means over `count` pairs.

    Attributes:
        where: The draft depth, or the first and last position in the text.
        alpha: $\sum_x \min(p(x), q(x))$, the chance that a token drawn from q is accepted.
        variation: Total variation, $1 - \alpha$.
        argmax: Share of pairs with the same likeliest token: the chance of acceptance at temperature 0.
    """

    where: str
    count: int
    alpha: float
    variation: float
    argmax: float


@dataclass(frozen=True, kw_only=True)
class Pairs:
    """Pairs of rows that were compared, one entry each."""

    owners: Int[np.ndarray, " pairs"]
    depths: Int[np.ndarray, " pairs"]
    positions: Int[np.ndarray, " pairs"]
    alpha: Float[np.ndarray, " pairs"]
    argmax: Bool[np.ndarray, " pairs"]

    def mean(self, where: str, chosen: Bool[np.ndarray, " pairs"]) -> RowAgreement:
        """Means over some of them."""
        return RowAgreement(
            where=where,
            count=int(chosen.sum()),
            alpha=float(self.alpha[chosen].mean()),
            variation=1 - float(self.alpha[chosen].mean()),
            argmax=float(self.argmax[chosen].mean()),
        )

    def by_depth(self) -> list[RowAgreement]:
        """Depth 1 is what follows the text itself; deeper rows stand behind tokens that the drafter drew."""
        return [self.mean(str(depth), self.depths == depth) for depth in np.unique(self.depths).tolist()]

    def by_position(self) -> list[RowAgreement]:
        """Rows that follow the text itself, by where in it they stand."""
        direct, first, size, rows = self.depths == 1, 0, FIRST_POSITIONS, []
        while (direct & (self.positions >= first)).any():
            here = direct & (self.positions >= first) & (self.positions < first + size)
            if here.any():
                rows.append(self.mean(f"{first}-{first + size - 1}", here))
            first, size = first + size, max(size, first + size)
        return rows


def compare_rows(draft: Draft, target_rows: Float[Tensor, "nodes vocab"], positions: Int[np.ndarray, " n"]) -> Pairs:
    """Compare the rows of target and drafter at the parent of every drafted node of chains.

    Args:
        positions: Where each request's anchor stands.
    """
    nodes = np.flatnonzero(draft.parents >= 0)
    parents = draft.parents[nodes]
    p = target_rows[torch.from_numpy(parents).to(target_rows.device)]
    q = child_rows(draft, parents, p)
    owners = np.searchsorted(draft.offsets, nodes, side="right") - 1
    return Pairs(
        owners=owners,
        depths=draft.depths[nodes],
        positions=positions[owners],
        alpha=torch.minimum(p, q).sum(-1).double().cpu().numpy(),
        argmax=(p.argmax(-1) == q.argmax(-1)).cpu().numpy(),
    )


def _joined(pairs: Sequence[Pairs]) -> Pairs:
    return Pairs(**{name: np.concatenate([getattr(p, name) for p in pairs]) for name in Pairs.__dataclass_fields__})


@dataclass(frozen=True, kw_only=True)
class _Follow:
    """Accepts nothing and goes on with the text: what the loop does next does not depend on the draft.

    Attributes:
        following: The text's next token, of each request; set before each step.
    """

    following: list[int] = field(default_factory=list)

    def verify(self, draft: Draft, target_rows: Float[Tensor, "nodes vocab"], dice: Dice) -> Verdict:
        count = draft.num_requests
        return Verdict(
            paths=np.full((count, int(draft.depths.max())), -1),
            num_accepted=np.zeros(count, dtype=np.int64),
            next_tokens=torch.tensor(self.following).to(draft.tokens.device),
        )


def along_text(
    engine: Engine,
    texts: Sequence[Sequence[int]],
    *,
    num_speculative_tokens: int = 5,
    temperature: float = 1.0,
    until: Deadline = ENDLESS,
) -> Pairs:
    """Compare rows at every position of texts, and into a draft that begins there, drawn by the drafter itself.

    The loop's own step runs with a rule that accepts nothing and goes on with the text, so every drafter is fed as it
    is in use.

    Args:
        until: Positions that are not compared then are left out; one step is made at least.

    Raises:
        InputError: The drafter has no rows, or no text is long enough.
    """
    if engine.parts.drafter.rows != "sampled":
        raise InputError("this drafter gives no distribution after each prefix; only its free running can be measured")
    if not (long := [list(text) for text in texts if len(text) >= LEAST_TEXT]):
        raise InputError(f"no text has {LEAST_TEXT} tokens; give a longer one")
    rule = _Follow()
    length = FixedLength(num_speculative_tokens=num_speculative_tokens)
    drafter = engine.parts.drafter.components[-1]
    parts = replace(
        engine.parts, drafter=drafter, tree=ChainTree(), verifier=rule, length=length, decoding=StepDecoding()
    )
    seen: list[Pairs] = []
    engine.rest()
    with task("along the text", sum(len(text) - 1 for text in long), "tokens") as progress:
        for first in range(0, len(long), engine.max_slots):
            if seen and until.passed:
                break
            some = long[first : first + engine.max_slots]
            states: list[Running] = []
            try:
                for i, text in enumerate(some, first):
                    sampling = Sampling(temperature=temperature, seed=i)
                    # The text's first token is the anchor of a request with an empty cache.
                    asked = Request(id=str(i), prompt=(text[0],), max_new_tokens=len(text) - 1, sampling=sampling)
                    states.append(begin(parts, asked))
                _follow(parts, rule, states, some, seen, progress, until)
            finally:
                for state in states:
                    end(parts, state)
    return _joined(seen)


def _follow(
    parts: Parts,
    rule: _Follow,
    states: Sequence[Running],
    texts: Sequence[Sequence[int]],
    seen: list[Pairs],
    progress: ProgressTask,
    until: Deadline,
) -> None:
    """Feed texts token by token, all of them together, until each is at its end or time is; note what was compared."""

    def watch(cycle: Cycle) -> None:
        if cycle.draft.rows is not None:
            positions = np.array([len(state.tokens) - 1 for state in cycle.states])
            seen.append(compare_rows(cycle.draft, cycle.rows, positions))

    while active := [i for i, state in enumerate(states) if len(state.tokens) < len(texts[i])]:
        if seen and until.passed:
            return
        here = [states[i] for i in active]
        rule.following[:] = [texts[i][len(states[i].tokens)] for i in active]
        parts.decoding.step(parts, here, watch=watch)
        progress.advance(len(active))


@dataclass(frozen=True, kw_only=True)
class FreeRun:
    """Acceptance of a drafter while the target continues prompts.

    Attributes:
        num_steps: Steps made.
        num_draft_tokens: Tokens drafted.
        num_accepted_tokens: Tokens accepted.
        acceptance: Accepted tokens over verified tokens. Tokens behind a rejected one are not verified.
        unconditional: Share of all steps in which the token at depth 1, 2, ... was accepted.
        conditional: The same among the steps that judged it.
        block_efficiency: Tokens per step.
        rows: How the rows agreed at the tokens that were judged, by depth; nothing where the drafter has no rows.
    """

    num_steps: int
    num_draft_tokens: int
    num_accepted_tokens: int
    acceptance: float
    unconditional: list[float]
    conditional: list[float]
    block_efficiency: float
    rows: list[RowAgreement]


def run_freely(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    *,
    num_speculative_tokens: int = 5,
    max_new_tokens: int = 64,
    temperature: float = 1.0,
    until: Deadline = ENDLESS,
) -> FreeRun:
    """Continue prompts with chains under token verification (matching, where the drafter has no rows).

    Args:
        until: No further steps are made then; a few are made at least.
    """
    rule = TokenVerifier() if engine.parts.drafter.rows == "sampled" else MatchVerifier()
    seen: list[Pairs] = []

    def watch(cycle: Cycle) -> None:
        """Note how the rows agreed at every token that was judged."""
        if cycle.draft.rows is not None:
            pairs = compare_rows(cycle.draft, cycle.rows, np.zeros(cycle.draft.num_requests, dtype=np.int64))
            judged = pairs.depths <= cycle.verdict.num_accepted[pairs.owners] + 1
            seen.append(Pairs(**{name: kept[judged] for name, kept in vars(pairs).items()}))

    length = FixedLength(num_speculative_tokens=num_speculative_tokens)
    engine.rest()
    watched = Engine(
        replace(engine.parts, tree=ChainTree(), verifier=rule, length=length),
        eos_ids=engine.eos_ids,
        max_slots=engine.max_slots,
    )
    watched.watch = watch
    ids = [
        watched.add(prompt, max_new_tokens=max_new_tokens, sampling=Sampling(temperature=temperature, seed=i))
        for i, prompt in enumerate(prompts)
    ]
    steps: list[Step] = []
    with task("free running", max_new_tokens * len(prompts), "tokens") as bar:
        while watched.busy and not (until.passed and any(step.num_draft_tokens > 0 for step in steps)):
            for update in map(succeeded, watched.step()):
                steps += [] if update.step is None else [update.step]
                bar.advance(len(update.tokens))
    for id in ids:
        watched.cancel(id)
    watched.rest()
    drafted = max((step.num_draft_tokens for step in steps), default=0)
    judged = sum(min(step.num_accepted_tokens + 1, step.num_draft_tokens) for step in steps)
    accepted = sum(step.num_accepted_tokens for step in steps)
    return FreeRun(
        num_steps=len(steps),
        num_draft_tokens=sum(step.num_draft_tokens for step in steps),
        num_accepted_tokens=accepted,
        acceptance=accepted / judged if judged else 0.0,
        unconditional=[sum(step.num_accepted_tokens > i for step in steps) / len(steps) for i in range(drafted)],
        conditional=conditional_acceptance(steps),
        block_efficiency=block_efficiency(steps),
        rows=_joined(seen).by_depth() if seen else [],
    )
