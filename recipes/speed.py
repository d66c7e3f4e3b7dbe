"""Measure how fast the embedded pair is: plain, speculative, and transformers' own assisted generation.

All configurations take turns on every prompt in every round, in a shuffled order, so that a machine that grows slower
or faster treats them alike. Only the run itself is timed: prompts are tokenised before, and no run finds the cache of
an earlier one. The engine's runs include turning tokens into text, those of transformers do not.

`python -m recipes.speed --prompts PROMPTS.jsonl --out DIR` writes `rows.jsonl` (one line per run), `summary.json` and
`summary.md`.

A prompt's seconds are the median over the rounds (where sampled rounds differ in length: the median seconds per token,
times the mean number of tokens); a configuration's tokens per second are the sum of tokens over the sum of these
seconds. `plain` is the fastest of plain decoding with `pad_to` 1 and 2 and of transformers' `generate` on the same
model, at each temperature.
"""

import hashlib
import json
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from transformers import DynamicCache, PreTrainedModel

import outrider
from outrider import InputError, Sampling
from outrider.engine.prompts import Prompt
from outrider.lm.open import open_model, open_tokenizer
from outrider.load import EMBEDDED_DRAFT, EMBEDDED_TARGET
from outrider.metrics import efficiency
from recipes.record import circumstances, write

Row = dict[str, Any]
"""One run, as it stands in `rows.jsonl`."""

PLAIN = ("plain pad_to=1", "plain pad_to=2", "transformers")
SPECULATIVE = "speculative"
NGRAM = 8
REPEATING = 0.3
"""A prompt whose plain greedy output repeats more than this share of its 8-grams is reported apart."""
PARTS = ("target", "drafter", "rows", "verify", "commit")
CONTEXT = 150
"""Tokens in the cache of a bare forward."""


@dataclass(frozen=True, kw_only=True)
class Question:
    """A prompt: its name, its category and its token ids."""

    id: str
    category: str
    tokens: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Done:
    """What one run gave. Counts that are not known are None; the profile is in seconds."""

    tokens: list[int]
    seconds: float
    num_steps: int
    num_draft_tokens: int | None = None
    num_accepted_tokens: int | None = None
    profile: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Configuration:
    """One way to decode: `go(prompt ids, seed)` runs it."""

    name: str
    temperature: float
    go: Callable[[Sequence[int], int], Done]


def read_prompts(path: Path) -> list[tuple[str, str, Prompt]]:
    """Id, category and prompt of every line; turns become chat messages, the user first."""
    found: list[tuple[str, str, Prompt]] = []
    for line in path.read_text(encoding="utf-8").splitlines():
        given = json.loads(line)
        if "turns" in given:
            roles = ("user", "assistant")
            prompt: Prompt = [{"role": roles[i % 2], "content": turn} for i, turn in enumerate(given["turns"])]
        else:
            prompt = given["prompt"]
        found.append((given["id"], given["category"], prompt))
    return found


def choose(questions: Sequence[Question], count: int, seed: int = 0) -> list[Question]:
    """As many prompts of every category as of any other; where one has too few, the others fill up.

    Which prompts of a category are taken depends on the seed and the file alone.
    """
    piles: dict[str, list[Question]] = defaultdict(list)
    for question in questions:
        piles[question.category].append(question)
    for category, pile in piles.items():
        random.Random(f"{seed}/{category}").shuffle(pile)
    chosen: list[Question] = []
    while len(chosen) < count and any(piles.values()):
        for category in sorted(piles):
            if piles[category] and len(chosen) < count:
                chosen.append(piles[category].pop(0))
    return chosen


