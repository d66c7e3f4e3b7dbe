"""Drafting and verifying at once, against drafting and verifying in turn, and against plain decoding (PEARL).

`python -m recipes pearl --out DIR` decodes at temperatures 0 and 1: plainly, in turn (`step`) with each length, and at
once (`pearl`) with the same lengths on two clocks. The simulated clock counts the longer side of each step, as if each
side had its own device and never waited for data from the other. The real clock measures two threads of this machine,
one for each side. Plain decoding and `step` may use both threads. They are also measured with one thread, because a
simulated device has one.

On both clocks and for all ways to decode, the speed is tokens over seconds of all steps but the first. Prefill, which
PEARL does not change, is left out. So is the first step, which may contain prefill.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Annotated, Any

import numpy as np
import typer
from jaxtyping import Float

from outrider.bench.evidence import IntervalEstimate, Sums
from outrider.bench.folder import folder
from outrider.bench.report import Claim, Findings, Table
from recipes import options
from recipes.inquiry.figures import SPEED
from recipes.inquiry.papers import Paper, gain
from recipes.inquiry.trial import Bench, Method, Setting

PAPER = Paper(name="Liu et al. 2024, PEARL", url="https://arxiv.org/abs/2408.11850")
LENGTHS = (2, 3, 4, 6, 8)
TEMPERATURES = (0.0, 1.0)
WAYS = {
    "plain": ("plain", 1),
    "plain, two threads": ("plain", 2),
    "step": ("step", 1),
    "step, two threads": ("step", 2),
    "pearl, simulated": ("pearl:clock=simulated", 1),
    "pearl, a thread each": ("pearl", 1),
}
"""By name: the decoding and its threads per side."""
PLAIN = tuple(way for way, (decoding, _) in WAYS.items() if decoding == "plain")
DRAFTING = tuple(way for way in WAYS if way not in PLAIN)
QUICK = {"num_prompts": 1, "max_new_tokens": 20, "lengths": "2"}


def name(way: str, length: int | None, temperature: float) -> str:
    """A method's name."""
    return f"{way}{'' if length is None else f' {length}'} T={temperature:g}"


def methods(lengths: Sequence[int] = LENGTHS) -> list[Method]:
    """Every way to decode at both temperatures; ways that draft have every length."""
    return [
        Method(
            name=name(way, length, t),
            length=f"fixed:{length or 2}",
            decoding=decoding,
            threads=threads,
            temperature=t,
            deepest=2 * max(lengths),
        )
        for t in TEMPERATURES
        for way, (decoding, threads) in WAYS.items()
        for length in ((None,) if way in PLAIN else lengths)
    ]


def speed(sums: Sums, method: str) -> Float[np.ndarray, " samples"]:
    """Tokens per second of steps."""
    return sums.ratio(method, "stepped", "stepping")


def best(sums: Sums, ways: Sequence[str], lengths: Sequence[int], t: float) -> Float[np.ndarray, " samples"]:
    """Speed of the best way and length, chosen on the other half of the prompts."""
    names = [name(way, n, t) for way in ways for n in ((None,) if way in PLAIN else lengths)]
    return sums.best("stepped", "stepping", names)


def findings(sums: Sums, lengths: Sequence[int] = LENGTHS) -> Findings:
    """Tables and claims."""
    lines: list[Sequence[object]] = []
    claims, verdicts = list[Claim](), []
    for t in TEMPERATURES:
        plain = best(sums, PLAIN, lengths, t)
        for way in WAYS:
            for own in (name(way, n, t) for n in ((None,) if way in PLAIN else lengths)):
                lines.append(
                    [
                        own,
                        IntervalEstimate.of(sums.ratio(own, "accepted", "drafted")).text() if way in DRAFTING else "",
                        IntervalEstimate.of(sums.efficiency(own)).text(),
                        IntervalEstimate.of(speed(sums, own)).text(".1f"),
                        IntervalEstimate.of(speed(sums, own) / plain).text(),
                    ]
                )
        claims += _claims(sums, lengths, t)
        verdicts.append(sentence(sums, lengths, t))
    head = ("method", "acceptance", "block efficiency", "tokens/s", "times the fastest plain decoding")
    tables = [Table(head=head, lines=lines), *(Table(text=text) for text in verdicts)]
    return Findings(tables=tables, claims=claims)


def sentence(sums: Sums, lengths: Sequence[int], t: float) -> str:
    """Whether overlapping pays on this machine, in one sentence."""
    real = gain(
        best(sums, ("pearl, a thread each",), lengths, t), best(sums, ("step", "step, two threads"), lengths, t)
    )
    verdict = "pays" if real.low > 0 else "does not pay" if real.high < 0 else "neither pays nor costs beyond noise"
    return (
        f"At temperature {t:g}, overlapping in two threads of this machine {verdict}: {real.text('+.1f')} % of tokens "
        "per second against drafting in turn with as many threads."
    )


def _claims(sums: Sums, lengths: Sequence[int], t: float) -> list[Claim]:
    def of(*ways: str) -> Float[np.ndarray, " samples"]:
        return best(sums, ways, lengths, t)

    seconds = float(sum(sums.get(method, "seconds")[0] for method in sums.methods))
    claim = partial(PAPER.claim, num_prompts=sums.num_prompts, seconds=seconds, unit=SPEED, least=0.0)
    chosen = "for each the length that is best on the other half of the prompts"
    two = f"simulated clock of two devices of one thread each; {chosen}"
    return [
        claim(
            f"PEARL is faster than drafting in turn, two devices, temperature {t:g}.",
            gain(of("pearl, simulated"), of("step")),
            published="up to 50" if t == 0 else None,
            note=two,
        ),
        claim(
            f"PEARL is faster than plain decoding, two devices, temperature {t:g}.",
            gain(of("pearl, simulated"), of("plain")),
            published="up to 343" if t == 0 else None,
            note=two,
        ),
        claim(
            f"PEARL is faster than drafting in turn, two threads, temperature {t:g}.",
            gain(of("pearl, a thread each"), of("step", "step, two threads")),
            published=None,
            note=f"two threads for either; {chosen}",
        ),
    ]


@options.with_fields(Setting, without=("threads", "as_is"), num_prompts=16)
def main(
    setting: Setting,
    lengths: Annotated[str, typer.Option(help="Draft lengths, with commas.")] = ",".join(map(str, LENGTHS)),
) -> list[dict[str, Any]]:
    """Measure drafting and verifying at once against in turn."""
    chosen = options.whole_numbers("--lengths", lengths)
    with folder(setting.out, "pearl", {**vars(setting), "lengths": list(chosen)}) as place:
        bench = Bench(setting)
        rows = bench.measure(place, "measured", methods(chosen), bench.jobs(bench.questions(setting.num_prompts)))
        return place.finish(replace(findings(Sums(rows), chosen), text=setting.about))
