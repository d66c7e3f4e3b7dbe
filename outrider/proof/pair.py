"""All checks of a pair: the law of its verifier, the dice, the target's rows, its greedy outputs, and its samples."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from outrider.core.deadline import ENDLESS, Deadline
from outrider.core.progress import task
from outrider.core.types import Sampling
from outrider.engine.engine import Engine
from outrider.lm.protocol import LM
from outrider.proof.draws import DiceLaw, dice_law_of
from outrider.proof.gate import NUM_SAMPLED, NUM_TOKENS, failure, in_float32, openings
from outrider.proof.identity import Identity, identity
from outrider.proof.nodes import Nodes, compare_nodes
from outrider.proof.plain import is_exact, model_of
from outrider.proof.rule import law_error
from outrider.proof.statistics import LONGEST, Samples, sampled_law

Result = TypeVar("Result")
SHARE = 0.1
"""What part of the time that is left each check of the models may take; the draws get what the checks leave."""
LAW_BOUND = 1e-12
"""Law errors below this are rounding."""


@dataclass(frozen=True, kw_only=True)
class Proof:
    """What was found. What a check found is None where it ended with an error, which is a fault of the pair.

    Attributes:
        law_error: Largest error of the verifier's law, enumerated on small tables.
        dice: Whether the production dice keep their law.
        nodes: In float32, the target's rows at the drafts of a sampled batch against those of transformers.
        own_nodes: The same in the pair's own type; None where that is the same.
        compared: How the target computed that was compared in float32: in another type where it is quantised.
        identical: Greedy outputs in float32 against those of plain decoding.
        up_to_ties: The same in the pair's own type.
        samples: Outputs drawn in float32 against the target's probabilities; None where none were drawn.
        errors: The errors that ended checks, in one sentence each, by the names of the checks.
    """

    law_error: float | None
    dice: DiceLaw | None
    nodes: Nodes | None
    own_nodes: Nodes | None
    compared: str
    identical: Identity | None
    up_to_ties: Identity | None
    samples: Samples | None
    errors: Mapping[str, str] = field(default_factory=dict)

    @property
    def exact_law(self) -> bool:
        """Whether the enumerated law is the target's, up to rounding."""
        return self.law_error is not None and self.law_error < LAW_BOUND

    @property
    def holds(self) -> bool:
        """Whether all checks passed."""
        checks = (self.dice, self.nodes, self.own_nodes, self.identical)
        differs = self.samples is not None and self.samples.verdict == "differs"
        return not self.errors and self.exact_law and all(each is None or each.holds for each in checks) and not differs


def prove(
    engine: Engine,
    num_draws: int,
    temperature: float | None = None,
    seed: int = 0,
    until: Deadline | None = None,
) -> Proof:
    """Check an engine's pair.

    Args:
        num_draws: Number of outputs to draw; 0 skips the test of samples.
        temperature: Of the draws; None takes, for each prompt, one at which enough outputs can be told apart.
        until: When checks of the models go no further; as long as time is left, outputs are drawn until they can tell
            something. None makes every check whole and draws the number that was asked for.
    """
    prompts = openings(engine)
    target = engine.parts.target
    errors: dict[str, str] = {}

    def checked(name: str, check: Callable[[], Result]) -> Result | None:
        with task(name):
            return _checked(name, check, errors)

    error = checked("exact law", lambda: law_error(engine.parts))
    dice = checked("dice", lambda: dice_law_of(engine))
    with task("a copy in float32"):
        exact = in_float32(engine)
    room = min(target.max_context, exact.parts.target.max_context) - max(map(len, prompts))
    num_tokens, num_sampled, end = min(NUM_TOKENS, room), min(NUM_SAMPLED, room), until or ENDLESS
    nodes = checked("rows", lambda: compare_nodes(exact, prompts, num_sampled, end.part(SHARE)))
    own_nodes = None
    if exact.parts.target.dtype != target.dtype:
        own_nodes = checked("rows up to ties", lambda: compare_nodes(engine, prompts, num_sampled, end.part(SHARE)))
    identical = checked("greedy identical", lambda: identity(exact, prompts, num_tokens, end.part(SHARE)))
    up_to_ties = checked("greedy up to ties", lambda: identity(engine, prompts, num_tokens, end.part(SHARE)))
    samples = None
    if num_draws:
        # Outputs are drawn in float32: in bfloat16, rounding moves tokens across the bounds of top-k and top-p, and
        # probabilities by some percent.
        drawn = engine if is_exact(target) else exact
        samples = checked(
            "samples",
            lambda: sampled_law(drawn, [repeated(drawn, prompts[0]), *prompts], num_draws, temperature, seed, until),
        )
    return Proof(
        law_error=error,
        dice=dice,
        nodes=nodes,
        own_nodes=own_nodes,
        compared=how_it_computes(exact.parts.target),
        identical=identical,
        up_to_ties=up_to_ties,
        samples=samples,
        errors=errors,
    )


def repeated(engine: Engine, prompt: Sequence[int]) -> list[int]:
    """A prompt, its likeliest output, and the prompt again: drafters that look for repetitions find one there, and the
    target likes what they draft.
    """
    room = engine.parts.target.max_context - 2 * len(prompt) - LONGEST
    if room <= LONGEST:
        return [*prompt, *prompt]
    greedy = Sampling(temperature=0.0, seed=0)
    (output,) = engine.generate([prompt], max_new_tokens=LONGEST, ignore_eos=True, sampling=greedy)
    engine.rest()
    return [*prompt, *output.tokens, *prompt]


def _checked(name: str, check: Callable[[], Result], errors: dict[str, str]) -> Result | None:
    """What a check found. An error in it is a fault of the pair: it is noted in `errors`, and the result is None.

    Raises:
        InputError: What was asked cannot be checked.
    """
    try:
        return check()
    except Exception as error:
        errors[name] = failure(error)
        return None


def how_it_computes(target: LM) -> str:
    """The type that a target computes in, such as `float32`, and whether its weights are quantised."""
    dtype = str(target.dtype).removeprefix("torch.")
    if getattr(model_of(target), "is_quantized", False):
        return f"{dtype} with quantised weights, which are not cast to float32"
    return dtype
