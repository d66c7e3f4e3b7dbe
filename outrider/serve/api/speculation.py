"""What a request says about its speculation."""

from collections.abc import Mapping
from typing import Any

from outrider.serve.api.bodies import GenerationBody, SpeculationBody
from outrider.serve.api.errors import refuse
from outrider.serve.api.read import checked
from outrider.serve.run.job import RequestSpeculation

OFF = {"disable_spec_decode": True, "disable_speculative_decoding": True, "speculative": False}
"""Other engines' names for drafting nothing, with the value that says so."""
DEPTH = "speculative.n_max"
"""llama.cpp's name for the deepest draft."""


def speculation(body: GenerationBody) -> RequestSpeculation:
    """The speculation of a request. Raises ApiError for a field that cannot be followed."""
    found = _given(body)
    return RequestSpeculation(
        enabled=found.enabled,
        max_tokens=found.max_tokens,
        drafter=found.drafter,
        verifier=found.verifier,
        tree=found.tree,
        max_context=found.max_context,
    )


def _given(body: GenerationBody) -> SpeculationBody:
    """The fields, wherever the client put them."""
    extra = body.model_extra or {}
    places: list[Any] = [body.speculation, *(_inner(extra.get(name)) for name in ("vllm_xargs", "extra_body"))]
    given = next((each for each in places if each is not None), None)
    found = given if isinstance(given, SpeculationBody) else _read(given)
    for name, off in OFF.items():
        if (value := extra.get(name)) is not None:
            if not isinstance(value, bool):
                refuse(name, f"{name} must be true or false")
            found = found.model_copy(update={"enabled": value != off})
    if (depth := extra.get(DEPTH)) is not None:
        found = found.model_copy(update={"max_tokens": _read({"max_tokens": depth}).max_tokens})
    return found


def _inner(value: Any) -> Any:
    return value.get("speculation") if isinstance(value, Mapping) else None


def _read(value: Any) -> SpeculationBody:
    if value is None or isinstance(value, bool):
        return SpeculationBody(enabled=value)
    return checked(SpeculationBody, value)
