"""All checks of a pair: the law of its verifier, the dice, the target's rows, its greedy outputs, and its samples."""

from collections.abc import Callable
from dataclasses import dataclass

from outrider.engine.engine import Engine
from outrider.lm.protocol import LM
from outrider.proof.draws import DiceLaw, dice_law_of
from outrider.proof.gate import NUM_SAMPLED, NUM_TOKENS, in_float32, openings
from outrider.proof.identity import Identity, identity
from outrider.proof.nodes import Nodes, compare_nodes
from outrider.proof.plain import model_of
from outrider.proof.rule import law_error
from outrider.proof.statistics import Samples, sampled_law

NUM_CHECKS = 6
"""Checks without the draws."""
LAW_BOUND = 1e-12
"""Law errors below this are rounding."""


@dataclass(frozen=True, kw_only=True)
class Proof:
    """What was found.

    Attributes:
        law_error: Largest error of the verifier's law, enumerated on small tables.
        dice: Whether the production dice keep their law.
        nodes: In float32, the target's rows at the drafts of a sampled batch against those of transformers.
        own_nodes: The same in the pair's own type; None where that is the same.
        compared: How the target computed that was compared in float32: in another type where it is quantised.
        identical: Greedy outputs in float32 against those of plain decoding.
        up_to_ties: The same in the pair's own type.
        samples: Drawn outputs against the target's probabilities; None where none were drawn.
    """

    law_error: float
    dice: DiceLaw
    nodes: Nodes
    own_nodes: Nodes | None
    compared: str
    identical: Identity
    up_to_ties: Identity
    samples: Samples | None

    @property
    def exact_law(self) -> bool:
        """Whether the enumerated law is the target's, up to rounding."""
        return self.law_error < LAW_BOUND

    @property
    def holds(self) -> bool:
        """Whether all checks passed."""
        differs = self.samples is not None and self.samples.verdict == "differs"
        rows = self.nodes.holds and (self.own_nodes is None or self.own_nodes.holds)
        return self.exact_law and self.dice.holds and rows and self.identical.holds and not differs


def prove(
    engine: Engine,
    num_draws: int,
    temperature: float | None = None,
    seed: int = 0,
    progress: Callable[[int], None] = lambda amount: None,
) -> Proof:
    """Check an engine's pair.

    Args:
        num_draws: Number of outputs to draw; 0 skips the test of samples.
        temperature: Of the draws; None takes, for each prompt, one at which enough outputs can be told apart.
        progress: Called with the number of finished parts: `NUM_CHECKS` checks and all draws.
    """
    prompts = openings(engine)
    target = engine.parts.target
    error = law_error(engine.parts)
    progress(1)
    dice = dice_law_of(engine)
    progress(1)
    exact, room = in_float32(engine), target.max_context - max(map(len, prompts))
    num_tokens, num_sampled = min(NUM_TOKENS, room), min(NUM_SAMPLED, room)
    nodes = compare_nodes(exact, prompts, num_sampled)
    progress(1)
    own_nodes = None if exact.parts.target.dtype == target.dtype else compare_nodes(engine, prompts, num_sampled)
    progress(1)
    identical = identity(exact, prompts, num_tokens)
    progress(1)
    up_to_ties = identity(engine, prompts, num_tokens)
    progress(1)
    samples = None
    if num_draws:
        # In the first of these prompts, drafters that look for repetitions find one.
        repeated = [[*prompts[0], *prompts[0]], *prompts]
        samples = sampled_law(engine, repeated, num_draws, temperature, seed, lambda output: progress(1))
    return Proof(
        law_error=error,
        dice=dice,
        nodes=nodes,
        own_nodes=own_nodes,
        compared=how_it_computes(exact.parts.target),
        identical=identical,
        up_to_ties=up_to_ties,
        samples=samples,
    )


def how_it_computes(target: LM) -> str:
    """The type that a target computes in, such as `float32`, and whether its weights are quantised."""
    dtype = str(target.dtype).removeprefix("torch.")
    if getattr(model_of(target), "is_quantized", False):
        return f"{dtype} with quantised weights, which are not cast to float32"
    return dtype
