"""The loop's one step: draft, verify, commit, for all active requests together."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, cast, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from outrider.constraints.grammar import batch_masks, follow
from outrider.dice import Dice, PhiloxDice
from outrider.drafters.protocol import Drafter
from outrider.lengths.protocol import LengthPolicy
from outrider.lm.protocol import LM, Extension, Segment
from outrider.sampling import Prefix, log_probs, to_rows
from outrider.trees.grow import grow
from outrider.trees.protocol import Tree
from outrider.types import Draft, Running, Step, Timing, Verdict
from outrider.verifiers.protocol import Carrying, Verifier

PREFILL_CHUNK = 512
"""Most prompt tokens that one forward digests, unless an engine is told otherwise."""


@runtime_checkable
class Decoding(Protocol):
    """How drafting and verifying follow each other. Immutable.

    Attributes:
        ahead: Whether it drafts behind tokens that are not judged yet.
    """

    @property
    def ahead(self) -> bool: ...

    def step(
        self,
        parts: "Parts",
        states: Sequence[Running],
        dice: Dice | None = None,
        keep: Callable[[Running, list[int]], int] | None = None,
    ) -> list[Step]:
        """One cycle of every request, as `step` below; the states change in place."""
        ...


@dataclass(frozen=True, kw_only=True)
class StepDecoding:
    """Draft, then verify the draft: speculative decoding as first published.

    References:
        Leviathan et al. 2023, algorithm 1. https://arxiv.org/abs/2211.17192
    """

    ahead = False

    def step(
        self,
        parts: "Parts",
        states: Sequence[Running],
        dice: Dice | None = None,
        keep: Callable[[Running, list[int]], int] | None = None,
    ) -> list[Step]:
        return step(parts, states, dice, keep)


@dataclass(frozen=True, kw_only=True)
class Parts:
    """What a decoder is made of."""

    target: LM
    drafter: Drafter
    tree: Tree
    verifier: Verifier
    length: LengthPolicy
    decoding: Decoding = StepDecoding()


def undigested(parts: Parts, state: Running) -> list[int]:
    """The tokens before the newest one that the target has not digested."""
    return state.tokens[parts.target.length(state.slot) : -1]


def prefill(parts: Parts, state: Running) -> None:
    """Digest all tokens but the newest, chunk by chunk."""
    while left := len(undigested(parts, state)):
        digest(parts, [state], [min(left, PREFILL_CHUNK)])


@torch.inference_mode()
def digest(parts: Parts, states: Sequence[Running], counts: Sequence[int]) -> None:
    """Digest so many more tokens of each request, at least one and never the newest, in one forward."""
    chunks = [undigested(parts, state)[:count] for state, count in zip(states, counts, strict=True)]
    extension = parts.target.extend(
        [
            Segment(slot=state.slot, tokens=torch.tensor(chunk).to(parts.target.device), logits="none")
            for state, chunk in zip(states, chunks, strict=True)
        ],
        taps=parts.drafter.taps,
    )
    parts.target.commit({state.slot: range(len(chunk)) for state, chunk in zip(states, chunks, strict=True)})
    sizes = [len(chunk) for chunk in chunks]
    split = {k: seen.split(sizes) for k, seen in extension.taps.items()}
    parts.drafter.observe(states, chunks, [{k: pieces[i] for k, pieces in split.items()} for i in range(len(states))])


@dataclass(frozen=True, kw_only=True)
class Mark:
    """Where a request stood before a step, so that a step that fails can be taken back.

    Attributes:
        state: The request's fields as they were; its `tokens` are the request's own list.
        num_tokens: How many of these there were.
    """

    state: Running
    num_tokens: int


def mark(state: Running) -> Mark:
    """Note where a request stands."""
    return Mark(state=replace(state), num_tokens=len(state.tokens))


def rewind(parts: Parts, state: Running, to: Mark) -> None:
    """Put a request back to where it stood. The drafter and the constraint open it anew and learn its tokens again.

    What the target has digested stays, unless the drafter learns from the target's hidden states: then `prefill` has
    to show it all of them again.
    """
    del state.tokens[to.num_tokens :]
    vars(state).update(vars(to.state))
    digested = min(parts.target.length(state.slot), to.num_tokens - 1)
    parts.target.truncate(state.slot, 0 if parts.drafter.taps else digested)
    parts.drafter.close(state.drafter_state)
    state.drafter_state = parts.drafter.open(state.request)
    state.constraint_state = None


def tokens_left(parts: Parts, state: Running) -> int:
    """How many tokens the request may still emit."""
    return min(state.request.max_new_tokens - len(state.output), parts.target.max_context - len(state.tokens))


@torch.inference_mode()
def step(
    parts: Parts,
    states: Sequence[Running],
    dice: Dice | None = None,
    keep: Callable[[Running, list[int]], int] | None = None,
) -> list[Step]:
    """One draft-verify-commit cycle of every request; the states change in place.

    Args:
        states: Requests that may still emit a token. Tokens before the newest one that the target has not digested
            are digested in the same forward; a drafter that learns from hidden states must have seen them before.
        dice: The source of all draws; by default keyed by each request's seed and step.
        keep: How many of the tokens about to be emitted the request still wants, at least one.
    """
    clock = Clock()
    dice = dice or PhiloxDice(seeds=[s.request.sampling.seed or 0 for s in states], steps=[s.num_steps for s in states])
    follow(states)
    draft = grow(
        parts.drafter, parts.tree, parts.length, states, [_room(parts, s) for s in states], dice, parts.target.device
    )
    clock.lap("drafter")
    behind = [undigested(parts, s) for s in states]
    extension = parts.target.extend(_segments(draft, states, behind), taps=parts.drafter.taps)
    clock.lap("target")
    samplings = [s.request.sampling for s in states]
    owners = np.repeat(np.arange(len(states)), np.diff(draft.offsets))
    above = np.maximum(draft.parents - draft.offsets[owners], -1)
    masks = batch_masks(states, owners, draft.tokens, above, parts.target.vocab_size)
    rows = to_rows(extension.logits, owners, samplings, lambda node: _prefix(draft, states[owners[node]], node), masks)
    clock.lap("rows")
    verdict = _verify(parts.verifier, draft, rows, dice, states)
    survivors = _survivors(draft, verdict)
    clock.lap("verify")
    emitted = [cut(parts, state, survivor.tokens, keep) for state, survivor in zip(states, survivors, strict=True)]
    paths = [survivor.path[: len(tokens) - 1] for survivor, tokens in zip(survivors, emitted, strict=True)]
    log_probabilities = _log_probabilities(extension, draft, states, paths, emitted)
    kept = [
        [*range(len(before)), *(len(before) + node for node in [0, *path])]
        for before, path in zip(behind, paths, strict=True)
    ]
    parts.target.commit({s.slot: nodes for s, nodes in zip(states, kept, strict=True)})
    parts.drafter.commit(states, _numbered(draft, paths))
    steps = []
    for i, (state, survivor, tokens) in enumerate(zip(states, survivors, emitted, strict=True)):
        state.tokens.extend(tokens)
        state.num_steps += 1
        if state.request.constraint is not None:
            state.request.constraint.commit(state.constraint_state, tokens)
        steps.append(
            Step(
                request=state.request.id,
                num_draft_tokens=draft.num_draft_tokens(i),
                num_accepted_tokens=len(survivor.path),
                tokens=tuple(tokens),
                timing=clock.timing,
                num_requests=len(states),
                logprobs=log_probabilities[i],
                logits=_kept(extension, draft, i, paths[i]) if state.request.keep_logits else None,
            )
        )
        state.length_state = parts.length.update(state.length_state, steps[-1])
    starts = draft.offsets[:-1] + np.cumsum([0, *map(len, behind)])[:-1]
    nodes = [start + np.array(each) for start, each in zip(starts, kept, strict=True)]
    taps = [{k: t[torch.from_numpy(at).to(t.device)] for k, t in extension.taps.items()} for at in nodes]
    known = [
        [*before, *s.tokens[-len(tokens) - 1 : -1]] for s, before, tokens in zip(states, behind, emitted, strict=True)
    ]
    parts.drafter.observe(states, known, taps)
    clock.lap("commit")
    return steps


class Clock:
    """Fills a Timing lap by lap.

    Args:
        now: Seconds since some moment.
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self.timing = Timing()
        self._now = now
        self._last = now()

    def lap(self, part: str) -> None:
        """Add to a part of the timing what has passed since the last lap."""
        now = self._now()
        setattr(self.timing, part, getattr(self.timing, part) + now - self._last)
        self._last = now


