"""What papers say of their heads, against the rows of the recipe `heads`."""

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Literal

import numpy as np
from jaxtyping import Float

from outrider.bench.claims import Claim, Paper
from outrider.bench.evidence import Estimate, Row, Sums, gain
from recipes.head_runs import PLAIN, common, folded
from recipes.head_ways import CHAIN, DYNAMIC, LATTICE
from recipes.trained import DEPTH, TEMPERATURES, Contrast, efficiency, of

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


def _claim(contrast: OfHeads, sums: Sums, found: Estimate, temperature: int) -> Claim:
    rests_on = [" ".join(side) for side in contrast.sides]
    return contrast.claim(found, temperature, sums.num_prompts, UNITS[contrast.measure], rests_on)
