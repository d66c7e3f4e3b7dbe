"""Collect the published claims that were tested into one page, `docs/laboratory/claims.md`.

`python -m recipes claims --out docs/laboratory/claims.md` reads the `claims.json` and `circumstances.json` that the
recipes wrote to the folders of `measurements`: `block_gain`, `budgets`, `optimal_rate`, `stopping`, `sharing`,
`marginals`, `pearl`, and those that train drafters. It makes one row per claim, with a column for each pair, and beside
the page two pictures of the claims that were judged on real models. `REASONS`, which people write, explains why our
figures differ from the papers'.
"""

import json
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from outrider.bench.circumstances import ROOT
from outrider.bench.evidence import IntervalEstimate
from outrider.bench.folder import read_record, read_rows
from outrider.bench.plot import Dots, draw
from outrider.bench.report import table
from outrider.core import files
from outrider.core.types import InputError

WIDTH = 130
"""Most characters of a line of prose."""
MEASUREMENTS = ROOT / "measurements"
VERDICTS = {True: "yes", False: "no", None: "undecided"}
TRAINED = "trained"
"""Stands for the draft model of a run that trains drafters itself; behind it, after a space, the name of its target if
that is not the embedded one, or of the draft model that they begin with."""
PAIRS = {
    "draft": "embedded pair",
    "small_draft": "small pair",
    "coder-0.5b.gguf": "Qwen2.5-Coder 1.5B and 0.5B",
    "smollm2-6": "SmolLM2-135M and 6 of its layers",
    TRAINED: "drafters of the embedded target",
    f"{TRAINED} smollm2": "drafters of SmolLM2-135M",
    f"{TRAINED} smollm2-6-talk": "SmolLM2-135M, from a draft model that read dialogues",
}
"""The page's name for each pair, by the name of its draft model."""
REAL = ("coder-0.5b.gguf", "smollm2-6", f"{TRAINED} smollm2", f"{TRAINED} smollm2-6-talk")
"""Those of models that people use."""
PICTURES = {False: "claims.svg", True: "claims-training.svg"}
"""Beside the page, by whether it shows the claims about drafters that were trained for them."""
NAME_WIDTH = 60
"""Characters of a line of a claim in a picture."""
PICTURE_SIZE = (11.0, 3.0)
"""Inches; a picture grows with its claims."""
GAIN = "% of "
"""Beginning of the units of gains in percent. The page does not repeat them for every claim."""
PER_SECOND = "% of tokens per second"
LONG = 1000.0
"""More hours than anyone will measure."""
QUICK: dict[str, object] = {}

