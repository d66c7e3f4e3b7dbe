"""The loop's one step: draft, verify, commit, for all active requests together."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, cast

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from outrider.constraints.masks import follow
from outrider.core.coupled_dice import CoupledDice
from outrider.core.dice import Dice, PhiloxDice
from outrider.core.types import Draft, Running, Step, Verdict
from outrider.decoding import drafting
from outrider.decoding.clock import StepClock, clock_on
from outrider.decoding.progress import cut, tokens_left
from outrider.decoding.protocol import Cycle, Keep, Parts, Watch
from outrider.decoding.reading import LogProbs, TargetReading, masks_of
from outrider.drafters.protocol import Choosing
from outrider.verifiers.protocol import Carrying, Deciding, Decision, Verifier, plain


@dataclass(frozen=True, kw_only=True)
class StepDecoding:
    """Draft, then verify the draft: speculative decoding as first published.

    References:
        Leviathan et al. 2023, algorithm 1. https://arxiv.org/abs/2211.17192
    """

    drafts_ahead: ClassVar[bool] = False

    @torch.inference_mode()
    def step(
        self,
        parts: Parts,
        states: Sequence[Running],
        *,
        dice: Dice | None = None,
        keep: Keep | None = None,
        watch: Watch | None = None,
    ) -> list[Step]:
        """One draft-verify-commit cycle of every request, as `Decoding.step` says.

        If the target's cache lacks committed tokens before the anchor, the same forward runs them too.
        """
        clock = clock_on(parts.target.device)
        dice = dice or dice_of(parts, states)
        follow(states)
        rooms = [drafting.room(parts, state, tokens_left(parts, state) - 1) for state in states]
        plan = drafting.plan(parts, states, rooms)
        draft = drafting.draft(parts, plan.states, plan.rooms, dice, parts.target.device, plan.tree)
        clock.lap("drafter")
        reading = TargetReading.of(parts.target, draft, states, drafting.taps(states))
        clock.lap("target")
        masks = masks_of(draft, states, parts.target.vocab_size)
        if watch is None and needs_no_rows(parts.verifier, draft, states):
            likeliest = reading.likeliest(states, masks)
            clock.lap("rows")
            survivors = reading.agreeing(likeliest, states)
            clock.lap("verify")
        else:
            rows = reading.rows(states, masks)
            clock.lap("rows")
            decision = decide(parts.verifier, draft, rows, dice)
            if decision is not None and watch is None:
                survivors = reading.decided(decision, rows, states)
            else:
                verdict = verify(parts.verifier, draft, rows, dice, states)
                survivors = reading.survivors(verdict, rows, states)
            clock.lap("verify")
            if watch is not None:
                logits = reading.extension.logits
                watch(Cycle(states=states, draft=draft, rows=rows, logits=logits, verdict=verdict))
        emitted = [cut(parts, state, survivor.tokens, keep) for state, survivor in zip(states, survivors, strict=True)]
        paths = [survivor.path[: len(tokens) - 1] for survivor, tokens in zip(survivors, emitted, strict=True)]
        logprobs = reading.log_probs(states, paths, emitted)
        steps = [
            _step_of(
                state,
                reading,
                i,
                plan,
                survivors[i].path,
                emitted[i],
                paths[i],
                logprobs[i],
                clock,
                len(states),
            )
            for i, state in enumerate(states)
        ]
        kept = reading.kept(paths)
        known = reading.known(states, emitted) if drafting.reads(parts, states) else None
        parts.target.commit({state.slot: nodes for state, nodes in zip(states, kept, strict=True)})
        clock.lap("commit")
        if len(draft.tokens) > len(states):
            drafting.commit(states, reading.numbered(paths))
        for state, view, step in zip(states, plan.states, steps, strict=True):
            advance(parts, state, view, step)
        if known is not None:
            drafting.observe(parts, states, reading.observed(kept, known))
        clock.lap("drafter")
        plan.note(steps, None if any(reading.behind) else clock.seconds)
        return steps


def step_dice(states: Sequence[Running]) -> PhiloxDice:
    """The dice of a step, keyed by each request's seed and step."""
    return PhiloxDice(seeds=[s.request.sampling.seed or 0 for s in states], steps=[s.num_steps for s in states])


def coupled_dice(states: Sequence[Running]) -> CoupledDice:
    """The dice of a step whose noise is keyed by each request's seed and the positions of its tokens."""
    return CoupledDice(
        seeds=[s.request.sampling.seed or 0 for s in states],
        positions=[len(s.tokens) for s in states],
        others=step_dice(states),
    )


