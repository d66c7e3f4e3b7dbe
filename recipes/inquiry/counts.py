"""Runs that count steps: what a way to decode emits per step, which no clock has a part in."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from jaxtyping import Float

from outrider.bench.evidence import Row
from outrider.core.types import Step
from outrider.engine.engine import Engine
from outrider.plan.tree_coverage import DraftedTree
from outrider.theory.coverage import Rule, coverage
from recipes.inquiry.texts import RecordedText, log_ratios, logits_along, rows_at
from recipes.runs import Conditions, PromptBatch, on_engine


@dataclass(frozen=True, kw_only=True)
class FixedChain:
    """A chain of a fixed length under a rule, for which texts alone say how many steps they take.

    Attributes:
        deepest: Steps count that begin with room for as many draft tokens.
    """

    rule: Rule
    length: int
    deepest: int

    @property
    def name(self) -> str:
        """As rows have it."""
        return f"{self.rule} {self.length}, room {self.deepest}"


@dataclass(kw_only=True)
class StepTally:
    """Counts over the steps of a request; those that begin with room for a whole draft are free.

    Attributes:
        free_tokens: Tokens that the free steps emitted.
    """

    output: list[int] = field(default_factory=list)
    steps: int = 0
    drafted: int = 0
    accepted: int = 0
    free_tokens: int = 0
    free_steps: int = 0
    free_drafted: int = 0

    def add(self, step: Step, room_until: int) -> None:
        """Add a step; it is free if the output had fewer than `room_until` tokens."""
        free = len(self.output) < room_until
        self.output += step.tokens
        self.steps += 1
        self.drafted += step.num_draft_tokens
        self.accepted += step.num_accepted_tokens
        self.free_tokens += free * len(step.tokens)
        self.free_steps += free
        self.free_drafted += free * step.num_draft_tokens


def tally(engine: Engine, job: PromptBatch, conditions: Conditions, deepest: int) -> list[StepTally]:
    """Run a job and count the steps of each of its requests.

    Args:
        deepest: Deepest draft of all that it is compared with: a step that begins with room for it is free.
    """
    engine.rest()
    try:
        ids = [
            engine.add(
                prompt,
                max_new_tokens=conditions.max_new_tokens,
                sampling=sampling,
                ignore_eos=conditions.ignore_eos,
            )
            for prompt, sampling in zip(job.prompts, conditions.samplings(job), strict=True)
        ]
        tallies = {id: StepTally() for id in ids}
        while engine.busy:
            made: list[Step] = []
            engine.step(sink=made.append)
            for step in made:
                tallies[step.request].add(step, conditions.max_new_tokens - deepest)
    finally:
        engine.rest()
    return list(tallies.values())


def covered(
    engine: Engine, prompt: Sequence[int], output: Sequence[int], conditions: Conditions, chains: Sequence[FixedChain]
) -> dict[str, list[float]]:
    """Expected steps of chains on an output, and the tokens that these emit; by the chain's name.

    Args:
        engine: Its target said the output, however it drafted; its drafter is a draft model.
    """
    draft: Any = engine.parts.drafter
    ratios = log_ratios(engine.parts.target, draft.lm, prompt, output, conditions.temperature, draft.short_list)
    return by_chains(ratios, conditions, chains, ended=_ended(engine, output, conditions))


def _ended(engine: Engine, output: Sequence[int], conditions: Conditions) -> bool:
    return not conditions.ignore_eos and output[-1] in engine.eos_ids


def by_chains(
    ratios: Float[np.ndarray, " text"], conditions: Conditions, chains: Sequence[FixedChain], *, ended: bool
) -> dict[str, list[float]]:
    """The same from the log ratios of the output's tokens."""
    found = {}
    for chain in chains:
        before = conditions.max_new_tokens - chain.deepest
        made = coverage(ratios, chain.length, chain.rule, before=before, ended=ended)
        found[chain.name] = [made.steps, made.tokens]
    return found


def listen(engine: Engine, job: PromptBatch, conditions: Conditions) -> list[RecordedText]:
    """Let the target say a text for each prompt of a job, however the engine drafts, and take both models' rows."""
    draft: Any = engine.parts.drafter
    made = on_engine(engine, job, conditions)
    found = []
    for i, (question, output) in enumerate(zip(job.questions, made.tokens, strict=True)):
        p, q = (
            rows_at(logits_along(model, question.tokens, output, few), conditions.temperature).numpy()
            for model, few in ((engine.parts.target, None), (draft.lm, draft.short_list))
        )
        starts = np.random.default_rng([job.seed, i]).random(len(output))
        ended = _ended(engine, output, conditions)
        found.append(RecordedText(tokens=tuple(output), p=p, q=q, starts=starts, ended=ended))
    return found


def rows_told(
    texts: Sequence[RecordedText],
    job: PromptBatch,
    conditions: Conditions,
    tree: DraftedTree,
    *,
    deepest: int,
    chains: Sequence[FixedChain],
) -> list[Row]:
    """Of each text of a job the steps and tokens that trees are expected to take, and what chains would take."""
    found = []
    for question, text in zip(job.questions, texts, strict=True):
        made = text.covered(tree, conditions.max_new_tokens - deepest)
        found.append(
            {
                "prompt": question.id,
                "category": question.category,
                "tokens": len(text.tokens),
                "free_tokens": made.tokens,
                "free_steps": made.steps,
                "free_drafted": made.steps * tree.num_nodes,
                "chains": by_chains(text.log_ratios, conditions, chains, ended=text.ended),
            }
        )
    return found


def rows_of(
    engine: Engine, job: PromptBatch, conditions: Conditions, *, deepest: int, chains: Sequence[FixedChain]
) -> list[Row]:
    """Of each request of a job the counts of its steps, and what chains would take for the same text."""
    found = []
    for question, made in zip(job.questions, tally(engine, job, conditions, deepest), strict=True):
        counts = {name: value for name, value in vars(made).items() if name != "output"}
        texts = covered(engine, question.tokens, made.output, conditions, chains)
        head = {"prompt": question.id, "category": question.category, "tokens": len(made.output)}
        found.append({**head, **counts, "chains": texts})
    return found