REASONS: dict[str, str] = {
    "A lattice emits more tokens per step than a chain, temperature 1": (
        "a node is accepted only where the target draws it, and behind another branch than the likeliest the rows "
        "belong to another context; at temperature 1 the target leaves the likeliest chain early. A step with "
        "SmolLM2's weak draft model emits 1.6 tokens of a chain, so that more nodes near the root help all the same"
    ),
    "A lattice emits more tokens per second": (
        "a lattice pays one draft forward per depth, as the chain does, where the paper's drafter makes one in all; "
        "64 nodes cost a target of 16M parameters on a CPU more than they cost on an accelerator"
    ),
    "adaedl is faster than": (
        "AdaEDL's threshold moves by at most 0.001 a step, and an output of 96 tokens has some fifty steps, so that it "
        "stays where it began; the paper tunes where it begins. With Qwen it drafts 8 to 10 tokens a step, of which "
        "54 % are accepted"
    ),
    "svip is faster than the best": (
        "the threshold is the paper's; it drafts little more than one token, with Qwen 3.4 to 3.6"
    ),
    "RSD-C emits more tokens per step than SpecInfer": (
        "the shapes that were tried for RSD-C are less deep than SpecInfer's paths"
    ),
    "SpecTr (K-SEQ) emits more tokens": "the paper's figure is for eight paths of eight tokens, 64 nodes against 8",
    "TETRIS is faster": (
        "every request drafts two tokens more than it may verify; here a draft forward costs a sixth of the target's "
        "and verifying more tokens costs little, so that there is hardly a budget to share; the paper verifies on "
        "targets of 33B to 405B parameters"
    ),
    "TETRIS accepts more": (
        "the criterion is the lossless one, which may not look at the token that it judges; the paper's own does"
    ),
    "PEARL is faster than drafting in turn, two threads": (
        "half of a forward of the embedded pair is Python, which two threads of one process take turns at; the paper "
        "has a device per model. SmolLM2 has eight times as many parameters"
    ),
    "PEARL is faster than plain decoding": (
        "six layers of SmolLM2 draft two tokens in nearly the time of one of its forwards, and a fifth to a third of "
        "them are accepted; Qwen's 0.5B drafts four in hardly more than a forward of 1.5B, and half are accepted"
    ),
    "Distillation emits more tokens": (
        "with `fkl`; with `jsd` the embedded target's gain is 2.1 % at temperature 0 and 7.5 % at 1. SmolLM2's six "
        "layers were distilled on its chats before, and 40 steps on other texts make them worse in every way (1.76 "
        "tokens per step before, 1.57 to 1.71 after, temperature 0): the ways are compared by how little they harm"
    ),
    "The draft model's own texts are better": (
        "a draft model of one layer that has read a million tokens writes texts that the target would not write, and "
        "so do six layers of SmolLM2, which guess 44 % of its tokens; 40 to 100 steps are few; the paper's draft "
        "models are large and long trained"
    ),
    "A mix of both is better": "half of the rows are the weak draft model's own texts",
    "Learning from the stream accepts more": (
        "the embedded target's draft model had not read these domains and learns 288 requests; with "
        "`recipes/small_draft`, which has read them, single trials showed changes of -0.1 to +0.04. SmolLM2's learn "
        "144 requests in 36 steps: one was distilled on SmolLM2's chats before, Python among them, and gains "
        "little; the other one had read dialogues and questions only, and gains more"
    ),
    "Merging experts emits more": (
        "the target was trained for 900 steps, and its experts are used unevenly: the four most used ones alone say "
        "almost what all eight say. The mean of experts that learnt different things says what none of them said"
    ),
    "One wide layer is faster than": (
        "every step also pays for the target, whose forward is not shorter, and half of the time of these steps is "
        "Python; the paper's target has 65B parameters and its deep draft models 24 layers. The embedded target's "
        "draft models were distilled from random weights, where one wide layer also emits more tokens per step. "
        "SmolLM2's were cut out of it and learnt 41,000 tokens: one of seven first tokens is accepted at "
        "best. The deepest one accepts most, and takes 1.8 times as long for a step"
    ),
    "Random gaps accept more": "rotary draft models lose nothing behind the trained length that gaps could give back",
    "Steering and distillation emit": (
        "100 optimizer steps of 8 rows, 60 of 4 for SmolLM2; the papers' draft models have many layers to steer, and "
        "learn for days"
    ),
    "A frozen draft model emits more": (
        "100 optimizer steps of 8 rows, and one layer to steer. SmolLM2's draft model and target know chats; what "
        "steers learns 60 steps on texts that are none, and it is judged on chats"
    ),
    "EAGLE-3 ": (
        "two million tokens, for SmolLM2's heads 49,000: EAGLE also learns the target's next feature at every place, "
        "and so learns faster; the paper trains for hundreds of times as many tokens"
    ),
    "DFlare emits more": (
        "on the embedded target, seeds of DFlash differ by up to 17 %, those of DFlare by 1 %. SmolLM2's have one seed "
        "and learnt 49,000 tokens, so that one first token of twenty is accepted"
    ),
    "Jakiro is faster": "it drafts with one forward less than EAGLE and emits fewer tokens; its experts are small",
}
"""Why a figure differs from the paper's, by the beginning of the claim; the longest beginning that fits counts."""
HEAD = """# Published claims, tested

Each claim is judged on two pairs: the embedded target with the draft model that ships with the package (*embedded
pair*), and with `recipes/small_draft` (*small pair*). Some are also judged on real models, on chats of HumanEval, MBPP,
MT-bench and GSM8K: Qwen2.5-Coder-1.5B-Instruct with 0.5B, from GGUF files of 4 bits, and SmolLM2-135M-Instruct with six
of its own layers that learnt to draft ([how](pruning.md#six-layers-of-smollm2-135m-instruct)), in float32.
`four-sets.jsonl` has 25 chats of each set, `four-sets-short.jsonl` as many of at most 110 tokens (20 of HumanEval).
Cells have our figure and its 95 % interval, in percent of the gain that the claim speaks of, unless its remark says
otherwise. **yes**: the whole interval is on the claim's side. **no**: the whole interval is on the other side. That
says nothing about the papers' own models.
"""
OF_TRAINING = """## Training

Here drafters are trained, those of a column in one comparison with equal steps, rows and tokens. Intervals are over
held-out prompts and over one to three seeds of the training. The budgets are those of minutes on one core; the papers
train for days on accelerators. The draft models of SmolLM2 begin as the six layers above, or as six layers that had
read other texts only, dialogues and questions with their answers; its heads begin with random weights
([how](heads.md#heads-of-smollm2-after-equal-tokens)). Experts are merged in the embedded target alone: no real mixture
of experts was at hand.

"""
HOURS = """## Undecided claims

How long one core of this machine would have to measure until the interval leaves the bound out, if the figure stays
what it is: an interval narrows with the square root of the time. The machine did other work while steps were counted,
so that the hours are rather too many than too few.

"""
METHOD = """## How the figures are taken

**Tokens per step** do not depend on the clock. Lossless decoding emits texts with the target's law, whatever is
drafted. For a chain of a fixed length the rows of both models along a text say how many steps it is expected to take:
nothing is drafted and no coin is thrown (`outrider.theory.coverage`; a test shows that its mean is that of enumerated
runs). So they do for RSD-C, SpecInfer and SpecTr, which judge each node by that node alone
(`outrider.plan.tree_coverage`); where a run is older than this, they were run. For other trees and for stopping rules
steps are counted in runs, and held against what a chain would take for the same
texts, so that texts which happen to be easy cancel (`recipes.inquiry.figures`). Prompts are resampled within their
categories, the same for all methods. Methods are run with further seeds until an interval twice as wide would decide
every claim about them, or until the seeds are used up.

**Tokens per second** are tokens per step over seconds per step. Prefill, which is the same for all, is
left out. The seconds are those of timed runs, in which all methods took turns on a prompt: medians over prompts, each
run divided by how much slower than usual all methods were on its prompt (`recipes.inquiry.step_seconds`). They were
timed once, at the commits that stand at the end of this page.

The page is written by `python -m recipes claims`.

"""


