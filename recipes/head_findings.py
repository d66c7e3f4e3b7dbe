"""Tables, plots and claims of the recipe `heads`."""

import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from itertools import pairwise
from typing import Any, Literal

import numpy as np
from jaxtyping import Float

from outrider.bench.evidence import IntervalEstimate, Row, Sums
from outrider.bench.plot import Curve, Panel
from outrider.bench.report import Claim, Findings, Table
from outrider.bench.speedup import rate, speedup
from recipes.head_plan import CHAIN, DYNAMIC, LATTICE, set_of
from recipes.inquiry.papers import Paper, gain
from recipes.trained import DEPTH, TEMPERATURES, Contrast, efficiency, of

PLAIN = "plain"
OF_STEPS = ("free_tokens", "free_steps", "later_steps")
"""Counts of the steps of a run that has room for whole drafts."""
EAGLE3 = Paper(name="Li et al. 2025, EAGLE-3", url="https://arxiv.org/abs/2503.01840")
POSS = Paper(name="Huang et al. 2025, PosS", url="https://arxiv.org/abs/2506.03566")
GRIFFIN = Paper(name="Hu et al. 2025, GRIFFIN", url="https://arxiv.org/abs/2502.11018")
JAKIRO = Paper(name="Huang et al. 2025, Jakiro", url="https://arxiv.org/abs/2502.06282")
PARALLEL = Paper(name="Xiao et al. 2024, ParallelSpec", url="https://arxiv.org/abs/2410.05589")
BLOCKWISE = Paper(name="Kim et al. 2024, rescored drafts", url="https://arxiv.org/abs/2404.09221")
DDTREE = Paper(name="Ringel and Romano 2026, DDTree", url="https://arxiv.org/abs/2604.12989")
DFLARE = Paper(name="AngelSlim 2026, DFlare", url="https://github.com/Tencent/AngelSlim")
LATE = 3
"""The first position that is late."""
Measure = Literal["tokens", "late", "decoded tokens", "speed"]
"""Tokens per step along texts, acceptance at late positions along texts, tokens per step and per second of runs."""
UNITS: dict[Measure, str] = {
    "tokens": "% of block efficiency",
    "late": "% of acceptance",
    "decoded tokens": "% of block efficiency",
    "speed": "% of tokens per second",
}


DYNAMICS, LATTICE_AND_CHAIN = (DYNAMIC.name, DYNAMIC.name), (LATTICE.name, CHAIN)


@dataclass(frozen=True)
class OfHeads(Contrast):
    """A published comparison of two heads, or of two ways to draft with one.

    Attributes:
        drafts: What the two draft where runs are compared.
    """

    _: KW_ONLY
    measure: Measure = "tokens"
    drafts: tuple[str, str] = (CHAIN, CHAIN)

    @property
    def sides(self) -> tuple[tuple[str, str], tuple[str, str]]:
        """Head and draft, of ours and of theirs."""
        return (self.ours, self.drafts[0]), (self.theirs, self.drafts[1])


CONTRASTS = (
    OfHeads(EAGLE3, "EAGLE-3 emits more tokens per step than EAGLE, chains of 5", "eagle3", "eagle"),
    OfHeads(
        EAGLE3,
        "EAGLE-3 emits more tokens per step than EAGLE-2, dynamic trees of 16 nodes",
        "eagle3",
        "eagle",
        measure="decoded tokens",
        drafts=DYNAMICS,
    ),
    OfHeads(
        EAGLE3,
        "EAGLE-3 is faster than EAGLE-2, dynamic trees of 16 nodes",
        "eagle3",
        "eagle",
        measure="speed",
        drafts=DYNAMICS,
        published=40,
        note="the paper has about 1.4 times EAGLE-2's speed",
    ),
    *(
        OfHeads(
            POSS, f"PosS accepts more than {title} at positions 3 to 5", "poss", head, measure="late", published="more"
        )
        for head, title in (("eagle", "EAGLE"), ("hass", "HASS"))
    ),
    OfHeads(GRIFFIN, "GRIFFIN emits more tokens per step than EAGLE, chains of 5", "griffin", "eagle", published=8),
    OfHeads(
        JAKIRO,
        "Jakiro is faster than EAGLE-2, dynamic trees of 16 nodes",
        "jakiro",
        "eagle",
        measure="speed",
        drafts=DYNAMICS,
        published="3 to 6",
        note="the figure at temperature 0; the authors' sampler at temperature 1 is not lossless",
    ),
    OfHeads(
        PARALLEL,
        "ParallelSpec is faster than Medusa, chains of 5",
        "parallel",
        "medusa",
        measure="speed",
        published="up to 62",
    ),
    OfHeads(
        PARALLEL,
        "ParallelSpec emits more tokens per step than Medusa, chains of 5",
        "parallel",
        "medusa",
        published=38,
        note="the paper accepts 3.31 tokens where Medusa accepts 2.39",
    ),
    OfHeads(
        BLOCKWISE,
        "Rescored drafts of blockwise heads emit more tokens per step than raw ones",
        "blockwise",
        "blockwise raw",
        measure="decoded tokens",
        published="5 to 21",
    ),
    OfHeads(
        DDTREE,
        "A lattice of 16 nodes emits more tokens per step than the chain of a DFlash head",
        "dflash",
        "dflash",
        measure="decoded tokens",
        drafts=LATTICE_AND_CHAIN,
    ),
    OfHeads(
        DDTREE,
        "A lattice of 16 nodes is faster than the chain of a DFlash head",
        "dflash",
        "dflash",
        measure="speed",
        drafts=LATTICE_AND_CHAIN,
        published=36,
        note="the paper has 7.5 times plain decoding's speed where the chain has 5.5 times",
    ),
    OfHeads(
        DFLARE,
        "DFlare emits more tokens per step than DFlash, chains of 5",
        "dflare",
        "dflash",
        published="5 to 11, in speed",
    ),
)


