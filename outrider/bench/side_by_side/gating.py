"""The gate of a measurement: no configuration is timed before it is shown to be lossless."""

from outrider.core.inputs import InputError
from outrider.engine.engine import Engine
from outrider.proof.gate import gate
from outrider.proof.pair import LAW_BOUND
from outrider.proof.rule import law_error


def reason_to_stop(engine: Engine) -> str | None:
    """Why a configuration must not be timed, in one sentence; None if its law is the target's.

    The law of its verifier is enumerated on small tables. Then the gate compares greedy texts in float32 with plain
    decoding, and the rows of a sampled batch with those of transformers, and checks the dice. A rule that declares
    itself lossy is not checked: who allows it knows.
    """
    if is_lossy(engine):
        return None
    error = law_error(engine.parts)
    if not error < LAW_BOUND:
        return f"its law is not the target's: enumerated on small tables, it is off by {error:.2g}"
    try:
        gate(engine)
    except InputError as failed:
        return str(failed).partition("; no speedup")[0]
    return None


def is_lossy(engine: Engine) -> bool:
    """Whether a part says of itself that the output's law is not the target's."""
    return bool(getattr(engine.parts.verifier, "lossy", False)) or engine.parts.length.lossy is not None
