"""One of the processes that hold a target together: decodes some prompts and prints the tokens as JSON.

`torchrun --nproc-per-node 2 -m tests.lm.divided MODEL HEAD`.
"""

import json
import sys

import torch.distributed as dist

import outrider
from outrider.core.ranks import is_first, launched, together

PROMPTS = [[5, 6, 7, 5, 6], [9, 3, 9, 3]]


def decoded(place: str, head: str, *, tp_plan: str | None) -> dict[str, list[list[int]]]:
    """The tokens of each drafter at each temperature."""
    found = {}
    for drafter in ("ngram:prompt_lookup_min=1", f"eagle:path={head}"):
        engine = outrider.load(place, drafter=drafter, tp_plan=tp_plan, dtype="float32", max_slots=2)
        for temperature in (0.0, 1.0):
            sampling = outrider.Sampling(temperature=temperature, seed=3)
            outputs = engine.generate(PROMPTS, max_new_tokens=12, sampling=sampling, ignore_eos=True)
            found[f"{drafter[:5]} {temperature}"] = [output.tokens for output in outputs]
        # Without a seed all processes draw alike too.
        found[f"{drafter[:5]} drawn"] = [
            each.tokens for each in engine.generate(PROMPTS, max_new_tokens=6, ignore_eos=True)
        ]
    return found


def main(place: str, head: str) -> None:
    """Print what every process decodes, in the first one."""
    found = decoded(place, head, tp_plan="auto") | {"processes": [together(), launched()]}
    told: list[object] = [None] * dist.get_world_size()
    dist.all_gather_object(told, found)
    if is_first():
        print(json.dumps(told))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
