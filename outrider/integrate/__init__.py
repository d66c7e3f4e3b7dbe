"""Inside transformers: `model.generate(..., custom_generate=outrider.as_custom_generate(...))`."""

from outrider.integrate.custom import CustomGenerate, as_custom_generate
from outrider.integrate.directory import generate_with, write_custom_generate

__all__ = ["CustomGenerate", "as_custom_generate", "generate_with", "write_custom_generate"]