@dataclass(frozen=True, kw_only=True)
class _Survivor:
    """What one request keeps, on the host: tree numbers of the accepted nodes; their tokens and the next one."""

    path: list[int]
    tokens: list[int]


def _room(parts: Parts, state: Running) -> int:
    """Deepest draft that fits: one token less than may still come, in the drafter's context too."""
    room = tokens_left(parts, state) - 1
    if parts.drafter.max_context is not None:
        room = min(room, parts.drafter.max_context - len(state.tokens) - 1)
    return max(room, 0)


def _verify(
    verifier: Verifier, draft: Draft, rows: Float[Tensor, "nodes vocab"], dice: Dice, states: Sequence[Running]
) -> Verdict:
    """The verdict; what the rule carries to each request's next step goes into its state."""
    # Asking a protocol takes twenty times as long as asking for an attribute.
    if not hasattr(verifier, "verify_carrying"):
        return verifier.verify(draft, rows, dice)
    verdict = cast(Carrying, verifier).verify_carrying(draft, rows, dice, [state.carried for state in states])
    for state, carried in zip(states, verdict.carried, strict=True):
        state.carried = carried
    return verdict


def _numbered(draft: Draft, paths: Sequence[Sequence[int]]) -> list[list[int]]:
    """Paths by the numbers that the drafter knows the nodes by."""
    return [draft.numbers[draft.offsets[i] + np.array(path, dtype=np.int64)].tolist() for i, path in enumerate(paths)]


