"""All checks of a pair: the law of its verifier, its greedy outputs, and its samples."""

from collections.abc import Callable
from dataclasses import dataclass

from outrider.engine.engine import Engine
from outrider.proof.gate import NUM_TOKENS, in_float32, openings
from outrider.proof.identity import Identity, identity
from outrider.proof.rule import law_error
from outrider.proof.statistics import Samples, sampled_law

LAW_BOUND = 1e-12
"""Law errors below this are rounding."""


@dataclass(frozen=True, kw_only=True)
class Proof:
    """What was found.

    Attributes:
        law_error: Largest error of the verifier's law, enumerated on small tables.
        identical: Greedy outputs in float32 against those of plain decoding.
        up_to_ties: The same in the pair's own type.
        samples: Drawn outputs against the target's probabilities; None where none were drawn.
    """

    law_error: float
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
        return self.exact_law and self.identical.holds and not differs


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
        progress: Called with the number of finished parts: three checks and all draws.
    """
    prompts = openings(engine)
    error = law_error(engine.parts)
    progress(1)
    identical = identity(in_float32(engine), prompts, NUM_TOKENS)
    progress(1)
    up_to_ties = identity(engine, prompts, NUM_TOKENS)
    progress(1)
    samples = None
    if num_draws:
        # In the first of these prompts, drafters that look for repetitions find one.
        repeated = [[*prompts[0], *prompts[0]], *prompts]
        samples = sampled_law(engine, repeated, num_draws, temperature, seed, lambda output: progress(1))
    return Proof(law_error=error, identical=identical, up_to_ties=up_to_ties, samples=samples)
