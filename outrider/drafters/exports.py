"""Which other engines run a drafter, and by which names: a trait of its class."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

ENGINES = ("vllm", "sglang", "llama.cpp", "openvino", "transformers")
"""The engines to which drafters can be exported."""


@dataclass(frozen=True, kw_only=True)
class Exports:
    """The names that other engines have for a drafter.

    A single checkpoint may still be refused, because an engine knows only some heads of a kind.

    Attributes:
        vllm: vLLM's `method`; None: it cannot run such drafters. The same holds for the other engines.
        sglang: SGLang's algorithm.
        llama: llama.cpp's `--spec-type`.
        openvino: What OpenVINO GenAI calls it.
        transformers: `assistant_model`, or `custom_generate`: Outrider's own code, which transformers runs.
        draws: Whether vLLM can draw its drafts (`draft_sample_method` probabilistic); otherwise they are greedy.
        newer_runner: Whether vLLM drafts so in its newer model runner alone, which needs a GPU.
        options: What vLLM's `speculative_config` needs beside the usual keys.
        has_files: Whether it has weights of its own to be written.
        instead: The drafter of the catalog that is most like it and that more engines run; None: a draft model.

    Example:
        >>> found = Exports(vllm="medusa", draws=False)
        >>> found.method("vllm"), found.method("llama.cpp"), found.engines
        ('medusa', None, ('vllm', 'transformers'))
    """

    vllm: str | None = None
    sglang: str | None = None
    llama: str | None = None
    openvino: str | None = None
    transformers: str | None = "custom_generate"
    draws: bool = True
    newer_runner: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)
    has_files: bool = True
    instead: str | None = None

    def method(self, engine: str) -> str | None:
        """The name that an engine of `ENGINES` has for it; None if the engine cannot run it."""
        name: str | None = getattr(self, engine.partition(".")[0])
        return name

    @property
    def engines(self) -> tuple[str, ...]:
        """The engines that can run it."""
        return tuple(engine for engine in ENGINES if self.method(engine) is not None)
