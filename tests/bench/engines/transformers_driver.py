"""A driver of transformers: `plain`, `prompt lookup` and `draft model` (assisted decoding), and `hot`, which draws at
four times the temperature that it is asked for.
"""

import sys
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from outrider.bench.engines.driver import Driver, DriverRequest, EngineOutput, Options, serve
from outrider.bench.engines.engine import DRAFT_MODEL

COMMAND = [sys.executable, "-m", "tests.bench.engines.transformers_driver"]
"""Starts it."""


class TransformersDriver(Driver):
    """transformers within this process."""

    def start(self, options: Options) -> None:
        """Load the models, with end tokens that do not end."""
        torch.set_num_threads(options.threads)
        self._target, draft = (
            AutoModelForCausalLM.from_pretrained(place, dtype=getattr(torch, options.dtype)).eval()
            for place in (options.target, options.draft)
        )
        self._pad = self._target.generation_config.pad_token_id or 0
        for model in (self._target, draft):
            model.generation_config.eos_token_id = None
        self._heat = 4.0 if options.mode == "hot" else 1.0
        self._drafting: dict[str, Any] = {}
        if options.mode == "prompt lookup":
            self._drafting["prompt_lookup_num_tokens"] = options.draft_tokens
            self._drafting["max_matching_ngram_size"] = options.ngram
        if options.mode == DRAFT_MODEL:
            self._drafting["assistant_model"] = draft
            draft.generation_config.num_assistant_tokens = options.draft_tokens
            draft.generation_config.num_assistant_tokens_schedule = "constant"
            draft.generation_config.assistant_confidence_threshold = 0

    @torch.inference_mode()
    def ask(self, asked: DriverRequest) -> EngineOutput:
        """Decode the prompts of a run, padded on their left."""
        longest = max(map(len, asked.prompts))
        missing = [longest - len(prompt) for prompt in asked.prompts]
        padded = [[self._pad] * n + prompt for n, prompt in zip(missing, asked.prompts, strict=True)]
        law: dict[str, Any] = {"do_sample": False}
        if asked.temperature > 0:
            law = {"do_sample": True, "temperature": self._heat * asked.temperature, "top_k": 0, "top_p": 1.0}
        torch.manual_seed(asked.seed)
        made = self._target.generate(
            torch.tensor(padded),
            attention_mask=torch.tensor([[0] * n + [1] * (longest - n) for n in missing]),
            max_new_tokens=asked.new_tokens,
            pad_token_id=self._pad,
            **law,
            **self._drafting,
        )
        return EngineOutput(tokens=made[:, longest:].tolist())


if __name__ == "__main__":
    serve(TransformersDriver())
