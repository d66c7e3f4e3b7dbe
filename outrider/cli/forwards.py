"""The models of an engine whose forwards run in a way that was chosen."""

from collections.abc import Iterator
from dataclasses import fields, is_dataclass

from outrider.drafters.protocol import lm_of
from outrider.engine.engine import Engine
from outrider.lm.head import HeadLM
from outrider.lm.model import LanguageModel


def models(engine: Engine) -> dict[str, LanguageModel]:
    """The target and the draft model, by role; those with recurrent layers, and other drafters, are left out."""
    draft = lm_of(engine.parts.drafter)
    # A draft model with another vocabulary stands behind a translation.
    by_role = {"target": engine.parts.target, "draft model": getattr(draft, "lm", draft)}
    return {role: lm for role, lm in by_role.items() if isinstance(lm, LanguageModel)}


def heads(engine: Engine) -> list[HeadLM]:
    """The heads that the engine's drafter runs, with those of drafters within it."""
    return list(_heads(engine.parts.drafter))


def chosen(engine: Engine) -> dict[str, str]:
    """For each model, how its forwards run, and the times that decided it; for heads, how they run."""
    by_role = {role: str(lm.choice) for role, lm in models(engine).items() if lm.choice is not None}
    kinds = list(dict.fromkeys(head.forward for head in heads(engine)))
    return by_role | ({"head": ", ".join(kinds)} if kinds else {})


def could_be_compiled(engine: Engine) -> bool:
    """Whether `outrider prepare` would make forwards of the target that are not there yet."""
    target = models(engine).get("target")
    return target is not None and target.why_not("compiled") is None and not target.package.exists()


def _heads(value: object) -> Iterator[HeadLM]:
    if isinstance(value, HeadLM):
        yield value
    elif isinstance(value, tuple):
        for part in value:
            yield from _heads(part)
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield from _heads(getattr(value, field.name))
