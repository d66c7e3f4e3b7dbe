"""Other engines on the same weights: the same token ids, taking turns, tokens compared before speeds are.

`python -m recipes peers --out DIR` lets Outrider, transformers, vLLM, llama.cpp and OpenVINO GenAI decode the same
prompts: plainly and with their own speculation, one prompt at a time and eight together, at temperature 0 and 1, past
end tokens. Every engine has its own environment, which the recipe makes under `--environments` when it is missing.
Every mode has its own process. The recipe leaves out what cannot be made or run here, and says why.

First every engine decodes every prompt at temperature 0. Each of its tokens is compared with the target's likeliest
token, which transformers computes in float32. In bfloat16 an engine may take another token where two are nearly as
likely. An engine that takes a clearly less likely token does not run the same model, and its speed is withheld.

Then all take turns on the clock. A prompt's (a batch's) seconds are the median over the rounds. Tokens per second are
the sum of tokens over the sum of these.
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import torch
import typer

from outrider.bench.engines.engine import Engine
from outrider.bench.evidence import Row
from outrider.bench.folder import folder
from outrider.bench.report import Findings, Table
from outrider.bench.speedup import rate
from outrider.bench.workload import PROMPTS
from outrider.core.types import InputError
from recipes import options
from recipes.peers_runs import DTYPES, ENGINES, MODELS, OURS, Plan, compared, contest, methods_of, prompts, timed
from recipes.stand_in import PARAMETERS

QUICK = {"peers": "transformers", "num_prompts": 2, "max_new_tokens": 8, "rounds": 1, "batch_sizes": "1,2"}
NEARLY = {"bfloat16": 0.5, "float32": 0.01}
"""By how much, in logits, the target may prefer its own token to an engine's, by what the engine computes in."""


def environments() -> Path:
    """Where environments are made by default: in the user's cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "outrider" / "peers"


def wrong(told: Sequence[Row], nearly: float) -> set[tuple[str, int]]:
    """Methods, with the batch size, that took a token which the target finds clearly less likely."""
    return {(row["method"], row["requests"]) for row in told if max(row["gap"]) > nearly}


def tokens_table(told: Sequence[Row], nearly: float, methods: Sequence[str]) -> Table:
    """Whether each method says what the target says."""
    lines = []
    for method in methods:
        for batch in sorted({row["requests"] for row in told}):
            own = [row for row in told if (row["method"], row["requests"]) == (method, batch)]
            firsts = [first for row in own for first in row["first"]]
            differing = [first for first in firsts if first is not None]
            if not own:
                continue
            lines.append(
                [
                    method,
                    batch,
                    f"{len(firsts) - len(differing)} of {len(firsts)}",
                    min(differing) + 1 if differing else "-",
                    f"{max(max(row['gap']) for row in own):.3f}" if differing else "-",
                    "no" if (method, batch) in wrong(told, nearly) else "yes",
                ]
            )
    text = (
        "Outputs at temperature 0. An output agrees if each of its tokens is the target's likeliest. The first "
        "difference is the earliest token that is not. The gap is by how much the target prefers its own token there, "
        f"in logits; above {nearly:g} the engine does not run the same model."
    )
    head = ("engine", "batch", "outputs that agree", "first difference", "largest gap", "same model")
    return Table(title="Tokens", text=text, head=head, lines=lines)


def speeds_table(rows: Sequence[Row], told: Sequence[Row], nearly: float, methods: Sequence[str]) -> Table:
    """Tokens per second of each method, with the lowest and the highest round."""
    cases = sorted({(row["requests"], row["temperature"]) for row in rows})
    withheld = wrong(told, nearly)
    lines = []
    for method in methods:
        cells = []
        for batch, temperature in cases:
            own = of(rows, method, batch, temperature)
            cells.append("other tokens" if own and (method, batch) in withheld else with_rounds(own))
        if set(cells) != {"-"}:
            lines.append([method, *cells])
    head = ("engine", *(f"batch {batch}, temperature {temperature:g}" for batch, temperature in cases))
    text = "Tokens per second, prompts included; in brackets the slowest and the fastest round."
    return Table(title="Speeds", text=text, head=head, lines=lines)


def of(rows: Sequence[Row], method: str, batch: int, temperature: float) -> list[Row]:
    """The rows of a method in one case."""
    case = (method, batch, temperature)
    return [row for row in rows if (row["method"], row["requests"], row["temperature"]) == case]


def with_rounds(rows: Sequence[Row]) -> str:
    """Tokens per second of all rounds, and of the slowest and the fastest by itself."""
    if not rows:
        return "-"
    rounds = [rate([row for row in rows if row["round"] == each]) for each in sorted({row["round"] for row in rows})]
    return f"{rate(rows):.0f} [{min(rounds):.0f}, {max(rounds):.0f}]"


def fastest(rows: Sequence[Row], told: Sequence[Row], nearly: float, ours: str) -> list[str]:
    """For each case, the fastest of all methods and the fastest of ours, in a sentence."""
    withheld, found = wrong(told, nearly), []
    for batch, temperature in sorted({(row["requests"], row["temperature"]) for row in rows}):
        rates = {}
        for method in {row["method"] for row in rows}:
            own = of(rows, method, batch, temperature)
            if own and (method, batch) not in withheld:
                rates[method] = rate(own)
        own_rates = {method: each for method, each in rates.items() if method.startswith(f"{ours}, ")}
        if not own_rates:
            continue
        first, best = (max(each, key=lambda method: each[method]) for each in (rates, own_rates))
        found.append(
            f"Batch {batch}, temperature {temperature:g}: the fastest is {first} with {rates[first]:.0f} tokens per "
            f"second; the fastest of {ours} is {best} with {rates[best]:.0f}, {rates[best] / rates[first]:.2f} of that."
        )
    return found


def findings(
    plan: Plan, engines: Mapping[str, Engine], told: Sequence[Row], rows: Sequence[Row], left_out: Mapping[str, str]
) -> Findings:
    """Tokens first, then speeds, then what is left out and why."""
    nearly = NEARLY[plan.dtype]
    methods = [method.name for name in plan.engines for method in methods_of(name, engines[name])]
    tables = [tokens_table(told, nearly, methods)]
    text = [about(plan, engines)]
    if rows:
        tables.append(speeds_table(rows, told, nearly, methods))
        text += fastest(rows, told, nearly, ENGINES[OURS].title)
        if changed := others(told, rows):
            text.append(f"Timed runs at temperature 0 with other tokens than those compared: {', '.join(changed)}.")
    if left_out:
        head, lines = ("what", "why"), [[what, why] for what, why in left_out.items()]
        tables.append(Table(title="Left out", head=head, lines=lines))
    return Findings(tables=tables, text=" ".join(text))


def others(told: Sequence[Row], rows: Sequence[Row]) -> list[str]:
    """Methods whose timed runs at temperature 0 differ from the compared ones, with how many of how many."""
    known = {(row["method"], row["prompt"]): row["digest"] for row in told}
    found = []
    for method in sorted({row["method"] for row in rows}):
        own = [row for row in rows if row["method"] == method and row["temperature"] == 0]
        changed = [row for row in own if known.get((method, row["prompt"])) != row["digest"]]
        if changed:
            found.append(f"{method} ({len(changed)} of {len(own)})")
    return found


def about(plan: Plan, engines: Mapping[str, Engine]) -> str:
    """What was measured."""
    model = "The embedded pair"
    if plan.model != "embedded":
        model = (
            f"The stand-in of {PARAMETERS:,} parameters with the embedded draft model (its costs are synthetic, and it "
            "says what the embedded target says)"
        )
    versions = "; ".join(f"{engines[name].title}: {engines[name].version}" for name in plan.engines)
    return (
        f"{model}, {plan.dtype}, {plan.num_prompts} prompts, {plan.max_new_tokens} tokens each past end tokens, drafts "
        f"of {plan.draft_tokens} and n-grams of {plan.ngram} (Outrider: its defaults). {versions}."
    )


def run(plan: Plan, engines: Mapping[str, Engine] = ENGINES) -> Findings:
    """Compare tokens, measure, and write everything to the plan's folder."""
    torch.set_num_threads(plan.threads)
    if unknown := set(plan.engines) - set(engines):
        raise InputError(f"unknown peer {sorted(unknown)[0]!r}; available: {', '.join(engines)}")
    versions = {name: engines[name].version for name in plan.engines}
    with folder(plan.out, "peers", {**vars(plan), "versions": versions}) as place:
        chosen, context = prompts(plan)
        jobs = plan.jobs(chosen)
        with contest(plan, place, context, engines) as made:
            told = compared(plan, place, made, jobs)
            rows = timed(plan, place, made, jobs)
        found = findings(plan, engines, told, rows, made.left_out)
        place.finish(found)
        return found


