"""Outrider: speculative decoding for Hugging Face causal language models, lossless and proven.

What needs torch and transformers is imported at first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from outrider.core.inputs import InputError
from outrider.load import load
from outrider.setup import Setup

if TYPE_CHECKING:
    from outrider.core.types import Request, Sampling, Step
    from outrider.engine.engine import Engine
    from outrider.engine.generation import Generation
    from outrider.engine.output import Output, Update
    from outrider.integrate.custom import as_custom_generate
    from outrider.theory.optimum import optimal_acceptance

__version__ = "0.1.0"
__all__ = [
    "Engine",
    "Generation",
    "InputError",
    "Output",
    "Request",
    "Sampling",
    "Setup",
    "Step",
    "Update",
    "as_custom_generate",
    "load",
    "optimal_acceptance",
]
_HOMES = {
    "Engine": "engine.engine",
    "Generation": "engine.generation",
    "Output": "engine.output",
    "Request": "core.types",
    "Sampling": "core.types",
    "Step": "core.types",
    "Update": "engine.output",
    "as_custom_generate": "integrate.custom",
    "optimal_acceptance": "theory.optimum",
}
"""Where the names are that are imported at first use."""

if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        """A public name, or a module of the package, that has not been imported yet."""
        if name in _HOMES:
            globals()[name] = getattr(import_module(f"outrider.{_HOMES[name]}"), name)
            return globals()[name]
        try:
            return import_module(f"outrider.{name}")
        except ModuleNotFoundError as error:
            if error.name != f"outrider.{name}":
                raise
        raise AttributeError(f"module 'outrider' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
