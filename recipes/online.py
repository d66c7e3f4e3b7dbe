"""Online speculative decoding: a draft model that learns from a shifting stream, against a frozen one (Liu 2023).

`python -m recipes online --data TEXTS --out DIR` serves openings of stories, then of Python files, then of word
problems. The draft model learns from these requests while they run. Every request is new, and it is drafted with the
weights that the requests before it have taught. It is judged along its own output with these weights, and with those
that the draft model began with. A seed is another order of the prompts, with other draws.

`recipes/small_draft` guesses well on all these domains from the begin. `--text-steps 500 --work DIR` begins with a
draft model that has read only the other domains of the data, so that there is more to learn.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer
from jaxtyping import Float

from outrider.bench.claims import Claim, Paper
from outrider.bench.evidence import Estimate, Row, Sums, gain
from outrider.bench.folder import folder
from outrider.bench.plot import Curve, Panel
from outrider.bench.report import Findings, Table
from outrider.bench.turns import Turn, turns
from outrider.core.types import InputError
from outrider.embedded import EMBEDDED_TARGET
from outrider.host.threads import use_threads
from outrider.lm.hf.open import open_model, open_tokenizer
from recipes import options
from recipes.online_stream import ARMS, DEPTH, FROZEN, LEARNING, Stream, openings, outsider
from recipes.trained import PROMPT, TEMPERATURES, Seed

PAPER = Paper(name="Liu et al. 2023, OSD", url="https://arxiv.org/abs/2310.07177")
PUBLISHED = "+0.1 to +0.65"
"""How much the paper's acceptance rates rise."""
DRAFT = Path(__file__).parent / "small_draft"
PARTS = 4
"""The requests of a domain are shown in so many parts, one after another."""
QUICK = {"requests": 4, "max_new_tokens": 10, "interval": 2, "seeds": 1}


def sums_of(
    rows: Sequence[Row], temperature: int, domain: str | None = None, part: int | None = None, parts: int = PARTS
) -> Sums:
    """Sums of both draft models at a temperature: over all requests, or those of a domain, or of a part of a domain.

    Args:
        part: Which of `parts` equal parts of a domain's requests, in the order in which they came.
    """
    kept = [row for row in rows if row["temperature"] == temperature and domain in (None, row["category"])]
    count = 1 + max((row["place"] for row in kept), default=0)
    flat = []
    for row in kept:
        # A prompt has another place with each seed. What is not in the part counts nothing.
        counts = part is None or row["place"] * parts // count == part
        head = {name: row[name] for name in ("prompt", "seed", "category")}
        flat += [head | {"method": arm} | {name: counts * value for name, value in row[arm].items()} for arm in ARMS]
    return Sums(flat, crossed=True)


def acceptance(sums: Sums, arm: str) -> Float[np.ndarray, " samples"]:
    """Acceptance rate: the mean over all places of the outputs, with its bootstrap."""
    return sums.ratio(arm, "first", "places")


def rise(sums: Sums) -> Estimate:
    """By how much the acceptance rate of the draft model that learns is higher."""
    return Estimate.of(acceptance(sums, LEARNING) - acceptance(sums, FROZEN))


def table(rows: Sequence[Row], domains: Sequence[str], temperature: int) -> Table:
    """Acceptance at the begin and at the end of each domain, and gains."""
    lines: list[Sequence[object]] = []
    for domain in domains:
        line: list[object] = [domain]
        for part in (0, PARTS - 1):
            sums = sums_of(rows, temperature, domain, part)
            line += [Estimate.of(acceptance(sums, arm)).text(".3f") for arm in ARMS] + [rise(sums).text("+.3f")]
        whole = sums_of(rows, temperature, domain)
        line += [rise(whole).text("+.3f")]
        line += [Estimate.of(whole.ratio(arm, "tokens", "steps")).text(".3f") for arm in ARMS]
        line += [gain(*(whole.ratio(arm, "tokens", "steps") for arm in (LEARNING, FROZEN))).text("+.1f")]
        lines.append(line)
    head = ["domain"]
    for which in ("first quarter", "last quarter"):
        head += [f"{FROZEN}, {which}", f"{LEARNING}, {which}", f"gain, {which}"]
    head += ["gain, all", f"tokens per step, {FROZEN}", f"tokens per step, {LEARNING}", "gain in tokens per step, %"]
    return Table(title=f"Acceptance rate over the stream, temperature {temperature}", head=head, lines=lines)


def panel(rows: Sequence[Row], domains: Sequence[str], temperature: int) -> Panel:
    """Acceptance over the stream."""
    parts = [sums_of(rows, temperature, domain, part) for domain in domains for part in range(PARTS)]
    places = [float(place) for place in range(1, len(parts) + 1)]
    return Panel(
        title=f"temperature {temperature}",
        x=f"quarters of {', then '.join(domains)}",
        y="acceptance rate",
        curves=[
            Curve(
                label=arm,
                x=places,
                y=[Estimate.of(acceptance(sums, arm)) for sums in parts],
                dashed=arm == FROZEN,
            )
            for arm in ARMS
        ],
    )


