"""One of the processes that hold a target together: decodes some prompts and writes the tokens of all processes."""

import json
from pathlib import Path

import torch.distributed as dist

import outrider
from outrider.core.launched import launched
from outrider.core.ranks import is_first, together

PROMPTS = [[5, 6, 7, 5, 6], [9, 3, 9, 3]]


def decoded(target: str, head: str, *, tp_plan: str | None) -> dict[str, list[list[int]]]:
    """The tokens of two drafters at two temperatures."""
    found = {}
    for name, drafter in (("ngram", "ngram:prompt_lookup_min=1"), ("eagle", f"eagle:path={head}")):
        # What several processes use by default.
        length = "fixed:5" if tp_plan is None else None
        engine = outrider.load(target, drafter=drafter, length=length, tp_plan=tp_plan, dtype="float32", max_slots=2)
        for temperature in (0.0, 1.0):
            sampling = outrider.Sampling(temperature=temperature, seed=3)
            outputs = engine.generate(PROMPTS, max_new_tokens=12, sampling=sampling, ignore_eos=True)
            found[f"{name} at {temperature}"] = [output.tokens for output in outputs]
        unseeded = engine.generate(PROMPTS, max_new_tokens=6, ignore_eos=True)
        found[f"{name} without a seed"] = [output.tokens for output in unseeded]
    return found


def main(target: str, head: str, out: str) -> None:
    """Run as one of two processes, as `torchrun` would start it. The first writes what all of them decoded."""
    found = decoded(target, head, tp_plan="auto") | {"processes": [together(), launched()]}
    told: list[object] = [None] * dist.get_world_size()
    dist.all_gather_object(told, found)
    if is_first():
        Path(out).write_text(json.dumps(told))
    dist.destroy_process_group()
