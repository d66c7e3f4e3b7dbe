"""The gate of a measurement: no configuration is timed before it is shown to be lossless."""

from outrider.core.inputs import InputError
from outrider.core.progress import task
from outrider.engine.engine import Engine
from outrider.proof.gate import Copies, failure, gate
from outrider.proof.pair import LAW_BOUND
from outrider.proof.rule import law_error


class NotLossless(Exception):
    """Why a configuration must not be timed, in one sentence."""


def passed(engine: Engine, time_limit: float, copies: Copies) -> str:
    """Let a configuration be timed only if its law is the target's. Returns what was checked, in one line.

    The law of its verifier is enumerated on small tables. Then the gate compares greedy texts in float32 with plain
    decoding, and the rows of a sampled batch with those of transformers, and checks the dice. A rule that declares
    itself lossy is not checked: who allows it knows.

    Args:
        time_limit: Seconds that the gate takes, about.
        copies: What engines of one target share; see `gate`.

    Raises:
        NotLossless: A check fails; in one sentence.
    """
    if is_lossy(engine):
        return "not checked, because it says of itself that it is lossy"
    with task("its law, enumerated on small tables"):
        try:
            off = law_error(engine.parts)
        except Exception as error:
            raise NotLossless(f"its law cannot be enumerated on small tables: {failure(error)}") from error
    if not off < LAW_BOUND:
        raise NotLossless(f"its law is not the target's: enumerated on small tables, it is off by {off:.2g}")
    try:
        return gate(engine, time_limit, copies).summary
    except InputError as failed:
        raise NotLossless(str(failed).partition("; no speedup")[0]) from failed


def is_lossy(engine: Engine) -> bool:
    """Whether a part says of itself that the output's law is not the target's."""
    return bool(getattr(engine.parts.verifier, "lossy", False)) or engine.parts.length.lossy is not None