def main(
    environments: Annotated[
        Path, typer.Option(help="Folder of the peers' environments and models, several GB.", show_default=False)
    ] = environments(),  # noqa: B008
    out: options.Out = None,
    peers: Annotated[str, typer.Option(help="Names with commas.")] = ",".join(name for name in ENGINES if name != OURS),
    model: Annotated[str, typer.Option(help=f"One of {', '.join(MODELS)}.")] = MODELS[0],
    prompts: options.Prompts = PROMPTS,
    num_prompts: options.NumPrompts = 16,
    max_new_tokens: options.MaxNewTokens = 96,
    threads: options.Threads = 2,
    rounds: Annotated[int, typer.Option(min=0, help="How often every run is repeated; 0 compares tokens alone.")] = 3,
    batch_sizes: Annotated[str, typer.Option(help="Prompts at once, with commas.")] = "1,8",
    temperatures: Annotated[str, typer.Option(help="With commas.")] = "0,1",
    draft_tokens: Annotated[int, typer.Option(min=1, help="Tokens of a draft of the peers.")] = 5,
    dtype: Annotated[str, typer.Option(help=f"What all compute in: {' or '.join(DTYPES)}.")] = DTYPES[0],
) -> None:
    """Compare Outrider with other engines on the same weights."""
    run(
        Plan(
            out=out,
            model=model,
            engines=(OURS, *(name.strip() for name in peers.split(",") if name.strip() != OURS)),
            environments=environments,
            prompts=prompts,
            num_prompts=num_prompts,
            max_new_tokens=max_new_tokens,
            rounds=rounds,
            batch_sizes=options.whole_numbers("--batch-sizes", batch_sizes),
            temperatures=options.numbers("--temperatures", temperatures),
            draft_tokens=draft_tokens,
            dtype=dtype,
            threads=threads,
        )
    )
