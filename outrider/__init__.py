"""Outrider: speculative decoding for Hugging Face causal language models, lossless and proven."""

from outrider.engine.engine import Engine
from outrider.engine.output import Output, Update
from outrider.integrate import as_custom_generate
from outrider.load import load
from outrider.theory.optimum import optimal_acceptance
from outrider.types import InputError, Request, Sampling, Step

__version__ = "0.1.0"
__all__ = [
    "Engine",
    "InputError",
    "Output",
    "Request",
    "Sampling",
    "Step",
    "Update",
    "as_custom_generate",
    "load",
    "optimal_acceptance",
]
