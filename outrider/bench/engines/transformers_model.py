"""What drivers share whose engine decodes with models of transformers, one prompt at a time."""

from collections.abc import Callable, Sequence
from typing import Any

from outrider.bench.engines.driver import DriverRequest, EngineOutput, Options

Answer = Callable[[Sequence[int], DriverRequest], tuple[list[int], list[tuple[int, int]]]]
"""The new tokens behind a prompt, and for each step its draft tokens and how many of them were accepted."""


def load(place: str, options: Options) -> Any:
    """A model on the CPU, with as many threads as the options say."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(options.threads)
    return AutoModelForCausalLM.from_pretrained(place, dtype=getattr(torch, options.dtype)).eval()


def one_at_a_time(asked: DriverRequest, answer: Answer) -> EngineOutput:
    """Answer a run of one prompt.

    Raises:
        ValueError: There are several.
    """
    if len(asked.prompts) > 1:
        raise ValueError("it is asked for one prompt at a time")
    tokens, steps = answer(asked.prompts[0], asked)
    drafts = [step for step in steps if step[0]]
    counts = {
        "drafts": len(drafts),
        "draft_tokens": sum(drafted for drafted, _ in drafts),
        "accepted_tokens": sum(accepted for _, accepted in drafts),
    }
    return EngineOutput(tokens=[tokens], counts=counts)