def claims(judged: Sequence[Row], decoded: Sequence[Row]) -> list[Claim]:
    """The contrasts whose heads have rows, at both temperatures. The others are left out.

    Args:
        judged: Rows of heads (`method`) along texts.
        decoded: Rows of runs, by head (`method`) and draft.
    """
    made = []
    for contrast in CONTRASTS:
        for temperature in TEMPERATURES:
            if contrast.measure in ("tokens", "late"):
                found = _along_texts(contrast, judged, temperature)
            else:
                found = _of_runs(contrast, decoded, temperature)
            if found is not None:
                made.append(found)
    return made


def late(rows: Sequence[Row], temperature: int) -> list[Row]:
    """The rows with what was accepted at late positions, and what had been accepted before them."""
    names = [f"accepted_{of(temperature, k)}" for k in range(LATE - 1, DEPTH + 1)]
    return [
        {**row, "late_over": sum(row[n] for n in names[1:]), "late_under": sum(row[n] for n in names[:-1])}
        for row in rows
    ]


def _along_texts(contrast: OfHeads, rows: Sequence[Row], temperature: int) -> Claim | None:
    some = common(rows, (contrast.ours, contrast.theirs))
    if not some:
        return None
    if contrast.measure == "late":
        sums = Sums(late(some, temperature), crossed=True)
        ours, theirs = (sums.ratio(head, "late_over", "late_under") for head, _ in contrast.sides)
    else:
        sums = Sums(some, crossed=True)
        ours, theirs = (efficiency(sums, head, temperature) for head, _ in contrast.sides)
    return _claim(contrast, sums, gain(ours, theirs), temperature)


def _of_runs(contrast: OfHeads, rows: Sequence[Row], temperature: int) -> Claim | None:
    named = [
        {**row, "method": f"{head}, {row['draft']}"}
        for head in dict.fromkeys((contrast.ours, contrast.theirs))
        for row in folded([row for row in rows if row["method"] == head and row["temperature"] == temperature])
    ]
    some = common(named, {f"{head}, {each}" for head, draft in contrast.sides for each in (draft, PLAIN)})
    if not some:
        return None
    sums = Sums(some, crossed=True)

    def figure(head: str, draft: str) -> Float[np.ndarray, " samples"]:
        if contrast.measure == "decoded tokens":
            return sums.efficiency(f"{head}, {draft}")
        # Each head was timed beside its own plain runs.
        return sums.speed(f"{head}, {draft}") / sums.speed(f"{head}, {PLAIN}")

    ours, theirs = (figure(*side) for side in contrast.sides)
    return _claim(contrast, sums, gain(ours, theirs), temperature)


def _claim(contrast: OfHeads, sums: Sums, found: IntervalEstimate, temperature: int) -> Claim:
    rests_on = [" ".join(side) for side in contrast.sides]
    return contrast.claim(found, temperature, sums.num_prompts, UNITS[contrast.measure], rests_on)


def at(rows: Sequence[Row], draft: str, temperature: int) -> list[Row]:
    """The runs of a draft at a temperature."""
    return [row for row in rows if (row["draft"], row["temperature"]) == (draft, temperature)]


def drafts_of(rows: Sequence[Row]) -> list[str]:
    """What the runs of a head drafted, plain decoding left out; the chain first."""
    return sorted({row["draft"] for row in rows} - {PLAIN}, key=lambda name: (name != CHAIN, name))


