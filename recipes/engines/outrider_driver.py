"""Outrider behind the driver's lines: `plain`, `suffix` and `draft model`, with the options that it has by default."""

from typing import Any

import torch

import outrider
from outrider.embedded import EMBEDDED_DRAFT, EMBEDDED_TARGET
from recipes.engines.talk import Asked, Decode, Options, drive


def load(options: Options) -> Decode:
    """An engine with as many slots as there may be prompts at once."""
    torch.set_num_threads(options.threads)
    engine = outrider.load(**parts(options), dtype=options.dtype, max_slots=options.batch)

    def decode(asked: Asked) -> list[list[int]]:
        engine.rest()
        samplings = [
            outrider.Sampling(temperature=asked.temperature, seed=1000 * asked.seed + i)
            for i in range(len(asked.prompts))
        ]
        outputs = engine.generate(asked.prompts, max_new_tokens=asked.new_tokens, sampling=samplings, ignore_eos=True)
        return [list(output.tokens) for output in outputs]

    return decode


def parts(options: Options) -> dict[str, Any]:
    """Target and drafter; none of both for the pair that ships with Outrider, whose draft length is its own."""
    if options.mode == "draft model":
        if (options.target, options.draft) == (str(EMBEDDED_TARGET), str(EMBEDDED_DRAFT)):
            return {}
        return {"target": options.target, "drafter": f"model:path={options.draft}"}
    return {"target": options.target, "drafter": {"plain": "none", "suffix": "suffix"}[options.mode]}


if __name__ == "__main__":
    drive(load)
