"""On a GPU: one head of the recipe `heads`, trained for a larger target, judged, and decoded with.

`python -m recipes gpu_head --target org/name --data TEXTS --prompts FILE --work DIR --out DIR` does with one head and
one target what `python -m recipes heads --engine` does with all heads and the embedded target. The target's hidden
states are computed in the training steps. Without a GPU the recipe ends with an error and writes nothing.
"""

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import torch
import typer

from outrider.core.types import InputError
from recipes import options, trained
from recipes.head_plan import Plan
from recipes.head_ways import chosen_heads
from recipes.heads import run

QUICK = {name: value for name, value in trained.QUICK.items() if name != "seeds"} | {
    "num_texts": 12,
    "num_prompts": 2,
    "batch_size": 2,
    "timed_prompts": 1,
}


@options.with_fields(
    Plan,
    without=("text_steps", "seeds", "engine", "stand_in", "compiled", "dtype", "threads"),
    num_texts=8000,
    length=512,
    steps=2000,
    batch_size=16,
    learning_rate=3e-4,
    timed_prompts=24,
    max_new_tokens=256,
    rounds=3,
)
def main(
    plan: Plan,
    target: Annotated[str, typer.Option(help="Directory or hub id of the target.")],
    head: Annotated[str, typer.Option(help="The head, by its name in the recipe `heads`.")] = "eagle3",
) -> None:
    """Train one head for a larger target."""
    chosen = chosen_heads(head)
    if len(chosen) != 1:
        raise InputError(f"--head must be one head, got {head!r}")
    if not torch.cuda.is_available():
        raise InputError("this recipe has not been run: it needs a CUDA device, and torch finds none here")
    own = replace(
        plan,
        target=target,
        device="cuda",
        work=plan.work / Path(target).name,
        seeds=1,
        engine=True,
        dtype="auto",
        threads=torch.get_num_threads(),
    )
    with own.folder("gpu_head", target=target, head=head, prompts=own.names, rounds=own.rounds) as place:
        run(own, chosen, place)