def folded(rows: Sequence[Row]) -> list[Row]:
    """One row for each prompt and seed of a draft at a temperature: sums of counts, and seconds by the median round."""
    found: dict[tuple[object, ...], list[Row]] = {}
    for row in rows:
        found.setdefault((row["draft"], row["temperature"], row["prompt"], row["seed"]), []).append(row)
    made = []
    for own in found.values():
        tokens = sum(row["tokens"] for row in own)
        seconds = tokens * statistics.median(row["seconds"] / row["tokens"] for row in own)
        sums = {name: sum(row[name] for row in own) for name in OF_STEPS}
        made.append({**own[0], **sums, "tokens": tokens, "seconds": seconds})
    return made


def common(rows: Sequence[Row], methods: Collection[str]) -> list[Row]:
    """The rows of some methods, on the seeds and the prompts that all of them have; none where one has no rows.

    Example:
        >>> rows = [{"method": m, "seed": s, "prompt": "x"} for m, s in (("a", 0), ("a", 1), ("b", 0))]
        >>> [(row["method"], row["seed"]) for row in common(rows, ("a", "b"))]
        [('a', 0), ('b', 0)]
    """
    units = {method: {(r["prompt"], r["seed"]) for r in rows if r["method"] == method} for method in methods}
    seeds = set.intersection(*({seed for _, seed in own} for own in units.values()))
    have = [{prompt for prompt, _ in own if {(prompt, seed) for seed in seeds} <= own} for own in units.values()]
    prompts = set.intersection(*have) if seeds else set()
    return [r for r in rows if r["method"] in units and r["prompt"] in prompts and r["seed"] in seeds]


@dataclass(frozen=True, kw_only=True)
class Decoded:
    """What the runs of one draft say, at one temperature.

    Attributes:
        efficiency: Tokens per step, over the steps that have room for a whole draft; its interval is over prompts and
            seeds.
        speedup: Over plain decoding, with an interval over prompts.
        draft_cost: Seconds of drafting in a step, over those of the target's forward in a plain step.
        rate: Tokens per second.
    """

    efficiency: IntervalEstimate
    speedup: IntervalEstimate
    draft_cost: float
    rate: float


def told(rows: Sequence[Row], draft: str, temperature: int) -> Decoded | None:
    """The figures of a draft; None if it has no runs."""
    some = [{**row, "method": row["draft"]} for row in rows if row["temperature"] == temperature]
    both = common(some, (draft, PLAIN))
    ours, plain = ([row for row in both if row["draft"] == name] for name in (draft, PLAIN))
    faster = speedup(ours, plain, sorted({row["prompt"] for row in both}))
    if faster is None:
        return None
    return Decoded(
        efficiency=IntervalEstimate.of(Sums(folded(ours), crossed=True).efficiency(draft)),
        speedup=faster,
        draft_cost=per_step(ours, "drafter_seconds") / per_step(plain, "target_seconds"),
        rate=rate(ours),
    )


def per_step(rows: Sequence[Row], name: str) -> float:
    """Seconds of a part in a step: the median over runs."""
    each = [row[name] / row["later_steps"] for row in rows if row["later_steps"]]
    return float(np.median(each)) if each else float("nan")


def best_other(rows: Sequence[Row], temperature: int) -> str | None:
    """The draft beside the chain with the most tokens per second; None if there is none."""
    some = [row for row in rows if row["temperature"] == temperature]
    rates = {draft: rate(at(some, draft, temperature)) for draft in drafts_of(some) if draft != CHAIN}
    return max(rates, key=rates.__getitem__) if rates else None


PHASES = ("trained", "made", "decoded")
"""Rows of a trained head, of a held-out prompt, and of a run."""


@dataclass(frozen=True, kw_only=True)
class OfHead:
    """The rows of a head.

    Attributes:
        made: Along texts, a row for each seed and prompt.
        trained: A row for each seed.
        decoded: Runs; none if it was not decoded with.
    """

    name: str
    made: Sequence[Row]
    trained: Sequence[Row]
    decoded: Sequence[Row]

    def efficiency(self, temperature: int, file: str | None = None) -> IntervalEstimate:
        """Tokens per step along the texts of a file of prompts, or of all."""
        rows = [row for row in self.made if file is None or set_of(row["category"]) == file]
        return IntervalEstimate.of(efficiency(Sums(rows, crossed=True), self.name, temperature))

    def acceptance(self, temperature: int) -> list[float | None]:
        """Probability that the token at each position is accepted if those before it are; None if they never are."""
        names = [f"places_{temperature}", *(f"accepted_{of(temperature, k)}" for k in range(1, DEPTH + 1))]
        sums = [sum(row[name] for row in self.made) for name in names]
        return [after / before if before else None for before, after in pairwise(sums)]

    @property
    def parameters(self) -> int:
        """Trained parameters."""
        return int(self.trained[0]["parameters"])

    @property
    def minutes(self) -> float | None:
        """Minutes of a processor that training took, the median over seeds; None if they were not measured."""
        seen = [row["seconds"] for row in self.trained if row["seconds"] is not None]
        return float(np.median(seen)) / 60 if seen else None