def repeat_share(tokens: Sequence[int], n: int = NGRAM) -> float:
    """Share of a text's n-grams that stood in it before; 0 where it has none."""
    grams = [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def engine_run(
    engine: outrider.Engine, temperature: float, max_new_tokens: int
) -> Callable[[Sequence[int], int], Done]:
    """Runs of an engine, each from a cold cache."""

    def go(prompt: Sequence[int], seed: int) -> Done:
        # A request that shares no token with the prompt takes the place of the slot that the last one left warm.
        engine.generate([[_other(prompt)]], max_new_tokens=1)
        sampling = Sampling(temperature=temperature, seed=seed)
        began = time.perf_counter()
        [output] = engine.generate([list(prompt)], max_new_tokens=max_new_tokens, sampling=sampling)
        seconds = time.perf_counter() - began
        profile = {part: sum(getattr(step.timing, part) for step in output.steps) for part in PARTS}
        return Done(
            tokens=output.tokens,
            seconds=seconds,
            num_steps=output.num_steps,
            num_draft_tokens=output.num_draft_tokens,
            num_accepted_tokens=output.num_accepted_tokens,
            profile={**profile, "rest": seconds - sum(profile.values())},
        )

    return go


def transformers_run(
    model: PreTrainedModel,
    temperature: float,
    max_new_tokens: int,
    assistant: PreTrainedModel | None = None,
    num_assistant_tokens: int = 0,
    **options: object,
) -> Callable[[Sequence[int], int], Done]:
    """Runs of transformers' `generate`; a step is a forward of the target."""
    law: dict[str, object] = {"do_sample": False}
    if temperature:
        law = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
    if assistant is not None:
        options = {**options, "assistant_model": assistant}

    @torch.inference_mode()
    def generate(prompt: Sequence[int], limit: int) -> list[int]:
        ids = torch.tensor([list(prompt)], device=model.device)
        ending = {"pad_token_id": model.generation_config.pad_token_id, "max_new_tokens": limit}
        said = model.generate(ids, attention_mask=torch.ones_like(ids), **law, **ending, **options)
        return said[0, len(prompt) :].tolist()

    def go(prompt: Sequence[int], seed: int) -> Done:
        if assistant is not None:
            assistant.generation_config.num_assistant_tokens = num_assistant_tokens
            assistant.generation_config.num_assistant_tokens_schedule = "constant"
            assistant.generation_config.assistant_confidence_threshold = 0
        generate([_other(prompt)], 2)
        torch.manual_seed(seed)
        forwards = 0

        def count(*_: object) -> None:
            nonlocal forwards
            forwards += 1

        hook = model.register_forward_pre_hook(count)
        began = time.perf_counter()
        tokens = generate(prompt, max_new_tokens)
        seconds = time.perf_counter() - began
        hook.remove()
        return Done(tokens=tokens, seconds=seconds, num_steps=forwards)

    return go


def _other(prompt: Sequence[int]) -> int:
    """A token id that the prompt does not begin with."""
    return 1 if prompt[0] != 1 else 2


def row(done: Done, configuration: Configuration, question: Question, **more: object) -> Row:
    """A run as one line of `rows.jsonl`."""
    return {
        **more,
        "configuration": configuration.name,
        "temperature": configuration.temperature,
        "prompt": question.id,
        "category": question.category,
        "prompt_tokens": len(question.tokens),
        "tokens": len(done.tokens),
        "seconds": done.seconds,
        "num_steps": done.num_steps,
        "num_draft_tokens": done.num_draft_tokens,
        "num_accepted_tokens": done.num_accepted_tokens,
        "profile": done.profile,
        "repeat_share": repeat_share(done.tokens),
        "digest": hashlib.sha256(json.dumps(done.tokens).encode()).hexdigest()[:16],
    }


def per_prompt(rows: Sequence[Row]) -> dict[str, tuple[float, float]]:
    """Tokens and seconds of each prompt of one configuration, from all its rounds."""
    runs: dict[str, list[Row]] = defaultdict(list)
    for each in rows:
        runs[each["prompt"]].append(each)
    found = {}
    for prompt, each in runs.items():
        tokens = statistics.mean(run["tokens"] for run in each)
        found[prompt] = (tokens, tokens * statistics.median(run["seconds"] / run["tokens"] for run in each))
    return found


def rate(rows: Sequence[Row]) -> float:
    """Tokens per second of one configuration: sum of tokens over sum of each prompt's median seconds."""
    pairs = per_prompt(rows).values()
    return sum(tokens for tokens, _ in pairs) / sum(seconds for _, seconds in pairs)


def only(rows: Sequence[Row], temperature: float, name: str) -> list[Row]:
    """The rows of one configuration."""
    return [each for each in rows if each["temperature"] == temperature and each["configuration"] == name]


def compare(
    rows: Sequence[Row], plain: Sequence[Row], prompts: Sequence[str], resamples: int = 2000, seed: int = 0
) -> dict[str, float] | None:
    """Speedup of rows over plain on some prompts, with a bootstrap 95 % interval over the prompts."""
    if not prompts:
        return None
    ours, theirs = per_prompt(rows), per_prompt(plain)
    table = np.array([[*ours[p], *theirs[p]] for p in prompts])

    def ratio(sums: np.ndarray) -> np.ndarray:
        return (sums[..., 0] / sums[..., 1]) / (sums[..., 2] / sums[..., 3])

    picks = np.random.default_rng(seed).integers(0, len(prompts), (resamples, len(prompts)))
    low, high = np.quantile(ratio(table[picks].sum(1)), [0.025, 0.975])
    return {
        "speedup": float(ratio(table.sum(0))),
        "low": float(low),
        "high": float(high),
        "num_prompts": len(prompts),
    }


def summarise(rows: Sequence[Row]) -> dict[str, Any]:
    """Figures of all measured rows: the plain baselines, the prompts that repeat themselves, one entry per way."""
    groups: dict[tuple[float, str], list[Row]] = defaultdict(list)
    for each in rows:
        groups[each["temperature"], each["configuration"]].append(each)
    temperatures = sorted({temperature for temperature, _ in groups})
    baselines = {t: max((n for n in PLAIN if (t, n) in groups), key=lambda n: rate(groups[t, n])) for t in temperatures}
    greedy = groups[temperatures[0], baselines[temperatures[0]]]
    prompts = sorted({each["prompt"] for each in rows})
    repeating = sorted({each["prompt"] for each in greedy if each["repeat_share"] > REPEATING})
    others = [p for p in prompts if p not in repeating]
    entries = []
    for (temperature, name), runs in sorted(groups.items()):
        plain = groups[temperature, baselines[temperature]]
        rounds = sorted({run["round"] for run in runs})
        by_round = [[run for run in runs if run["round"] == r] for r in rounds]
        drafted = sum(run["num_draft_tokens"] or 0 for run in runs)
        seconds = sum(run["seconds"] for run in runs)
        spent = {part: sum(run["profile"].get(part, 0.0) for run in runs) for part in (*PARTS, "rest")}
        reference = {run["prompt"]: run["digest"] for run in groups.get((temperature, PLAIN[1]), [])}
        same = [reference.get(run["prompt"]) == run["digest"] for run in runs]
        entries.append(
            {
                "configuration": name,
                "temperature": temperature,
                "num_runs": len(runs),
                "tokens_per_second": rate(runs),
                "tokens_per_second_by_round": [rate(each) for each in by_round],
                "all": compare(runs, plain, prompts),
                "without_repeating": compare(runs, plain, others),
                "only_repeating": compare(runs, plain, repeating),
                "by_category": {
                    c: compare(runs, plain, sorted({run["prompt"] for run in runs if run["category"] == c}))
                    for c in sorted({run["category"] for run in runs})
                },
                "block_efficiency": sum(run["tokens"] for run in runs) / sum(run["num_steps"] for run in runs),
                "acceptance": sum(run["num_accepted_tokens"] for run in runs) / drafted if drafted else None,
                "profile": {part: s / seconds for part, s in spent.items()} if any(spent.values()) else None,
                "same_as_plain_pad_to_2": sum(same) / len(same) if reference and temperature == 0 else None,
            }
        )
    return {
        "plain": {f"{t:g}": name for t, name in baselines.items()},
        "num_prompts": len(prompts),
        "repeating_prompts": repeating,
        "configurations": entries,
    }


@torch.inference_mode()
def bare_forwards(
    target: PreTrainedModel, draft: PreTrainedModel, context: Sequence[int], gammas: Sequence[int], repeats: int = 100
) -> dict[str, list[float]]:
    """Seconds of bare forwards behind a context, taking turns: target with 1 and gamma + 1 tokens, draft with 1."""
    ids = torch.tensor([list(context)], device=target.device)
    cases = {"target 1": (target, 1), **{f"target {g + 1}": (target, g + 1) for g in gammas}, "draft 1": (draft, 1)}
    caches = {}
    for name, (model, _) in cases.items():
        caches[name] = DynamicCache(config=model.config)
        model(ids, past_key_values=caches[name], use_cache=True)
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    for i in range(repeats + 5):
        for name, (model, width) in cases.items():
            given = ids[:, :width].contiguous()
            began = time.perf_counter()
            model(given, past_key_values=caches[name], use_cache=True)
            spent = time.perf_counter() - began
            caches[name].crop(-width)
            if i >= 5:
                seconds[name].append(spent)
    return seconds


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median and quartiles."""
    low, middle, high = np.quantile(values, [0.25, 0.5, 0.75])
    return {"median": float(middle), "low": float(low), "high": float(high)}


def bare_summary(
    before: Mapping[str, Sequence[float]],
    after: Mapping[str, Sequence[float]],
    gammas: Mapping[float, int],
    entries: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    """Bare forwards, their ratios v and c, and how much of what they allow each temperature reaches."""
    both = {name: statistics.median([*before[name], *after[name]]) for name in before}
    reached = {}
    for entry in entries:
        if entry["configuration"] != SPECULATIVE:
            continue
        gamma, block = gammas[entry["temperature"]], entry["block_efficiency"]
        v, c = both[f"target {gamma + 1}"] / both["target 1"], both["draft 1"] / both["target 1"]
        reached[f"{entry['temperature']:g}"] = {
            "gamma": gamma,
            "v": v,
            "c": c,
            "block_efficiency": block,
            "allowed_speedup": block / (v + c * gamma),
            "efficiency": efficiency(entry["all"]["speedup"], block, v, c, gamma),
        }
    return {
        "before": {name: spread(values) for name, values in before.items()},
        "after": {name: spread(values) for name, values in after.items()},
        "by_temperature": reached,
    }


def to_markdown(summary: Mapping[str, Any]) -> str:
    """The summary as tables."""

    def ratio(given: Mapping[str, float] | None) -> str:
        return "-" if given is None else f"{given['speedup']:.2f} [{given['low']:.2f}, {given['high']:.2f}]"

    def number(value: float | None, form: str = ".2f") -> str:
        return "-" if value is None else f"{value:{form}}"

    made, repeating = summary["circumstances"], summary["repeating_prompts"]
    arguments = made["arguments"]
    lines = [
        f"{made['cpu']}, {made['threads']} threads, {arguments['dtype']}; torch {made['versions']['torch']}, "
        f"transformers {made['versions']['transformers']}, outrider {made['versions']['outrider']} "
        f"({made['commit']}{', with uncommitted changes' if made['uncommitted_changes'] else ''}); {made['date']}.",
        "",
        f"{summary['num_prompts']} prompts ({', '.join(f'{n} {c}' for c, n in summary['categories'].items())}), "
        f"{arguments['rounds']} rounds, up to {arguments['max_new_tokens']} tokens. {len(repeating)} prompts repeat "
        f"more than {REPEATING:.0%} of their {NGRAM}-grams in plain greedy decoding. Plain is "
        + ", ".join(f"`{name}` at T={t}" for t, name in summary["plain"].items())
        + ". Intervals: 95 %, bootstrap over prompts.",
        "",
        "| configuration | T | tokens/s | rounds | speedup | without repeating | only repeating "
        "| block efficiency | acceptance | same as plain |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for e in summary["configurations"]:
        rounds = e["tokens_per_second_by_round"]
        lines.append(
            f"| {e['configuration']} | {e['temperature']:g} | {e['tokens_per_second']:.1f} "
            f"| {min(rounds):.1f} to {max(rounds):.1f} | {ratio(e['all'])} | {ratio(e['without_repeating'])} "
            f"| {ratio(e['only_repeating'])} | {e['block_efficiency']:.2f} | {number(e['acceptance'])} "
            f"| {number(e['same_as_plain_pad_to_2'], '.0%')} |"
        )
    lines += ["", f"| share of seconds | T | {' | '.join((*PARTS, 'rest'))} |", "|---|---|" + "---|" * (len(PARTS) + 1)]
    for e in summary["configurations"]:
        if e["profile"]:
            shares = " | ".join(f"{e['profile'][part]:.1%}" for part in (*PARTS, "rest"))
            lines.append(f"| {e['configuration']} | {e['temperature']:g} | {shares} |")
    lines += [
        "",
        "`rest` holds chunks of prompts, admission and text; the last chunk of a prompt is in its first step.",
        "",
    ]
    lines += ["| T | gamma | v | c | allowed by bare forwards | efficiency |", "|---|---|---|---|---|---|"]
    for t, b in summary["bare"]["by_temperature"].items():
        lines.append(
            f"| {t} | {b['gamma']} | {b['v']:.3f} | {b['c']:.3f} | {b['allowed_speedup']:.2f} | {b['efficiency']:.1%} |"
        )
    pilot = summary["pilot"]
    lines += ["", f"Lengths were picked on {pilot['num_prompts']} other prompts, by tokens/s:", ""]
    for t, rates in pilot["tokens_per_second"].items():
        tried = ", ".join(f"{length}: {value:.1f}" for length, value in rates.items())
        lines.append(f"- T={t}: {pilot['lengths'][t]} (of {tried})")
    return "\n".join(lines) + "\n"


def run(
    prompts: Path,
    out: Path,
    *,
    num_prompts: int = 48,
    max_new_tokens: int = 128,
    rounds: int = 3,
    threads: int = 2,
    draft: Path = EMBEDDED_DRAFT,
    lengths: Sequence[int] = (3, 4, 5),
    dtype: str = "bfloat16",
    pilot_prompts: int = 8,
    seed: int = 0,
) -> dict[str, Any]:
    """Measure, write `rows.jsonl`, `summary.json` and `summary.md` to `out`, and return the summary."""
    arguments = dict(locals())
    torch.set_num_threads(threads)
    out.mkdir(parents=True, exist_ok=True)
    began = circumstances(arguments)
    tokenizer = open_tokenizer(str(EMBEDDED_TARGET))
    target = open_model(str(EMBEDDED_TARGET), dtype=dtype, device="cpu")
    assistant = open_model(str(draft), dtype=dtype, device="cpu")

    def engine(**parts: Any) -> outrider.Engine:
        return outrider.load(target, tokenizer=tokenizer, **parts)

    plains = {name: engine(drafter="none", pad_to=pad) for name, pad in zip(PLAIN, (1, 2), strict=False)}
    drafting = {n: engine(drafter=f"model:path={draft}", length=f"fixed:{n}") for n in lengths}
    longest = plains[PLAIN[0]].parts.target.max_context - max_new_tokens
    everything = [
        Question(id=id, category=category, tokens=tuple(plains[PLAIN[0]].encode(prompt)))
        for id, category, prompt in read_prompts(prompts)
    ]
    fitting = [q for q in everything if 0 < len(q.tokens) <= longest]
    chosen = choose(fitting, num_prompts, seed)
    pilot = choose([q for q in fitting if q not in chosen], pilot_prompts, seed)
    if not chosen or not pilot:
        raise InputError(
            f"{prompts} has {len(fitting)} prompts of at most {longest} tokens; {num_prompts} to measure and at least "
            "one more for the pilot are needed; lower --num-prompts"
        )

    def speculative(length: int, temperature: float, name: str = SPECULATIVE) -> Configuration:
        go = engine_run(drafting[length], temperature, max_new_tokens)
        return Configuration(name=name, temperature=temperature, go=go)

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    fresh = out / "rows.jsonl.new"
    rows: list[Row] = []
    with fresh.open("w", encoding="utf-8") as file, Progress(*columns) as progress:

        def measure(phase: str, ways: Sequence[Configuration], questions: Sequence[Question], rounds: int) -> list[Row]:
            """All ways on all prompts in all rounds; prompts and ways are shuffled anew in each round."""
            shuffle = random.Random(f"{seed}/{phase}").sample
            task = progress.add_task(phase, total=rounds * len(questions) * len(ways))
            made: list[Row] = []
            for round_ in range(rounds):
                for index in shuffle(range(len(questions)), len(questions)):
                    for way in shuffle(ways, len(ways)):
                        own = index + round_ * len(questions) if way.temperature else index
                        done = way.go(questions[index].tokens, own)
                        order = {"phase": phase, "order": len(made), "round": round_, "seed": own}
                        made.append(row(done, way, questions[index], **order))
                        file.write(json.dumps(made[-1]) + "\n")
                        file.flush()
                        progress.advance(task)
            return made

        candidates = [speculative(n, t, f"length {n}") for n in lengths for t in (0.0, 1.0)]
        for way in candidates:
            way.go(pilot[0].tokens, 0)
        tried = measure("pilot", candidates, pilot, 2)
        rates = {t: {n: rate(only(tried, t, f"length {n}")) for n in lengths} for t in (0.0, 1.0)}
        best = {t: max(each, key=lambda n: each[n]) for t, each in rates.items()}
        ways = []
        for t in (0.0, 1.0):
            for name, plain in plains.items():
                go = engine_run(plain, t, max_new_tokens)
                ways.append(Configuration(name=name, temperature=t, go=go))
            go = transformers_run(target, t, max_new_tokens)
            ways.append(Configuration(name=PLAIN[2], temperature=t, go=go))
            ways.append(speculative(best[t], t))
        for n in (3, 5, 8):
            go = transformers_run(target, 0, max_new_tokens, assistant, n)
            ways.append(Configuration(name=f"transformers assisted {n}", temperature=0.0, go=go))
        go = transformers_run(target, 0, max_new_tokens, prompt_lookup_num_tokens=5)
        ways.append(Configuration(name="transformers prompt lookup 5", temperature=0.0, go=go))
        for way in ways:
            way.go(pilot[0].tokens, 0)
        context = [token for q in pilot * CONTEXT for token in q.tokens][:CONTEXT]
        gammas = sorted(set(best.values()))
        before = bare_forwards(target, assistant, context, gammas)
        rows = measure("measured", ways, chosen, rounds)
        after = bare_forwards(target, assistant, context, gammas)
    fresh.replace(out / "rows.jsonl")
    summary = summarise(rows)
    summary |= {
        "categories": {c: sum(q.category == c for q in chosen) for c in sorted({q.category for q in chosen})},
        "prompts_left_out_as_too_long": len(everything) - len(fitting),
        "pilot": {
            "num_prompts": len(pilot),
            "prompts": [q.id for q in pilot],
            "tokens_per_second": {f"{t:g}": {str(n): value for n, value in each.items()} for t, each in rates.items()},
            "lengths": {f"{t:g}": length for t, length in best.items()},
        },
        "bare": bare_summary(before, after, best, summary["configurations"]),
        "circumstances": began,
        "ended": circumstances({}),
    }
    write(out / "summary.json", json.dumps(summary, indent=2) + "\n")
    write(out / "summary.md", to_markdown(summary))
    return summary


def main(
    prompts: Annotated[Path, typer.Option(help="JSON lines with `id`, `category`, and `prompt` or `turns`.")],
    out: Annotated[Path, typer.Option(help="Directory for rows.jsonl, summary.json and summary.md.")],
    num_prompts: Annotated[int, typer.Option(min=1, help="How many prompts are measured.")] = 48,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Most tokens per run.")] = 128,
    rounds: Annotated[int, typer.Option(min=1, help="How often every run is repeated.")] = 3,
    threads: Annotated[int, typer.Option(min=1, help="Threads of torch.")] = 2,
    draft: Annotated[Path, typer.Option(help="Directory of the draft model.")] = EMBEDDED_DRAFT,
    lengths: Annotated[str, typer.Option(help="Fixed draft lengths that the pilot tries.")] = "3,4,5",
    dtype: Annotated[str, typer.Option(help="What both models compute in.")] = "bfloat16",
    pilot_prompts: Annotated[int, typer.Option(min=1, help="Further prompts, for the pilot alone.")] = 8,
    seed: Annotated[int, typer.Option(help="Of the choice and the order of prompts.")] = 0,
) -> None:
    """Measure the embedded pair's speed against plain decoding and against transformers."""
    if not all(length.strip().isdigit() and int(length) for length in lengths.split(",")):
        raise typer.BadParameter(f"--lengths must be whole numbers >= 1 with commas between them, got {lengths!r}")
    try:
        summary = run(
            prompts,
            out,
            num_prompts=num_prompts,
            max_new_tokens=max_new_tokens,
            rounds=rounds,
            threads=threads,
            draft=draft,
            lengths=sorted({int(length) for length in lengths.split(",")}),
            dtype=dtype,
            pilot_prompts=pilot_prompts,
            seed=seed,
        )
    except (InputError, OSError) as error:
        raise typer.BadParameter(str(error)) from error
    typer.echo(to_markdown(summary))


if __name__ == "__main__":
    typer.run(main)
