"""Outrider: `plain`, `suffix` and `draft model`, with the options that it has by default."""

from typing import Any

import torch

import outrider
from outrider.bench.engines.driver import Answer, Asked, Driver, Options, serve
from outrider.bench.engines.engine import DRAFT_MODEL, Engine, python_driver
from outrider.embedded import EMBEDDED_DRAFT, EMBEDDED_TARGET

ENGINE = Engine(title="Outrider", modes=("plain", "suffix", DRAFT_MODEL), command=python_driver("outrider"))


class OutriderDriver(Driver):
    """An engine with as many slots as there may be prompts at once."""

    def start(self, options: Options) -> None:
        """Load the models."""
        torch.set_num_threads(options.threads)
        self._engine = outrider.load(**parts(options), dtype=options.dtype, max_slots=options.batch)

    def ask(self, asked: Asked) -> Answer:
        """Decode the prompts of a run, from a cold cache."""
        self._engine.rest()
        samplings = [
            outrider.Sampling(temperature=asked.temperature, seed=1000 * asked.seed + i)
            for i in range(len(asked.prompts))
        ]
        outputs = self._engine.generate(
            asked.prompts, max_new_tokens=asked.new_tokens, sampling=samplings, ignore_eos=True
        )
        return Answer(tokens=[list(output.tokens) for output in outputs])


def parts(options: Options) -> dict[str, Any]:
    """Target and drafter; none of both for the pair that ships with Outrider, whose draft length is its own."""
    if options.mode == DRAFT_MODEL:
        if (options.target, options.draft) == (str(EMBEDDED_TARGET), str(EMBEDDED_DRAFT)):
            return {}
        return {"target": options.target, "drafter": f"model:path={options.draft}"}
    return {"target": options.target, "drafter": {"plain": "none", "suffix": "suffix"}[options.mode]}


if __name__ == "__main__":
    serve(OutriderDriver())
