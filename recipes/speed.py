"""The speed of the embedded pair: plain, speculative, and transformers' own assisted generation.

`python -m recipes speed --prompts PROMPTS.jsonl --out DIR` lets all configurations take turns on every prompt in every
round. Only the run itself is timed: prompts are tokenised before, and no run finds the cache of an earlier run. The
engine's runs include turning tokens into text; the runs of transformers do not. The draft length is the one that is
fastest on a pilot of other prompts.

A prompt's seconds are the median over the rounds; a configuration's tokens per second are the sum of tokens over the
sum of these seconds. `plain` is the fastest of plain decoding with `pad_to` 1 and 2 and of transformers' `generate` on
the same model, at each temperature.
"""

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Annotated, Any

import torch
import typer

from outrider.bench.evidence import Estimate, Row, spread
from outrider.bench.folder import folder
from outrider.bench.plot import Bars
from outrider.bench.report import Findings, Table
from outrider.bench.runs import PARTS
from outrider.bench.speedup import rate, speedup
from outrider.bench.workload import PROMPTS, questions
from outrider.core.metrics import efficiency
from outrider.embedded import EMBEDDED_DRAFT
from recipes import options
from recipes.speed_runs import NGRAM, PLAIN, SPECULATIVE, Pair, Plan, bare_forwards, jobs_of, measure, measure_pilot

REPEATING = 0.3
"""A prompt whose plain greedy output repeats more than this share of its 8-grams is reported apart."""
CONTEXT = 150
"""Tokens in the cache of a bare forward."""
QUICK = {"num_prompts": 2, "pilot_prompts": 1, "rounds": 1, "max_new_tokens": 16, "lengths": "3,4"}


def summarise(rows: Sequence[Row]) -> dict[str, Any]:
    """Figures of all measured rows: the plain baselines, the prompts that repeat themselves, and an entry per way."""
    groups: dict[tuple[float, str], list[Row]] = defaultdict(list)
    for each in rows:
        groups[each["temperature"], each["method"]].append(each)
    temperatures = sorted({temperature for temperature, _ in groups})
    baselines = {t: max((n for n in PLAIN if (t, n) in groups), key=lambda n: rate(groups[t, n])) for t in temperatures}
    greedy = groups[temperatures[0], baselines[temperatures[0]]]
    prompts = sorted({each["prompt"] for each in rows})
    repeating = sorted({each["prompt"] for each in greedy if each["repeat_share"] > REPEATING})
    entries = []
    for (temperature, name), runs in sorted(groups.items()):
        plain = groups[temperature, baselines[temperature]]
        reference = groups.get((temperature, PLAIN[1]), []) if temperature == 0 else []
        entries.append(
            {"method": name, "temperature": temperature, **entry(runs, plain, reference, prompts, repeating)}
        )
    return {
        "plain": {f"{t:g}": name for t, name in baselines.items()},
        "num_prompts": len(prompts),
        "repeating_prompts": repeating,
        "methods": entries,
    }


def entry(
    runs: Sequence[Row],
    plain: Sequence[Row],
    reference: Sequence[Row],
    prompts: Sequence[str],
    repeating: Sequence[str],
) -> dict[str, Any]:
    """Figures of one way at one temperature.

    Args:
        plain: Runs that its speedup is relative to.
        reference: Runs whose outputs are compared with its outputs.
    """

    def over(chosen: Sequence[str]) -> dict[str, float] | None:
        found = speedup(runs, plain, chosen)
        if found is None:
            return None
        return {"speedup": found.value, "low": found.low, "high": found.high, "num_prompts": len(chosen)}

    categories = sorted({run["category"] for run in runs})
    drafted = sum(run["drafted"] or 0 for run in runs)
    seconds = sum(run["seconds"] for run in runs)
    spent = {part: sum(run["profile"].get(part, 0.0) for run in runs) for part in (*PARTS, "rest")}
    digests = {run["prompt"]: run["digest"] for run in reference}
    same = [digests.get(run["prompt"]) == run["digest"] for run in runs]
    return {
        "num_runs": len(runs),
        "tokens_per_second": rate(runs),
        "tokens_per_second_by_round": [
            rate([run for run in runs if run["round"] == r]) for r in sorted({run["round"] for run in runs})
        ],
        "all": over(prompts),
        "without_repeating": over([p for p in prompts if p not in repeating]),
        "only_repeating": over(repeating),
        "by_category": {c: over(sorted({run["prompt"] for run in runs if run["category"] == c})) for c in categories},
        "block_efficiency": sum(run["tokens"] for run in runs) / sum(run["steps"] for run in runs),
        "acceptance": sum(run["accepted"] for run in runs) / drafted if drafted else None,
        "profile": {part: s / seconds for part, s in spent.items()} if any(spent.values()) else None,
        "same_as_plain_pad_to_2": sum(same) / len(same) if digests else None,
    }


