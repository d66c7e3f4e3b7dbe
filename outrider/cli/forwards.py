"""The models of an engine whose forwards run in a way that was chosen."""

from outrider.engine.engine import Engine
from outrider.lm.model import LanguageModel


def models(engine: Engine) -> dict[str, LanguageModel]:
    """The target and the draft model, by role; those with recurrent layers, and other drafters, are left out."""
    draft = getattr(engine.parts.drafter, "lm", None)
    # A draft model with another vocabulary stands behind a translation.
    found = {"target": engine.parts.target, "draft model": getattr(draft, "lm", draft)}
    return {role: lm for role, lm in found.items() if isinstance(lm, LanguageModel)}


def chosen(engine: Engine) -> dict[str, str]:
    """For each model, how its forwards run, and the times that decided it."""
    return {role: str(lm.choice) for role, lm in models(engine).items() if lm.choice is not None}
