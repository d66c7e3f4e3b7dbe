"""Inside transformers: `model.generate(..., custom_generate=outrider.as_custom_generate(...))`, or in its place."""

from outrider.integrate.custom import CustomGenerate, as_custom_generate
from outrider.integrate.generate import generate, write_custom_generate

__all__ = ["CustomGenerate", "as_custom_generate", "generate", "write_custom_generate"]