def bare_summary(
    before: Mapping[str, Sequence[float]],
    after: Mapping[str, Sequence[float]],
    gammas: Mapping[float, int],
    entries: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    """Bare forwards, their ratios v and c, and how much of the speedup that they allow each temperature reaches."""
    both = {name: statistics.median([*before[name], *after[name]]) for name in before}
    reached = {}
    for each in entries:
        if each["method"] != SPECULATIVE:
            continue
        gamma, block = gammas[each["temperature"]], each["block_efficiency"]
        v, c = both[f"target {gamma + 1}"] / both["target 1"], both["draft 1"] / both["target 1"]
        reached[f"{each['temperature']:g}"] = {
            "gamma": gamma,
            "v": v,
            "c": c,
            "block_efficiency": block,
            "allowed_speedup": block / (v + c * gamma),
            "efficiency": efficiency(each["all"]["speedup"], block, v, c, gamma),
        }
    return {
        "before": {name: spread(values) for name, values in before.items()},
        "after": {name: spread(values) for name, values in after.items()},
        "by_temperature": reached,
    }


def _interval(given: Mapping[str, float] | None) -> str:
    if given is None:
        return "-"
    return Estimate(value=given["speedup"], low=given["low"], high=given["high"]).text()


def findings(summary: Mapping[str, Any]) -> Findings:
    """The summary as tables and bars."""
    head = ["configuration", "T", "tokens/s", "rounds", "speedup", "without repeating", "only repeating"]
    head += ["block efficiency", "acceptance", "same as plain"]
    lines = []
    for e in summary["methods"]:
        rounds, acceptance, same = e["tokens_per_second_by_round"], e["acceptance"], e["same_as_plain_pad_to_2"]
        lines.append(
            [
                e["method"],
                f"{e['temperature']:g}",
                f"{e['tokens_per_second']:.1f}",
                f"{min(rounds):.1f} to {max(rounds):.1f}",
                *(_interval(e[over]) for over in ("all", "without_repeating", "only_repeating")),
                f"{e['block_efficiency']:.2f}",
                "-" if acceptance is None else f"{acceptance:.2f}",
                "-" if same is None else f"{same:.0%}",
            ]
        )
    shares = [
        [e["method"], f"{e['temperature']:g}", *(f"{e['profile'][part]:.1%}" for part in (*PARTS, "rest"))]
        for e in summary["methods"]
        if e["profile"]
    ]
    reached = [
        [t, b["gamma"], f"{b['v']:.3f}", f"{b['c']:.3f}", f"{b['allowed_speedup']:.2f}", f"{b['efficiency']:.1%}"]
        for t, b in summary["bare"]["by_temperature"].items()
    ]
    tables = [
        Table(head=head, lines=lines),
        Table(
            title="Where the seconds go",
            text="`rest` holds chunks of prompts, admission and text; a prompt's last chunk is in its first step.",
            head=("configuration", "T", *PARTS, "rest"),
            lines=shares,
        ),
        Table(
            title="What bare forwards allow",
            head=("T", "gamma", "v", "c", "allowed by bare forwards", "efficiency"),
            lines=reached,
        ),
        Table(title="Lengths", text=_lengths(summary["pilot"])),
    ]
    return Findings(tables=tables, panels=_bars(summary), text=_about(summary), summary=summary)


def _lengths(pilot: Mapping[str, Any]) -> str:
    """The picked length at each temperature."""
    picked = []
    for t, rates in pilot["tokens_per_second"].items():
        tried = ", ".join(f"{length}: {value:.1f}" for length, value in rates.items())
        picked.append(f"at T={t}: {pilot['lengths'][t]} (of {tried})")
    return f"Picked on {pilot['num_prompts']} other prompts, by tokens/s; {'; '.join(picked)}."


def _about(summary: Mapping[str, Any]) -> str:
    counts = ", ".join(f"{n} {c}" for c, n in summary["categories"].items())
    plain = ", ".join(f"`{name}` at T={t}" for t, name in summary["plain"].items())
    return (
        f"{summary['num_prompts']} prompts ({counts}), {summary['rounds']} rounds, up to {summary['max_new_tokens']} "
        f"tokens, {summary['dtype']}. {len(summary['repeating_prompts'])} prompts repeat more than {REPEATING:.0%} of "
        f"their {NGRAM}-grams in plain greedy decoding. Plain is {plain}. Intervals: 95 %, bootstrap over prompts."
    )


def _bars(summary: Mapping[str, Any]) -> list[Bars]:
    """Speedups of every configuration at each temperature."""
    found = []
    for t in sorted({e["temperature"] for e in summary["methods"]}):
        own = [e for e in summary["methods"] if e["temperature"] == t]
        over = [Estimate(value=e["all"]["speedup"], low=e["all"]["low"], high=e["all"]["high"]) for e in own]
        names = [e["method"] for e in own]
        found.append(Bars(title=f"Temperature {t:g}", x="speedup over plain", names=names, groups={"all": over}))
    return found


def run(plan: Plan) -> dict[str, Any]:
    """Measure, write and return the summary."""
    torch.set_num_threads(plan.threads)
    with folder(plan.out, "speed", asdict(plan)) as place:
        pair = Pair(plan)
        longest = pair.first.parts.target.max_context - plan.max_new_tokens
        chosen = questions(plan.prompts, plan.num_prompts, encode=pair.first.encode, longest=longest, seed=plan.seed)
        pilot = questions(
            plan.prompts,
            plan.pilot_prompts,
            encode=pair.first.encode,
            longest=longest,
            without=chosen,
            seed=plan.seed,
        )
        tried = measure_pilot(place, pair, pilot)
        best = {t: max(rates, key=rates.__getitem__) for t, rates in tried.items()}
        context = [token for question in pilot * CONTEXT for token in question.tokens][:CONTEXT]
        bare = pair.target, pair.draft, context, sorted(set(best.values()))
        before = bare_forwards(*bare)
        rows = measure(place, "measured", pair, pair.ways(best), jobs_of(chosen), plan.rounds)
        summary = summarise(rows)
        summary |= {
            "categories": {c: sum(q.category == c for q in chosen) for c in sorted({q.category for q in chosen})},
            "pilot": {
                "num_prompts": len(pilot),
                "prompts": [question.id for question in pilot],
                "tokens_per_second": {f"{t:g}": {str(n): r for n, r in rates.items()} for t, rates in tried.items()},
                "lengths": {f"{t:g}": length for t, length in best.items()},
            },
            "bare": bare_summary(before, bare_forwards(*bare), best, summary["methods"]),
            **{name: getattr(plan, name) for name in ("rounds", "max_new_tokens", "dtype")},
        }
        place.finish(findings(summary))
        return summary


def main(
    prompts: options.Prompts = PROMPTS,
    out: options.Out = None,
    num_prompts: options.NumPrompts = 32,
    max_new_tokens: options.MaxNewTokens = 128,
    rounds: options.Rounds = 3,
    threads: options.Threads = 2,
    draft: options.Draft = EMBEDDED_DRAFT,
    lengths: Annotated[str, typer.Option(help="Fixed draft lengths that the pilot tries.")] = "3,4,5",
    dtype: options.Dtype = "bfloat16",
    pilot_prompts: Annotated[int, typer.Option(min=1, help="Further prompts, for the pilot alone.")] = 8,
    seed: Annotated[int, typer.Option(help="Of the choice and the order of prompts.")] = 0,
) -> None:
    """Measure the embedded pair's speed against plain decoding and against transformers."""
    given: dict[str, Any] = locals()
    run(Plan(**given | {"lengths": options.whole_numbers("--lengths", lengths)}))