def findings(rows: Sequence[Row], text: str, summary: Mapping[str, Any]) -> Findings:
    """What the rows say.

    Args:
        rows: Those of the phases `trained`, `made` and `decoded`.
        text: What was done.
        summary: When and with what each head was made.
    """
    heads = heads_of(rows)
    made, decoded = ([row for row in rows if row["phase"] == phase] for phase in ("made", "decoded"))
    tables = [table(heads, temperature) for temperature in TEMPERATURES]
    panels: list[Panel] = []
    if decoded:
        tables += [drafts(heads, temperature) for temperature in TEMPERATURES]
        panels = [panel(heads, temperature) for temperature in TEMPERATURES]
    return Findings(tables=tables, panels=panels, claims=claims(made, decoded), text=text, summary=summary)


def heads_of(rows: Sequence[Row]) -> list[OfHead]:
    """The heads that were judged, in the order of their rows, each with the seeds that all its prompts have."""
    found = []
    for name in dict.fromkeys(row["method"] for row in rows if row["phase"] == "made"):
        own = {phase: [r for r in rows if (r["method"], r["phase"]) == (name, phase)] for phase in PHASES}
        found.append(OfHead(name=name, **own))
    return found


def table(heads: Sequence[OfHead], temperature: int) -> Table:
    """One line for each head: sizes, tokens per step along texts and acceptance by position, and what runs say."""
    files = list(dict.fromkeys(set_of(row["category"]) for head in heads for row in head.made))
    first = [
        "head",
        "parameters",
        "training",
        "seeds",
        *(f"tokens per step, {file}" for file in files),
        "acceptance by position",
    ]
    lines = []
    for head in heads:
        minutes = head.minutes
        lines.append(
            [
                head.name,
                f"{head.parameters / 1e6:.1f} M",
                "-" if minutes is None else f"{minutes:.0f} min",
                str(len({row["seed"] for row in head.made})),
                *(head.efficiency(temperature, file).text(".3f") for file in files),
                " ".join("-" if chance is None else f"{chance:.2f}" for chance in head.acceptance(temperature)),
                *runs(head, temperature),
            ]
        )
    return Table(
        title=f"Heads, temperature {temperature}",
        text=(
            f"Chains of {DEPTH} along what the target says to held-out prompts, with intervals over prompts and seeds. "
            "Training in minutes of one core. Acceptance of the 1st to the last token of a draft, if those before it "
            "are accepted. Behind it, runs of the engine: a draft's time in target forwards of one token, and the "
            "speed over plain decoding, with intervals over prompts; the best other draft is the one with most "
            "tokens per second on these prompts."
        ),
        head=[*first, "draft cost", "speedup, chain", "best other draft", "its tokens per step", "its speedup"],
        lines=lines,
    )


def runs(head: OfHead, temperature: int) -> list[str]:
    """The cells of a head's runs: its chain and its best other draft."""
    chain, name = told(head.decoded, CHAIN, temperature), best_other(head.decoded, temperature)
    tree = None if name is None else told(head.decoded, name, temperature)
    cells = ["-", "-"] if chain is None else [f"{chain.draft_cost:.2f}", chain.speedup.text()]
    return [*cells, *(["-"] * 3 if tree is None else [f"`{name}`", tree.efficiency.text(), tree.speedup.text()])]


def drafts(heads: Sequence[OfHead], temperature: int) -> Table:
    """One line for each draft of each head."""
    lines = []
    for head in heads:
        for draft in drafts_of(head.decoded):
            found = told(head.decoded, draft, temperature)
            if found is not None:
                figures = (
                    found.efficiency.text(),
                    f"{found.draft_cost:.2f}",
                    found.speedup.text(),
                    f"{found.rate:.1f}",
                )
                lines.append([head.name, f"`{draft}`", *figures])
    return Table(
        title=f"Runs, temperature {temperature}",
        head=("head", "draft", "tokens per step", "draft cost", "speedup", "tokens/s"),
        lines=lines,
    )


def panel(heads: Sequence[OfHead], temperature: int) -> Panel:
    """Tokens per step of runs against the cost of a draft: each head's chain, and its best other draft."""
    curves = []
    for head in heads:
        best = best_other(head.decoded, temperature)
        for draft, label in ((CHAIN, head.name), (best, f"{head.name}, {best}")):
            found = None if draft is None else told(head.decoded, draft, temperature)
            if found is not None:
                curves.append(Curve(label=label, x=[found.draft_cost], y=[found.efficiency], dashed=draft != CHAIN))
    return Panel(
        title=f"Temperature {temperature}",
        x="cost of a draft (target forwards of one token)",
        y="tokens per step",
        curves=curves,
        exact=True,
    )
