"""Speculative decoding inside transformers: as `custom_generate` of `model.generate`, or in place of `generate`."""

from outrider.integrate.custom import CustomGenerate, as_custom_generate
from outrider.integrate.generate import generate, write_custom_generate

__all__ = ["CustomGenerate", "as_custom_generate", "generate", "write_custom_generate"]
