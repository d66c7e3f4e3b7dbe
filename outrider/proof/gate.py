"""The gate before any printed speedup: greedy identity of this very pair in float32, the rows of a sampled batch, and
the dice.
"""

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from outrider.core.deadline import Deadline
from outrider.core.progress import task
from outrider.core.types import InputError
from outrider.decoding.protocol import NoDistribution
from outrider.engine.engine import Engine
from outrider.host import remembered
from outrider.lengths.experience import Experience
from outrider.lm.fingerprint import fingerprint, machine, source
from outrider.lm.protocol import LM
from outrider.lm.target_info import TargetInfo
from outrider.lm.weights.plain import rounds_activations
from outrider.proof.draws import BOUND, dice_law_of
from outrider.proof.identity import Difference, Identity, identity
from outrider.proof.nodes import Nodes, compare_nodes

NUM_TOKENS, NUM_SAMPLED = 32, 8
TIME_LIMIT = 60.0
"""Seconds that the gate takes, about, where no number is given. A large model is checked on fewer tokens then."""
PROMPTS = ("Once upon a time", "The answer to the question is", "def main(")
"""Three openings of texts."""
PACKAGE = Path(__file__).parent.parent
Copies = list[tuple[LM, LM]]
"""A target and its copy in float32, or nothing."""
REFUSED = "no speedup is printed for it. `outrider prove` shows more"


@dataclass(frozen=True, kw_only=True)
class Passed:
    """What the gate found.

    Attributes:
        identity: Greedy outputs with and without the drafter.
        nodes: The target's rows at the drafts of a sampled batch, against those of transformers.
        dice: Smallest p-value of the tests of the dice, corrected for their number.
        num_prompts: Prompts of the greedy outputs.
        seconds: How long the checks took.
        time_limit: How long they were to take.
    """

    identity: Identity
    nodes: Nodes
    dice: float
    num_prompts: int
    seconds: float
    time_limit: float

    @property
    def summary(self) -> str:
        """What was checked, in one line."""
        return (
            f"checked on {self.num_prompts} prompts and {self.identity.num_tokens} greedy tokens in float32, and on "
            f"{self.nodes.num_nodes} rows, in {self.seconds:.0f} s"
        )

    @property
    def fault(self) -> str | None:
        """What is wrong, as the beginning of a sentence; None if nothing is."""
        if not self.identity.holds:
            worst = next(d for d in self.identity.differences if not d.tie)
            return (
                f"this pair is not greedy-identical in float32: prompt {worst.prompt}, token {worst.position}, logit "
                f"gap {worst.gap:.3g}"
            )
        if not self.nodes.holds:
            return (
                f"the target's rows at drafts of this pair are not those of transformers: logits differ by "
                f"{self.nodes.logits:.3g} of their range, probabilities by {self.nodes.probabilities:.3g} of themselves"
            )
        return None if self.dice > BOUND else f"the dice do not keep their law (p = {self.dice:.3g})"


def gate(engine: Engine, time_limit: float = TIME_LIMIT, copies: Copies | None = None) -> Passed:
    """Check an engine's pair in float32: greedy identity on 3 prompts x 32 tokens, and the rows of a sampled batch of
    mixed settings; and check the dice. The result is cached by `key`, and counts where as little time is given.

    Args:
        time_limit: Seconds after which a check goes no further, though some tokens of every prompt are compared.
        copies: The last target's copy in float32, for engines with the same target; changes in place.

    Raises:
        InputError: A check fails; no speedup may be printed.
    """
    prompts = openings(engine)
    name = key(engine, prompts)
    passed = None if name is None else _read(remembered.read("gate", {"pair": name}))
    if passed is None or (passed.time_limit < time_limit and passed.seconds >= passed.time_limit):
        try:
            passed = _checked(engine, prompts, time_limit, copies)
        except Exception as error:
            raise InputError(f"a check of this pair failed: {failure(error)}; {REFUSED}") from error
        if name is not None:
            # A gap that is not a number is not kept.
            with suppress(ValueError):
                remembered.write("gate", {"pair": name}, asdict(passed))
    if passed.fault is not None:
        raise InputError(f"{passed.fault}; {REFUSED}")
    return passed