def claims(rows: Sequence[Row], domains: Sequence[str]) -> list[Claim]:
    """Whether learning raises acceptance on a domain, over its last quarter and over all of its requests."""
    found = []
    for temperature in TEMPERATURES:
        for domain in domains:
            for part, when in ((PARTS - 1, "in the last quarter of its requests"), (None, "over all its requests")):
                sums = sums_of(rows, temperature, domain, part)
                claim = PAPER.claim(
                    f"Learning from the stream accepts more tokens: {domain}, {when}, temperature {temperature}.",
                    rise(sums),
                    num_prompts=sums.num_prompts // (1 if part is None else PARTS),
                    published=PUBLISHED,
                    unit="acceptance rate",
                    least=0.0,
                    note="each request is judged with the weights that the requests before it have taught",
                    rests_on=ARMS,
                )
                found.append(claim)
    return found


@dataclass(frozen=True, kw_only=True)
class Warmth:
    """A temperature, as the way of a turn."""

    temperature: int

    @property
    def name(self) -> str:
        """As rows name it."""
        return f"temperature-{self.temperature}"


def main(
    data: Annotated[Path, typer.Option(help="JSON lines with `domain` and `text`, plain or gzipped.")],
    out: options.Out = None,
    target: options.Target = None,
    draft: options.Draft = DRAFT,
    text_steps: Annotated[
        int, typer.Option(min=0, help="Begin with a draft model that has learnt the other domains so many steps.")
    ] = 0,
    work: Annotated[Path | None, typer.Option(help="Folder of that draft model.")] = None,
    domains: Annotated[str, typer.Option(help="Domains in the order in which they come.")] = "story,python,math",
    requests: Annotated[int, typer.Option(min=PARTS, help="Requests of a domain.")] = 128,
    max_new_tokens: Annotated[int, typer.Option(min=DEPTH + 1, help="Most tokens per request.")] = 64,
    interval: Annotated[int, typer.Option(min=1, help="Requests at once, and between two optimizer steps.")] = 4,
    learning_rate: Annotated[float, typer.Option(help="Of AdamW.")] = 1e-4,
    margin: Annotated[
        float, typer.Option(min=0, max=1, help="How far acceptance may fall before older weights come back; 1: never.")
    ] = 0.1,
    seeds: options.Seeds = 3,
    threads: options.Threads = 1,
) -> None:
    """Serve the stream and compare."""
    use_threads(threads)
    given: dict[str, object] = {
        "data": data,
        "target": target,
        "begins_with": draft if not text_steps else f"other domains, {text_steps} steps",
        "domains": domains,
        "requests": requests,
        "seeds": seeds,
    }
    given |= {"max_new_tokens": max_new_tokens, "interval": interval, "learning_rate": learning_rate, "margin": margin}
    place_of_target, names = target or str(EMBEDDED_TARGET), [name.strip() for name in domains.split(",")]
    if text_steps and work is None:
        raise InputError("--text-steps trains a draft model; name a folder for it with --work")
    with folder(out, "online", given | {"out": out}) as place:
        tokenizer = open_tokenizer(place_of_target)
        asked = openings(data, names, requests, tokenizer)
        if text_steps and work is not None:
            draft = outsider(work / f"without-{'-'.join(names)}-{text_steps}", data, names, text_steps, tokenizer)
        stream = Stream(
            domains=asked,
            target=place_of_target,
            draft=draft,
            max_new_tokens=max_new_tokens,
            interval=interval,
            learning_rate=learning_rate,
            margin=margin,
        )
        model = open_model(place_of_target, dtype=torch.float32, device="cpu").requires_grad_(False).eval()

        def run(turn: Turn[Warmth, Seed]) -> Row:
            t, seed = turn.way.temperature, turn.job.number
            task = place.progress.add_task(turn.name, total=len(list(stream.waves(seed))))
            found = stream.served(t, seed, model, lambda: place.progress.advance(task))
            place.progress.remove_task(task)
            return {"temperature": t, "seed": seed, **found}

        todo = turns([Warmth(temperature=t) for t in TEMPERATURES], [Seed(number=n) for n in range(seeds)])
        runs = place.take("served", todo, run)
        rows = [
            {"temperature": run["temperature"], "seed": run["seed"], **each} for run in runs for each in run["each"]
        ]
        place.finish(
            Findings(
                tables=[table(rows, names, t) for t in TEMPERATURES],
                panels=[panel(rows, names, t) for t in TEMPERATURES],
                claims=claims(rows, names),
                text=_about(runs, stream, requests),
            )
        )


def _about(runs: Sequence[Row], stream: Stream, requests: int) -> str:
    rounds, rollbacks = ([run[name] for run in runs] for name in ("rounds", "rollbacks"))
    return (
        f"{requests} requests of each domain, prompts of {PROMPT} tokens, outputs of at most {stream.max_new_tokens}, "
        f"chains of {DEPTH}. One optimizer step after each {stream.interval} requests, learning rate "
        f"{stream.learning_rate:g}; {min(rounds)} to {max(rounds)} steps in a stream. Older weights came back "
        f"{min(rollbacks)} to {max(rollbacks)} times. {len(runs) // len(TEMPERATURES)} seeds. Both draft models are "
        f"judged on the same outputs. The acceptance rate is the mean over all places of the outputs of the chance "
        f"that a draft token there is accepted."
    )
