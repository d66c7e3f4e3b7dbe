"""FlashSpec, on models of transformers: `prompt lookup`, `draft model`, and `prompt lookup, draft model`."""

from collections.abc import Sequence
from typing import Any

from outrider.bench.engines.driver import Driver, DriverRequest, EngineOutput, Options, serve
from outrider.bench.engines.engine import DRAFT_MODEL, LOOKUP, PeerEngine, python_driver
from outrider.bench.engines.environments import TORCH, TRANSFORMERS, Environment, installed
from outrider.bench.engines.transformers_model import load, one_at_a_time

BOTH = f"{LOOKUP}, {DRAFT_MODEL}"
"""What it does by default: it looks up where the text has a match, and asks the draft model elsewhere."""


class FlashspecDriver(Driver):
    """FlashSpec within this process. It has no way to decode plainly."""

    def start(self, options: Options) -> None:
        """Load the models."""
        import torch
        from flashspec.engine import HuggingFaceDrafter, NgramDrafter, TargetModel

        target = load(options.target, options)
        place = (target.device, target.dtype)
        self._options, self._target = options, TargetModel(options.target, *place, model=target)
        self._drafters: list[Any] = [] if options.mode == DRAFT_MODEL else [NgramDrafter(max_ngram=options.ngram)]
        self._models: list[Any] = []
        if DRAFT_MODEL in options.mode:
            self._models = [HuggingFaceDrafter(options.draft, *place, model=load(options.draft, options))]
        self._tensor = torch.tensor

    def ask(self, asked: DriverRequest) -> EngineOutput:
        """Decode the prompt of a run."""
        return one_at_a_time(asked, self._answer)

    def _answer(self, prompt: Sequence[int], asked: DriverRequest) -> tuple[list[int], list[tuple[int, int]]]:
        """The new tokens behind a prompt, and each step's draft tokens and accepted ones."""
        from flashspec import BanditConfig, FlashSpecConfig, SamplingConfig, SpeculativeEngine

        law = SamplingConfig(gamma=self._options.draft_tokens, temperature=asked.temperature, seed=asked.seed)
        for model in self._models if asked.temperature else ():
            model.set_temperature(asked.temperature)
        config = FlashSpecConfig(
            device="cpu",
            dtype=self._options.dtype,
            drafter_strategy="composite-g6-f2" if self._options.mode == BOTH else "bandit",
            bandit=BanditConfig(n_arms=1),
            sampling=law,
        )
        engine = SpeculativeEngine(config, [*self._models, *self._drafters], self._target)
        made = engine.generate(self._tensor([list(prompt)]), max_new_tokens=asked.new_tokens, eos_token_ids=())
        tokens = made.output_ids[0, : made.n_tokens_generated].tolist()
        return tokens, [(step.proposed, step.accepted) for step in made.arm_steps]


ENGINE = PeerEngine(
    title="FlashSpec",
    modes=(LOOKUP, DRAFT_MODEL, BOTH),
    command=python_driver("flashspec"),
    environment=Environment(name="flashspec", pins=(TORCH, TRANSFORMERS, "flashspec==0.3.1"), make=installed),
    plain=LOOKUP,
)


if __name__ == "__main__":
    serve(FlashspecDriver())