def failure(error: Exception) -> str:
    """What an error that ended a check says of the pair, in one sentence.

    Raises:
        InputError: The error itself, where it says that what was asked cannot be checked; that is no fault.
    """
    if isinstance(error, InputError) and not isinstance(error, NoDistribution):
        raise error
    return f"it ended with {type(error).__name__}: {' '.join(str(error).split()) or 'no reason'}"


def _checked(engine: Engine, prompts: Sequence[list[int]], time_limit: float, copies: Copies | None) -> Passed:
    """What the checks find."""
    began, until = time.monotonic(), Deadline.after(time_limit)
    with task("the dice"):
        dice = dice_law_of(engine).p_value
    with task("a copy in float32"):
        exact = in_float32(engine, copies)
    room = min(each.parts.target.max_context for each in (engine, exact)) - max(len(p) for p in prompts)
    nodes = compare_nodes(exact, prompts, min(NUM_SAMPLED, room), until.part(0.4))
    same = identity(exact, prompts, min(NUM_TOKENS, room), until)
    exact.rest()
    return Passed(
        identity=same,
        nodes=nodes,
        dice=dice,
        num_prompts=len(prompts),
        seconds=time.monotonic() - began,
        time_limit=time_limit,
    )


def openings(engine: Engine) -> list[list[int]]:
    """The prompts of the check; without a tokenizer, three lists of low token ids."""
    return [engine.encode(p) for p in PROMPTS] if engine.tokenizer else [[1], [2, 3], [3, 1, 2]]


def _read(kept: Mapping[str, Any] | None) -> Passed | None:
    """The result that was remembered; None if there is none or it makes no sense."""
    if kept is None:
        return None
    try:
        greedy = kept["identity"]
        differences = tuple(
            Difference(
                prompt=int(each["prompt"]),
                position=int(each["position"]),
                plain=int(each["plain"]),
                drafted=int(each["drafted"]),
                gap=float(each["gap"]),
                span=float(each["span"]),
            )
            for each in greedy["differences"]
        )
        identity = Identity(num_tokens=int(greedy["num_tokens"]), differences=differences)
        numbers = {name: float(kept[name]) for name in ("dice", "seconds", "time_limit")}
        return Passed(identity=identity, nodes=Nodes(**kept["nodes"]), num_prompts=int(kept["num_prompts"]), **numbers)
    except (KeyError, TypeError, ValueError, OverflowError):
        return None


def in_float32(engine: Engine, copies: Copies | None = None) -> Engine:
    """The same engine in float32. Models in float32 or float64 and quantised models are used unchanged. A target that
    rounds activations to 8 bits is in float64: what differs by 1e-7 before may differ by a whole step behind.

    Args:
        copies: The last target's copy, which is used again for the same target; changes in place.
    """
    # Both use the slots of one target where nothing is cast.
    engine.rest()
    parts = engine.parts
    rounds = any(rounds_activations(module) for module in parts.target.modules.values())
    copies = [] if copies is None else copies
    if not copies or copies[0][0] is not parts.target:
        # A copy takes some bytes a weight, so there is never more than one.
        copies.clear()
        copies.append((parts.target, parts.target.cast(torch.float64 if rounds else torch.float32)))
    target = copies[0][1]
    drafter = parts.drafter.cast(TargetInfo.of(target, engine.tokenizer))
    return Engine(
        # Without costs, drafts have a fixed length, so that there is something to check.
        replace(parts, target=target, drafter=drafter, experience=Experience()),
        tokenizer=engine.tokenizer,
        eos_ids=engine.eos_ids,
        max_slots=engine.max_slots,
    )


def key(engine: Engine, prompts: Sequence[Sequence[int]], package: Path = PACKAGE) -> str | None:
    """A hash of everything that the outputs of a pair depend on; None if something cannot be read.

    Args:
        package: Where the source lies that decodes.
    """
    return fingerprint(
        source(package),
        (torch.__version__, version("torch"), version("transformers")),
        machine(engine.parts.target.device),
        engine.parts,
        (engine.max_slots, engine.max_prefill_tokens, engine.eos_ids),
        [list(prompt) for prompt in prompts],
    )
