"""economize, on models of transformers: `plain`, `prompt lookup` and `draft model`."""

from collections.abc import Sequence
from typing import Any

from outrider.bench.engines.driver import Driver, DriverRequest, EngineOutput, Options, serve
from outrider.bench.engines.engine import DRAFT_MODEL, LOOKUP, PeerEngine, python_driver
from outrider.bench.engines.environments import TORCH, TRANSFORMERS, Environment, installed
from outrider.bench.engines.transformers_model import load, one_at_a_time


class EconomizeDriver(Driver):
    """economize within this process."""

    def start(self, options: Options) -> None:
        """Load the models."""
        import economize
        import torch
        from economize.techniques.draft_model import DraftModelConfig
        from economize.techniques.lookup import LookupConfig

        drafts: Any = LookupConfig(max_ngram=options.ngram)
        if options.mode == DRAFT_MODEL:
            drafts = DraftModelConfig(model=options.draft, dtype=options.dtype)
        self._options, self._economize, self._tensor = options, economize, torch.tensor
        self._model = economize.apply(load(options.target, options), drafts)

    def ask(self, asked: DriverRequest) -> EngineOutput:
        """Decode the prompt of a run."""
        return one_at_a_time(asked, self._answer)

    def _answer(self, prompt: Sequence[int], asked: DriverRequest) -> tuple[list[int], list[tuple[int, int]]]:
        """The new tokens behind a prompt, and each step's draft tokens and accepted ones."""
        made = self._model.decode(
            self._tensor(list(prompt)),
            asked.new_tokens,
            decoding=self._economize.DecodeConfig(
                cycle_length=1 if self._options.mode == "plain" else 1 + self._options.draft_tokens,
                verifier="rejection" if asked.temperature else None,
            ),
            selector=self._economize.TopPSampler(asked.temperature, seed=asked.seed) if asked.temperature else None,
        )
        return made.tokens.tolist(), made.acceptance


ENGINE = PeerEngine(
    title="economize",
    modes=("plain", LOOKUP, DRAFT_MODEL),
    command=python_driver("economize"),
    environment=Environment(name="economize", pins=(TORCH, TRANSFORMERS, "economize==0.3.2"), make=installed),
)


if __name__ == "__main__":
    serve(EconomizeDriver())
