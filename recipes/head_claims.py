"""What papers say of their heads, against the rows of the recipe `heads`."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from jaxtyping import Float

from outrider.bench.claims import Claim, Paper
from outrider.bench.evidence import Row, Sums, gain
from recipes.head_runs import PLAIN, common, folded
from recipes.head_ways import CHAIN, DYNAMIC, LATTICE
from recipes.trained import DEPTH, TEMPERATURES, of

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


@dataclass(frozen=True, kw_only=True)
class Contrast:
    """A published comparison of two heads, or of two ways to draft with one.

    Attributes:
        says: The claim, without its temperature.
        ours: The better head, and what it drafts where runs are compared.
        theirs: The other.
    """

    paper: Paper
    says: str
    ours: tuple[str, str]
    theirs: tuple[str, str]
    measure: Measure
    published: float | str | None = None
    note: str = ""


def _chain(head: str) -> tuple[str, str]:
    return head, CHAIN


def _dynamic(head: str) -> tuple[str, str]:
    return head, DYNAMIC.name


def _lattice(head: str) -> tuple[str, str]:
    return head, LATTICE.name


CONTRASTS = (
    Contrast(
        paper=EAGLE3,
        says="EAGLE-3 emits more tokens per step than EAGLE, chains of 5",
        ours=_chain("eagle3"),
        theirs=_chain("eagle"),
        measure="tokens",
    ),
    Contrast(
        paper=EAGLE3,
        says="EAGLE-3 emits more tokens per step than EAGLE-2, dynamic trees of 16 nodes",
        ours=_dynamic("eagle3"),
        theirs=_dynamic("eagle"),
        measure="decoded tokens",
    ),
    Contrast(
        paper=EAGLE3,
        says="EAGLE-3 is faster than EAGLE-2, dynamic trees of 16 nodes",
        ours=_dynamic("eagle3"),
        theirs=_dynamic("eagle"),
        measure="speed",
        published=40,
        note="the paper has about 1.4 times EAGLE-2's speed",
    ),
    Contrast(
        paper=POSS,
        says="PosS accepts more than EAGLE at positions 3 to 5",
        ours=_chain("poss"),
        theirs=_chain("eagle"),
        measure="late",
        published="more",
    ),
    Contrast(
        paper=POSS,
        says="PosS accepts more than HASS at positions 3 to 5",
        ours=_chain("poss"),
        theirs=_chain("hass"),
        measure="late",
        published="more",
    ),
    Contrast(
        paper=GRIFFIN,
        says="GRIFFIN emits more tokens per step than EAGLE, chains of 5",
        ours=_chain("griffin"),
        theirs=_chain("eagle"),
        measure="tokens",
        published=8,
    ),
    Contrast(
        paper=JAKIRO,
        says="Jakiro is faster than EAGLE-2, dynamic trees of 16 nodes",
        ours=_dynamic("jakiro"),
        theirs=_dynamic("eagle"),
        measure="speed",
        published="3 to 6",
        note="the figure at temperature 0; the authors' sampler at temperature 1 is not lossless",
    ),
    Contrast(
        paper=PARALLEL,
        says="ParallelSpec is faster than Medusa, chains of 5",
        ours=_chain("parallel"),
        theirs=_chain("medusa"),
        measure="speed",
        published="up to 62",
    ),
    Contrast(
        paper=PARALLEL,
        says="ParallelSpec emits more tokens per step than Medusa, chains of 5",
        ours=_chain("parallel"),
        theirs=_chain("medusa"),
        measure="tokens",
        published=38,
        note="the paper accepts 3.31 tokens where Medusa accepts 2.39",
    ),
    Contrast(
        paper=BLOCKWISE,
        says="Rescored drafts of blockwise heads emit more tokens per step than raw ones",
        ours=_chain("blockwise"),
        theirs=_chain("blockwise raw"),
        measure="decoded tokens",
        published="5 to 21",
    ),
    Contrast(
        paper=DDTREE,
        says="A lattice of 16 nodes emits more tokens per step than the chain of a DFlash head",
        ours=_lattice("dflash"),
        theirs=_chain("dflash"),
        measure="decoded tokens",
    ),
    Contrast(
        paper=DDTREE,
        says="A lattice of 16 nodes is faster than the chain of a DFlash head",
        ours=_lattice("dflash"),
        theirs=_chain("dflash"),
        measure="speed",
        published=36,
        note="the paper has 7.5 times plain decoding's speed where the chain has 5.5 times",
    ),
    Contrast(
        paper=DFLARE,
        says="DFlare emits more tokens per step than DFlash, chains of 5",
        ours=_chain("dflare"),
        theirs=_chain("dflash"),
        measure="tokens",
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


def _along_texts(contrast: Contrast, rows: Sequence[Row], temperature: int) -> Claim | None:
    ours, theirs = contrast.ours[0], contrast.theirs[0]
    some = common(rows, (ours, theirs))
    if not some:
        return None
    over, under = f"tokens_{of(temperature)}", f"steps_{of(temperature)}"
    if contrast.measure == "late":
        some, over, under = late(some, temperature), "late_over", "late_under"
    sums = Sums(some, crossed=True)
    return _claim(contrast, sums, sums.ratio(ours, over, under), sums.ratio(theirs, over, under), temperature)


def _of_runs(contrast: Contrast, rows: Sequence[Row], temperature: int) -> Claim | None:
    named = [
        {**row, "method": f"{head}, {row['draft']}"}
        for head in dict.fromkeys((contrast.ours[0], contrast.theirs[0]))
        for row in folded([row for row in rows if row["method"] == head and row["temperature"] == temperature])
    ]
    ways = {side: (", ".join(side), f"{side[0]}, {PLAIN}") for side in (contrast.ours, contrast.theirs)}
    some = common(named, {name for pair in ways.values() for name in pair})
    if not some:
        return None
    sums = Sums(some, crossed=True)

    def figure(side: tuple[str, str]) -> Float[np.ndarray, " samples"]:
        draft, plain = ways[side]
        # Each head was timed beside its own plain runs.
        return sums.efficiency(draft) if contrast.measure == "decoded tokens" else sums.speed(draft) / sums.speed(plain)

    return _claim(contrast, sums, figure(contrast.ours), figure(contrast.theirs), temperature)


def _claim(
    contrast: Contrast,
    sums: Sums,
    ours: Float[np.ndarray, " samples"],
    theirs: Float[np.ndarray, " samples"],
    temperature: int,
) -> Claim:
    return contrast.paper.claim(
        f"{contrast.says}, temperature {temperature}.",
        gain(ours, theirs),
        num_prompts=sums.num_prompts,
        published=contrast.published,
        unit=UNITS[contrast.measure],
        least=0.0,
        note=contrast.note,
        rests_on=(" ".join(contrast.ours), " ".join(contrast.theirs)),
    )