def dice_of(parts: Parts, states: Sequence[Running]) -> Dice:
    """The dice that a step throws: those that its verifier wants."""
    return coupled_dice(states) if getattr(parts.verifier, "shares_noise", False) else step_dice(states)


def needs_no_rows(verifier: Verifier, draft: Draft, states: Sequence[Running]) -> bool:
    """Whether the likeliest tokens alone decide what is accepted: a draft that was chosen, all requests at temperature
    0, and a verifier that accepts such tokens.
    """
    return (
        draft.rows is None
        and getattr(verifier, "takes_likeliest", False)
        and all(state.request.sampling.temperature == 0 for state in states)
    )


def decide(verifier: Verifier, draft: Draft, rows: Float[Tensor, "nodes vocab"], dice: Dice) -> Decision | None:
    """The decision of a verifier that does not wait for the device; None if it would wait, or if there is none."""
    if rows.device.type == "cpu" or len(draft.tokens) == draft.num_requests or not hasattr(verifier, "decide"):
        return None
    return cast(Deciding, verifier).decide(draft, rows, dice)


def verify(
    verifier: Verifier, draft: Draft, rows: Float[Tensor, "nodes vocab"], dice: Dice, states: Sequence[Running]
) -> Verdict:
    """The verdict. What a verifier carries to each request's next step goes into `Running.carried`."""
    # Asking a protocol takes twenty times as long as asking for an attribute.
    if not hasattr(verifier, "verify_carrying"):
        return (
            plain(draft, rows, dice) if len(draft.tokens) == draft.num_requests else verifier.verify(draft, rows, dice)
        )
    verdict = cast(Carrying, verifier).verify_carrying(draft, rows, dice, [state.carried for state in states])
    for state, carried in zip(states, verdict.carried, strict=True):
        state.carried = carried
    return verdict


def advance(parts: Parts, state: Running, view: Running, step: Step) -> None:
    """Update a request's state after a step: tokens, constraint, length policy, drafter of several.

    Args:
        view: The request as the drafter saw it that drafted: itself, or what a drafter of several returned.
    """
    state.tokens.extend(step.tokens)
    state.num_steps += 1
    if state.request.constraint is not None:
        state.request.constraint.commit(state.constraint_state, step.tokens)
    view.length_state = parts.length.update(view.length_state, step)
    if view is not state:
        cast(Choosing, state.drafter).learn(state, view, step)


def _step_of(
    state: Running,
    reading: TargetReading,
    index: int,
    plan: drafting.DraftPlan,
    accepted: list[int],
    tokens: list[int],
    path: list[int],
    logprobs: LogProbs,
    clock: StepClock,
    num_requests: int,
) -> Step:
    """The `Step` of one request.

    Args:
        plan: Who was to draft how many tokens.
        accepted: Nodes of the accepted path, before the output is cut at its end.
        path: The part of it that was emitted.
    """
    request, draft = state.request, reading.draft
    count, first = draft.num_draft_tokens(index), int(draft.offsets[index])
    last = first + (accepted[-1] if accepted else 0)
    promised = (
        plan.promised[index][:count] if draft.chances is None else _promised(draft, draft.chances, first, accepted)
    )
    return Step(
        request=request.id,
        num_draft_tokens=count,
        num_accepted_tokens=len(accepted),
        tokens=tuple(tokens),
        timing=clock.timing,
        num_requests=num_requests,
        room=plan.asked[index],
        depth=int(draft.depths[first : first + count + 1].max()),
        promised=tuple(promised),
        bonus=bool(draft.first_child[last] == draft.first_child[last + 1]),
        logprobs=logprobs.chosen,
        top_logprobs=logprobs.top,
        logits=reading.logits(index, path) if request.keep_logits else None,
    )


def _promised(draft: Draft, chances: Float[np.ndarray, " nodes"], root: int, accepted: Sequence[int]) -> list[float]:
    """How likely it seemed at a root, and at each accepted node, that one of its children is accepted."""
    nodes = [root, *(root + node for node in accepted)]
    children = [draft.links[draft.first_child[node] : draft.first_child[node + 1]] for node in nodes]
    # A sum of rounded probabilities may exceed 1.
    return [min(1.0, float(chances[each].sum())) for each in children if len(each)]
