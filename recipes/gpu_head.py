"""On a GPU: one head of the recipe `heads`, trained for a larger target, judged, and decoded with.

`python -m recipes gpu_head --target org/name --data TEXTS --prompts FILE --work DIR --out DIR` does with one head and
one target what `python -m recipes heads --engine` does with all heads and the embedded target. The target's hidden
states are computed in the training steps. Without a GPU the recipe ends with an error and writes nothing.
"""

from pathlib import Path
from typing import Annotated

import torch
import typer

from outrider.bench.folder import folder
from outrider.core.types import InputError
from recipes import options
from recipes.head_runs import Timing
from recipes.head_texts import Wanted
from recipes.head_ways import chosen_heads
from recipes.heads import Plan, PromptFiles, PromptsOfFile, TimedPrompts, run
from recipes.trained import Budget

QUICK = {"num_texts": 12, "steps": 2, "num_prompts": 2, "length": 48, "batch_size": 2, "timed_prompts": 1}


def main(
    target: Annotated[str, typer.Option(help="Directory or hub id of the target.")],
    data: options.Data,
    work: options.Work,
    prompts: PromptFiles,
    out: options.Out = None,
    head: Annotated[str, typer.Option(help="The head, by its name in the recipe `heads`.")] = "eagle3",
    num_texts: options.NumTexts = 8000,
    length: options.Length = 512,
    steps: options.Steps = 2000,
    batch_size: options.NumRows = 16,
    learning_rate: options.LearningRate = 3e-4,
    num_prompts: PromptsOfFile = 60,
    timed_prompts: TimedPrompts = 24,
    max_new_tokens: options.MaxNewTokens = 256,
    rounds: options.Rounds = 3,
) -> None:
    """Train one head for a larger target."""
    chosen = chosen_heads(head)
    if len(chosen) != 1:
        raise InputError(f"--head must be one head, got {head!r}")
    if not torch.cuda.is_available():
        raise InputError("this recipe has not been run: it needs a CUDA device, and torch finds none here")
    budget = Budget(
        num_texts=num_texts,
        length=length,
        steps=steps,
        batch_size=batch_size,
        learning_rate=learning_rate,
        seeds=1,
        num_prompts=num_prompts,
    )
    wanted = Wanted(
        data=data,
        prompts=tuple(prompts),
        num_texts=num_texts,
        length=length,
        num_prompts=num_prompts,
        target=target,
        device="cuda",
    )
    timing = Timing(num_prompts=timed_prompts, max_new_tokens=max_new_tokens, rounds=rounds, dtype="auto")
    own = work / Path(target).name
    plan = Plan(budget=budget, wanted=wanted, timing=timing, work=own, threads=torch.get_num_threads())
    names = [file.name for file in plan.wanted.prompts]
    given = {**vars(budget), "target": target, "head": head, "prompts": names, "rounds": rounds, "out": out}
    with folder(out, "gpu_head", given) as place:
        run(plan, chosen, place)
