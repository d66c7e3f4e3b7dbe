"""Every causal LM architecture of transformers as a target, tiny and random: does what is accepted give exactly what
`model.generate` gives, and is the rest refused with a reason?

`python -m recipes.zoo` builds one model per architecture (`recipes/tiny.py`) and variant, in float64 and in a process
of its own, and compares greedy outputs with transformers' own: chains and branching trees from a draft model that
agrees often, for three prompts of different lengths at once, and for each alone. Writes `rows.jsonl`, in which rows
that are there already are not made again, and the page `docs/architectures.md`.
"""

import json
import multiprocessing
import traceback
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from rich.progress import Progress
from transformers import PreTrainedConfig, PreTrainedModel, logging

from outrider.catalog import make
from outrider.decode import Parts
from outrider.drafters.model import Model
from outrider.engine import Engine
from outrider.lengths.fixed import Fixed
from outrider.lm.open import as_lm
from outrider.lm.support import is_recurrent, refusal
from outrider.types import InputError, Sampling
from recipes.tiny import MODEL_TYPES, VOCAB, Float64, noisy, tiny_config, tiny_model

ROOT = Path(__file__).parent.parent
NUM_TOKENS = 24
SEEDS, VARIOUS = 6, 8
TREES = {"chains": ("chain", "block"), "trees": ("gumbel:branching=2x2x1", "recursive")}
GREEDY = Sampling(temperature=0.0, seed=0)


def prompts() -> list[list[int]]:
    """Three texts of different lengths."""
    random = np.random.default_rng(0)
    return [random.integers(3, VOCAB, size=n).tolist() for n in (13, 5, 21)]


def generated(model: PreTrainedModel, prompt: Sequence[int]) -> list[int]:
    """What `model.generate` says."""
    ids = torch.tensor([prompt])
    said = model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=NUM_TOKENS, eos_token_id=None
    )
    return said[0, len(prompt) :].tolist()


def read(model: PreTrainedModel, prompt: Sequence[int]) -> list[int]:
    """What the model says if it reads the whole text anew for every token, without a cache."""
    text = list(prompt)
    with torch.no_grad():
        for _ in range(NUM_TOKENS):
            text.append(int(model(input_ids=torch.tensor([text]), use_cache=False).logits[0, -1].argmax()))
    return text[len(prompt) :]


def talkative(config: PreTrainedConfig, attention: str | None) -> tuple[PreTrainedModel, list[list[int]]]:
    """A random model that says various things, if one of a few does; and what `generate` makes it say."""
    best: tuple[int, PreTrainedModel, list[list[int]]] | None = None
    for seed in range(SEEDS):
        model = tiny_model(config, attention=attention, seed=seed)
        said = [generated(model, prompt) for prompt in prompts()]
        if best is None or len(set(chain(*said))) > best[0]:
            best = len(set(chain(*said))), model, said
        if best[0] > VARIOUS:
            break
    return best[1], best[2]


def judge(model_type: str, attention: str | None = None, **changes: Any) -> dict[str, Any]:
    """What becomes of one architecture: `refused` with a reason, or per way whether outputs are transformers' own."""
    torch.manual_seed(0)
    config = tiny_config(model_type, **changes)
    if (reason := refusal(config)) is not None:
        return {"refused": reason}
    try:
        model = tiny_model(config, attention=attention)
    except Exception as error:
        return {"refused": f"transformers cannot build it: {type(error).__name__}: {' '.join(str(error).split())}"}
    found: dict[str, Any] = {
        "class": type(model).__name__,
        "attention": model.config.get_text_config(decoder=True)._attn_implementation,
    }
    try:
        as_lm(model, max_slots=1)
    except InputError as error:
        return found | {"refused": str(error)}
    model, outputs = talkative(config, attention)
    found["distinct"] = len(set(chain(*outputs)))
    found["generate reads alike"] = (plain := [read(model, prompt) for prompt in prompts()]) == outputs
    target, drafter = as_lm(model, max_slots=3), Model(lm=as_lm(noisy(model), max_slots=3))
    for way, (tree, rule) in TREES.items():
        if way == "trees" and is_recurrent(model):
            continue
        parts = Parts(
            target=target,
            drafter=drafter,
            tree=make("tree", tree),
            verifier=make("verifier", rule),
            length=Fixed(num_speculative_tokens=3),
        )
        engine = Engine(parts, max_slots=3)
        together = engine.generate(prompts(), max_new_tokens=NUM_TOKENS, sampling=GREEDY)
        alone = [engine.generate([p], max_new_tokens=NUM_TOKENS, sampling=GREEDY)[0].tokens for p in prompts()]
        engine.rest()
        found[way] = alone == plain
        found[f"{way} like generate"] = alone == outputs
        found[f"{way} together"] = [one.tokens for one in together] == alone
        found[f"{way} accepted"] = sum(one.num_accepted_tokens for one in together)
        found[f"{way} drafted"] = sum(one.num_draft_tokens for one in together)
    return found


def judged(task: Mapping[str, Any]) -> dict[str, Any]:
    """The same, with crashes as a result."""
    logging.set_verbosity_error()
    torch.set_num_threads(1)
    try:
        with Float64():
            return judge(**task)
    except Exception as error:
        return {"crashed": f"{type(error).__name__}: {error}"[:300], "trace": traceback.format_exc()[-2000:]}


def _send(task: Mapping[str, Any], end: Any) -> None:
    end.send(judged(task))


def apart(task: Mapping[str, Any], seconds: float) -> dict[str, Any]:
    """The same in a process of its own, which may crash or hang."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_send, args=(task, theirs))
    process.start()
    theirs.close()
    try:
        return ours.recv() if ours.poll(seconds) else {"crashed": f"no answer within {seconds:g} s"}
    except EOFError:
        process.join()
        return {"crashed": f"the process ended with {process.exitcode}"}
    finally:
        process.kill()
        process.join()


def main(
    out: Annotated[Path, typer.Option(help="Directory for rows.jsonl.")] = ROOT / "docs/measurements/architectures",
    only: Annotated[str, typer.Option(help="Model types, separated by commas; all by default.")] = "",
    seconds: Annotated[float, typer.Option(help="Most time per model.")] = 120.0,
) -> None:
    """Judge every architecture."""
    out.mkdir(parents=True, exist_ok=True)
    place = out / "rows.jsonl"
    rows = [json.loads(line) for line in place.read_text().splitlines()] if place.exists() else []
    done = {row["model_type"] for row in rows}
    names = only.split(",") if only else MODEL_TYPES
    with Progress() as progress, place.open("a") as file:
        for name in progress.track([n for n in names if n not in done]):
            row = {"model_type": name} | apart({"model_type": name}, seconds)
            rows.append(row)
            print(json.dumps(row), file=file, flush=True)


if __name__ == "__main__":
    typer.run(main)