def reason(claim: str) -> str:
    """The entry of `REASONS` for a claim."""
    fitting = [start for start in REASONS if claim.startswith(start)]
    return REASONS[max(fitting, key=len)] if fitting else ""


def read(folder: Path) -> dict[str, Any]:
    """A run's record with its claims."""
    try:
        claims = json.loads((folder / "claims.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"{folder} is not the folder of a finished run: {error}") from error
    record = read_record(folder)
    return {**record, "claims": claims, "folder": folder, "seconds": spent(folder, record)}


def spent(folder: Path, record: Mapping[str, Any]) -> float:
    """The seconds that a run took. Those of its rows count where these were made before the run that lists them."""
    begin, end = (datetime.fromisoformat(record[part]["date"]) for part in ("circumstances", "ended"))
    rows = sum(row.get("seconds") or 0 for row in read_rows(folder / "rows.jsonl"))
    return max((end - begin).total_seconds(), rows)


def lasting(seconds: float) -> str:
    """A time in hours; in minutes below an hour.

    Example:
        >>> lasting(9000), lasting(200)
        ('2.5 hours', '3 minutes')
    """
    return f"{seconds / 3600:.1f} hours" if seconds >= 3600 else f"{max(1, round(seconds / 60))} minutes"


def number(value: float | str | None) -> str:
    """A figure of a paper; a dash if the paper gives none."""
    return "-" if value is None else value if isinstance(value, str) else f"{value:g}"


@dataclass(frozen=True, kw_only=True)
class Line:
    """A claim, with the results of each pair by its draft model.

    Attributes:
        found: The entries of `claims.json`, and whether their steps were counted apart from the clock.
    """

    claim: str
    paper: str
    url: str
    published: float | str | None
    unit: str
    found: Mapping[str, Mapping[str, Any]]


def lines(runs: Sequence[Mapping[str, Any]]) -> list[Line]:
    """The claims of all runs, those of one paper together."""
    papers: dict[str, dict[str, dict[str, Mapping[str, Any]]]] = {}
    for run in runs:
        for claim in run["claims"]:
            counted = bool(run["circumstances"]["arguments"].get("timed"))
            found = {**claim, "counted": counted}
            papers.setdefault(claim["paper"], {}).setdefault(claim["claim"], {})[draft_of(run)] = found
    made = []
    for claims in papers.values():
        for sentence, found in claims.items():
            first = next(iter(found.values()))
            made.append(
                Line(
                    claim=sentence,
                    paper=first["paper"],
                    url=first["url"],
                    published=first["paper_value"],
                    unit=first["unit"],
                    found=found,
                )
            )
    return made


def draft_of(run: Mapping[str, Any]) -> str:
    """The draft model of a run; `TRAINED` if the run trains its drafters, and behind it what they begin with, or else
    their target, if that is of `PAIRS`.
    """
    told = run["circumstances"]["arguments"]
    if told.get("draft"):
        return Path(told["draft"]).name
    names = (f"{TRAINED} {Path(told.get(name) or '').name}" for name in ("begins_with", "target"))
    return next((name for name in names if name in PAIRS), TRAINED)


def pair_of(draft: str) -> str:
    """The page's name for the pair with a draft model."""
    return PAIRS.get(draft, f"with `{draft}`")


def figure(claim: Mapping[str, Any] | None) -> str:
    """A figure with its interval; a dash if there is none.

    Example:
        >>> figure({"our_value": 5.584, "interval": (0.043, 16.187)})
        '5.6 [0.04, 16.2]'
    """
    if claim is None:
        return "-"
    middle, low, high = (f"{x:.1f}" if abs(x) >= 0.1 else f"{x:.2f}" for x in (claim["our_value"], *claim["interval"]))
    return f"{middle} [{low}, {high}]"


def verdict(claim: Mapping[str, Any] | None) -> str:
    """A verdict in one word; a dash if there is none."""
    return "-" if claim is None else f"**{VERDICTS[claim['holds']]}**"


def hours(value: float | None) -> str:
    """The further time: whole hours, or tenths of an hour below a few hours."""
    if value is None:
        return "not known"
    if value >= LONG:
        return f"> {LONG:g}"
    return f"{max(value, 0.1):.1f}" if value < 10 else f"{value:.0f}"


def counts(claims: Sequence[Mapping[str, Any]]) -> list[str]:
    """How many of some claims hold, do not hold, and are undecided."""
    holds = [claim["holds"] for claim in claims]
    return [str(holds.count(verdict)) for verdict in VERDICTS]


def remark(line: Line) -> str:
    """The remark on a claim: first the part that is true for all pairs, then the differences."""
    parts = {pair: list(filter(None, claim["note"].split("; "))) for pair, claim in line.found.items()}
    shared = [part for part in next(iter(parts.values())) if all(part in own for own in parts.values())]
    made = [] if line.unit.startswith(GAIN) else [f"the figures are {line.unit}"]
    made += shared
    for pair, own in parts.items():
        if rest := [part for part in own if part not in shared]:
            made.append(f"{pair_of(pair)}: {', '.join(rest)}")
    if line.unit == PER_SECOND and any(claim["counted"] for claim in line.found.values()):
        made.append("counted steps over measured seconds of a step")
    return "; ".join(filter(None, [*made, reason(line.claim)]))


def remarks(made: Sequence[Line]) -> str:
    """The remarks on claims, by their numbers; claims with the same remark share a line."""
    numbers: dict[str, list[str]] = {}
    for i, line in enumerate(made, 1):
        if text := remark(line):
            numbers.setdefault(text, []).append(str(i))
    return "\n".join(f"- **{', '.join(own)}**: {text[0].upper()}{text[1:]}." for text, own in numbers.items())


def short(paper: str) -> str:
    """The table's name for a paper: the method.

    Example:
        >>> short("Weng et al. 2025, traversal verification")
        'traversal verification'
    """
    return paper.rpartition(", ")[2]


def overview(made: Sequence[Line], pairs: Sequence[str]) -> str:
    """The claims on some pairs, by paper, with the figures and the verdicts on all of them."""
    body = []
    before = None
    for i, line in enumerate(made, 1):
        if line.found.keys().isdisjoint(pairs):
            continue
        own = [line.found.get(pair) for pair in pairs]
        paper = "" if line.paper == before else f"[{short(line.paper)}]({line.url})"
        before = line.paper
        verdicts = " / ".join(map(verdict, own))
        body.append([paper, i, line.claim.rstrip("."), number(line.published), *map(figure, own), verdicts])
    return table(("paper", "", "claim", "paper's", *map(pair_of, pairs), "verdicts"), body)


def pictured(made: Sequence[Line], pairs: Sequence[str]) -> Dots | None:
    """The gains of claims that were judged on a real model, with the other pairs beside them; None if there are none.

    A ratio above 1 speaks for the claim.
    """
    shown = {
        f"{i} {textwrap.fill(line.claim.rstrip('.'), NAME_WIDTH)}": line
        for i, line in enumerate(made, 1)
        if line.unit.startswith(GAIN) and any(pair in REAL for pair in line.found) and set(line.found) & set(pairs)
    }
    if not shown:
        return None
    groups = {pair_of(pair): [_ratio(line.found.get(pair)) for line in shown.values()] for pair in pairs}
    return Dots(
        title="What the claims' gains are on each pair, with 95 % intervals",
        x="times what it is compared with; right of 1 speaks for the claim",
        names=list(shown),
        groups={name: ratios for name, ratios in groups.items() if any(ratios)},
    )


def _ratio(claim: Mapping[str, Any] | None) -> IntervalEstimate | None:
    """A gain in percent as a ratio."""
    if claim is None:
        return None
    value, low, high = (1 + x / 100 for x in (claim["our_value"], *claim["interval"]))
    return IntervalEstimate(value=value, low=low, high=high)


def summary(made: Sequence[Line]) -> str:
    """How many claims of each paper hold, do not hold, and are undecided, over all pairs."""
    body = []
    for paper, url in dict.fromkeys((line.paper, line.url) for line in made):
        body.append(
            [f"[{paper}]({url})", *counts([c for line in made if line.paper == paper for c in line.found.values()])]
        )
    body.append(["**all**", *counts([claim for line in made for claim in line.found.values()])])
    return table(("paper", "yes", "no", "undecided"), body)


def total(made: Sequence[Line]) -> str:
    """How many verdicts there are of each kind, on all pairs and on real models."""
    every = [claim for line in made for claim in line.found.values()]
    yes, no, open_ = counts(every)
    said = f"{len(made)} claims, {len(every)} verdicts: {yes} yes, {no} no, {open_} undecided."
    real = [[claim for pair, claim in line.found.items() if pair in REAL] for line in made]
    if judged := [own for own in real if own]:
        verdicts = [claim for own in judged for claim in own]
        yes, no, open_ = counts(verdicts)
        said += f" {len(judged)} of the claims are judged on real models, with {len(verdicts)} verdicts: {yes} yes, "
        left = sum(all(claim["holds"] is None for claim in own) for own in judged)
        said += f"{no} no, {open_} undecided. {left} of these claims are undecided on every real pair."
    return said


def undecided(made: Sequence[Line]) -> str:
    """The hours that each undecided claim would take, and their sum."""
    said, left = [], list[float]()
    for i, line in enumerate(made, 1):
        own = {pair: claim.get("hours") for pair, claim in line.found.items() if claim["holds"] is None}
        left += [value for value in own.values() if value is not None]
        if own:
            each = ", ".join(f"{hours(value)} ({pair_of(pair)})" for pair, value in own.items())
            said.append(f"- **{i}** {line.claim.rstrip('.')}: {each}")
    if not said:
        return "There are none.\n"
    short_ones = [value for value in left if value < LONG]
    together = f"Together {hours(sum(short_ones))} hours, without those that would take more than {LONG:g}."
    return "\n".join([*said, "", together, ""])


def pairs_of(runs: Sequence[Mapping[str, Any]], trained: bool) -> list[str]:
    """The pairs of runs that train their drafters, or of those that do not."""
    every = dict.fromkeys(draft_of(run) for run in runs)
    return [pair for pair in every if pair.startswith(TRAINED) == trained]


def picture_line(made: Sequence[Line], pairs: Sequence[str], *, trained: bool) -> str:
    """The line of the page that shows a picture; empty if there is none."""
    panel = pictured(made, pairs)
    return "" if panel is None else f"\n![{panel.title}]({PICTURES[trained]})\n"


def page(runs: Sequence[Mapping[str, Any]]) -> str:
    """The page."""
    made = lines(runs)
    pairs, own = (pairs_of(runs, trained) for trained in PICTURES)
    about = [described(run) for run in runs]
    whole = "\n".join(
        [
            f"{HEAD}{total(made)}\n{picture_line(made, pairs, trained=False)}\n{overview(made, pairs)}",
            *([f"{OF_TRAINING}{picture_line(made, own, trained=True)}\n{overview(made, own)}"] if own else []),
            f"## Remarks\n\n{remarks(made)}\n",
            f"{HOURS}{undecided(made)}",
            f"## Verdicts, by paper\n\n{summary(made)}",
            f"{METHOD}## Runs\n\n{chr(10).join(about)}\n",
        ]
    )
    return "\n".join(map(wrapped, whole.split("\n")))


def wrapped(line: str) -> str:
    """A line of the page in lines of at most 130 characters; rows of tables are left as they are."""
    if len(line) <= WIDTH or line.startswith("|"):
        return line
    within = "  " if line.startswith("- ") else ""
    return textwrap.fill(line, WIDTH, subsequent_indent=within, break_long_words=False, break_on_hyphens=False)


def described(run: Mapping[str, Any]) -> str:
    """A run in one line."""
    made, given = run["circumstances"], run["circumstances"]["arguments"]
    changed = " with uncommitted changes" if made["uncommitted_changes"] else ""
    where = Path(run["folder"])
    place = where.relative_to(ROOT) if where.is_absolute() and where.is_relative_to(ROOT) else where
    num_prompts = max(claim.get("num_prompts", 0) for claim in run["claims"]) or given.get("num_prompts", 0)
    told = f"prompts: {num_prompts}"
    if not draft_of(run).startswith(TRAINED):
        told += f" of `{Path(given['prompts']).name}`"
    told += f", seeds: at most {given['seeds']}"
    if run.get("seconds"):
        told += f", {'within ' * bool(run.get('resumed'))}{lasting(run['seconds'])}"
    if "max_new_tokens" in given:
        told += f", tokens: at most {given['max_new_tokens']}"
    text = (
        f"- [{place}](../../{place}/table.md): `{run['recipe']}`, {told}; "
        f"{made['cpu']}, {made['threads']} threads, torch {made['versions']['torch']}, commit "
        f"{str(made['commit'])[:10]}{changed}, {made['date'][:10]}"
    )
    timed = given.get("timed")
    if not timed or not (ROOT / timed / "circumstances.json").exists():
        return f"{text}."
    clock = read_record(ROOT / timed)["circumstances"]
    return f"{text}. Times: [{timed}](../../{timed}), commit {str(clock['commit'])[:10]}, {clock['date'][:10]}."


def runs_of(measurements: Path) -> list[dict[str, Any]]:
    """The runs with claims in the folders of a folder; those with the embedded draft model first."""
    found = [read(place.parent) for place in sorted(measurements.glob("*/claims.json"))]
    order = list(PAIRS)
    known = [run for run in found if run["claims"]]
    return sorted(known, key=lambda run: order.index(draft_of(run)) if draft_of(run) in PAIRS else 1)


def main(
    measurements: Annotated[Path, typer.Option(help="Folder of the folders that the recipes wrote.")] = MEASUREMENTS,
    out: Annotated[Path | None, typer.Option(help="The page to write; without it the page is printed.")] = None,
) -> None:
    """Collect tested claims into one page."""
    runs = runs_of(measurements)
    if not runs:
        raise InputError(f"no folder of {measurements} has claims")
    if out is None:
        typer.echo(page(runs))
    else:
        out.parent.mkdir(parents=True, exist_ok=True)
        files.replace(out, page(runs).encode())
        for trained, name in PICTURES.items():
            if panel := pictured(lines(runs), pairs_of(runs, trained)):
                files.replace(out.with_name(name), draw([panel], size=PICTURE_SIZE).encode())
        typer.echo(f"wrote {out}")