def _segments(draft: Draft, states: Sequence[Running], behind: Sequence[Sequence[int]]) -> list[Segment]:
    """Per request, what is not digested yet and then its draft, whose logits are wanted."""
    segments = []
    for i, (state, before) in enumerate(zip(states, behind, strict=True)):
        first, end = int(draft.offsets[i]), int(draft.offsets[i + 1])
        tokens, parents = draft.tokens[first:end], np.maximum(draft.parents[first:end] - first, -1)
        chain = np.array_equal(parents, np.arange(-1, end - first - 1))
        if before:
            tokens = torch.cat([torch.tensor(before).to(tokens.device), tokens])
            parents = np.concatenate([np.arange(-1, len(before) - 1), parents + len(before)])
        segments.append(Segment(slot=state.slot, tokens=tokens, parents=None if chain else parents, logits=end - first))
    return segments


def _prefix(draft: Draft, state: Running, node: int) -> Prefix:
    """Prompt and output before a node's children: the path down to the node, the node included."""
    path: list[int] = []
    while draft.parents[node] >= 0:
        path.append(int(draft.tokens[node]))
        node = int(draft.parents[node])
    return Prefix(prompt=state.request.prompt, output=[*state.output, *path[::-1]])


def _survivors(draft: Draft, verdict: Verdict) -> list[_Survivor]:
    """What the verdict leaves of each request; one copy from the device."""
    everything = torch.cat([draft.tokens, verdict.next_tokens]).tolist()
    drafted, following = everything[: len(draft.tokens)], everything[len(draft.tokens) :]
    survivors = []
    for i, (first, count) in enumerate(zip(draft.offsets[:-1].tolist(), verdict.num_accepted.tolist(), strict=True)):
        nodes = verdict.paths[i, :count].tolist()
        tokens = [*(drafted[node] for node in nodes), following[i]]
        survivors.append(_Survivor(path=[node - first for node in nodes], tokens=tokens))
    return survivors


def cut(parts: Parts, state: Running, tokens: list[int], keep: Callable[[Running, list[int]], int] | None) -> list[int]:
    """The tokens up to the request's end: an end-of-sequence token, its last token, or what `keep` says."""
    tokens = tokens[: tokens_left(parts, state)]
    for i, token in enumerate(tokens):
        if token in state.request.eos_ids:
            tokens = tokens[: i + 1]
            break
    return tokens if keep is None else tokens[: keep(state, tokens)]


def _kept(extension: Extension, draft: Draft, request: int, path: Sequence[int]) -> Float[Tensor, "n vocab"]:
    """One request's raw logits at the root and along its path."""
    nodes = torch.tensor([int(draft.offsets[request]) + node for node in [0, *path]])
    return extension.logits[nodes.to(extension.logits.device)].float()


def _log_probabilities(
    extension: Extension,
    draft: Draft,
    states: Sequence[Running],
    paths: Sequence[Sequence[int]],
    emitted: Sequence[Sequence[int]],
) -> list[tuple[float, ...] | None]:
    """Log-softmax of the raw logits at every emitted token, for the requests that asked."""
    found: list[tuple[float, ...] | None] = [None] * len(states)
    for i, (state, path, tokens) in enumerate(zip(states, paths, emitted, strict=True)):
        if state.request.logprobs:
            nodes = torch.tensor([int(draft.offsets[i]) + node for node in [0, *path]]).to(extension.logits.device)
            logits: Float[Tensor, "n vocab"] = extension.logits[nodes]
            found[i] = tuple(log_probs(logits, torch.tensor(tokens).to(logits.device)).tolist())
    return found
